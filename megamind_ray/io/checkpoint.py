"""Opening a checkpoint: which files it has, what tensors they hold, without reading a weight."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megamind_ray.config import IoConfig, RetryConfig
from megamind_ray.core.location import Location, parse_location
from megamind_ray.core.manifest import FileInfo, Manifest
from megamind_ray.core.tensor import TensorInfo
from megamind_ray.core.tied import tied_names
from megamind_ray.errors import IntegrityError, MegamindError, RequestError, masked
from megamind_ray.io.checksum import crc32
from megamind_ray.io.layout import Layout, check_link, find_layout
from megamind_ray.io.request_pool import run_requests
from megamind_ray.io.safetensors_header import LENGTH_BYTES, Header, header_end, parse_header
from megamind_ray.io.sidecar import (
    Sidecar,
    SidecarFile,
    is_of_folder,
    parse_sidecar,
    recorded_path,
    sidecar_places,
    to_reference,
)
from megamind_ray.io.source import Source
from megamind_ray.io.storage import Browser, PathKind

__all__ = ["open_manifest"]


@dataclass(frozen=True, slots=True)
class _DataFile:
    info: FileInfo
    tensors: tuple[TensorInfo, ...]


def open_manifest(
    uri: str | os.PathLike[str],
    *,
    sidecar: str | os.PathLike[str] | bool | None = None,
    io: IoConfig | None = None,
    retry: RetryConfig | None = None,
) -> Manifest:
    """Reads the headers of a checkpoint, and what else describes it.

    With an index, the checkpoint is the files that it names, with all tensors in them (as transformers loads them, also
    those that the index forgot); other files in the folder are left alone.

    Args:
        uri: A ``.safetensors`` file, a folder with some, or an ``.index.json`` file; a path or a URI.
        sidecar: Recorded checksums. None: at the default places if there are some (of one file: beside it, then its
            folder's); True: there, and they must exist; False: none; else a path or URI. Of a single file, it may be
            recorded with others.
        io: For the number of reads in flight.
        retry: Bounds of the attempts.

    Raises:
        RequestError: Nothing (readable) there, only pickle files, a package is missing, or an index that names what is
            missing or outside the folder.
        IntegrityError: A header, the index or the sidecar is malformed or they contradict each other, or a file
            changed while it was read. With a sidecar, a header is held to its checksum before it is believed.
        SourceError: The storage does not answer.
    """
    browser, io = Browser(retry or RetryConfig()), io or IoConfig()
    try:
        layout = find_layout(parse_location(uri), browser, named=os.fspath(uri))
        recorded = _find_sidecar(layout, sidecar, browser)
        files = _read_files(layout, recorded, browser, io.reads_in_flight(layout.root.uri))
    except MegamindError as error:
        _point_at_mirrors(error, io)
        raise
    tensors = _merge(layout, files)
    config = _read_config(layout, browser)
    infos = tuple(file.info for file in files)
    return Manifest(
        uri=os.fspath(uri),
        root=layout.root.uri,
        files=infos,
        tensors=tensors,
        config=config,
        tied=tied_names(config, tensors.keys()),
        reference=None if recorded is None else to_reference(recorded, infos, is_web=layout.root.is_web),
        header_bytes=browser.counters.header_bytes,
    )


def _point_at_mirrors(error: MegamindError, io: IoConfig) -> None:
    """Says why mirrors were of no help; who names some expects it."""
    if io.mirrors:
        error.message += (
            "; mirrors do not help here: headers, indexes and recorded checksums are read from the checkpoint's own "
            f"folder alone. If all is well at a mirror, give that as the checkpoint: {masked(io.mirrors[0])}"
        )
        error.args = (error.message,)


def _find_sidecar(layout: Layout, sidecar: str | os.PathLike[str] | bool | None, browser: Browser) -> Sidecar | None:
    if sidecar is False:
        return None
    if sidecar is None or sidecar is True:
        recorded = _default_sidecar(layout, browser)
        if recorded is None and sidecar is True:
            raise _no_sidecar(sidecar_places(layout.root, layout.paths, is_single=layout.is_single)[0])
    else:
        location = parse_location(sidecar)
        if browser.kind(location) is PathKind.MISSING:
            raise _no_sidecar(location)
        recorded = parse_sidecar(browser.read_whole(location), location.uri)
    if recorded is not None and layout.is_single:
        return recorded.only(recorded_path(layout.paths[0], is_web=layout.root.is_web))
    return recorded


def _default_sidecar(layout: Layout, browser: Browser) -> Sidecar | None:
    name = recorded_path(layout.paths[0], is_web=layout.root.is_web)
    for place in sidecar_places(layout.root, layout.paths, is_single=layout.is_single):
        raw = browser.read_if_any(place)
        if raw is None:
            continue
        recorded = parse_sidecar(raw, place.uri)
        # Of a folder that one file was named of, it may have been recorded when that file was not there.
        if recorded.has(name) or not (layout.is_single and is_of_folder(place)):
            return recorded
    return None


def _no_sidecar(location: Location) -> RequestError:
    return RequestError(
        f"{location.uri}: no such sidecar; record one first (megamind verify --record), or check its path"
    )


def _read_files(layout: Layout, recorded: Sidecar | None, browser: Browser, num_threads: int) -> list[_DataFile]:
    entries = {} if recorded is None else {file.path: file for file in recorded.files}

    def read(numbered: tuple[int, str]) -> _DataFile:
        number, path = numbered
        name = recorded_path(path, is_web=layout.root.is_web)
        entry = None if recorded is None else entries.get(name) or recorded.entry(name)
        check_link(layout.root, path)
        with _open_data_file(layout, path, browser) as source:
            header = _read_header(source, number, browser, entry, "" if recorded is None else recorded.origin)
            source.check_unchanged()
            return _DataFile(_file_info(path, source, header), header.tensors)

    if len(layout.paths) == 1:  # starting a thread takes longer than reading a header
        return [read((0, layout.paths[0]))]
    return run_requests(read, enumerate(layout.paths), num_in_flight=num_threads, on_failure=browser.stop.set)


def _open_data_file(layout: Layout, path: str, browser: Browser) -> Source:
    try:
        return browser.open(layout.root.join(path))
    except RequestError as error:
        if layout.index is None or not isinstance(error.__cause__, FileNotFoundError):
            raise
        raise RequestError(
            f"{layout.root.join(layout.index).uri}: names the file {path!r}, which is not there; "
            "fetch the checkpoint again"
        ) from error


def _read_header(source: Source, file: int, browser: Browser, entry: SidecarFile | None, origin: str) -> Header:
    if entry is None:
        prefix = browser.read(source, 0, min(LENGTH_BYTES, source.size_bytes))
        end = header_end(prefix, source.size_bytes, uri=source.uri)
        raw = prefix + browser.read(source, LENGTH_BYTES, end)
    else:
        raw = _read_recorded_header(source, browser, entry, origin)
    return parse_header(raw, source.size_bytes, uri=source.uri, file=file)


def _read_recorded_header(source: Source, browser: Browser, entry: SidecarFile, origin: str) -> bytes:
    """The header as recorded; its length is taken from the sidecar, since the prefix may be what is damaged."""
    remedy = "fetch it again, or if it was meant to change, record the checksums again"
    if source.size_bytes != entry.size_bytes:
        raise IntegrityError(
            f"{source.uri}: size is {source.size_bytes} bytes, the sidecar {origin} says {entry.size_bytes}; the file "
            f"is not the one that was recorded: {remedy}",
            file=source.uri,
        )
    raw = browser.read(source, 0, entry.data_begin)
    actual = crc32(raw)
    if actual != entry.header_crc32:
        raise IntegrityError(
            f"{source.uri}: the header, bytes [0, {entry.data_begin}), has CRC-32 {actual:08x}, the sidecar {origin} "
            f"says {entry.header_crc32:08x}; the file is damaged: {remedy}",
            file=source.uri,
            begin=0,
            end=entry.data_begin,
        )
    return raw


def _file_info(path: str, source: Source, header: Header) -> FileInfo:
    return FileInfo(
        path=path,
        size_bytes=source.size_bytes,
        data_begin=header.data_begin,
        mtime_ns=source.version.mtime_ns,
        etag=source.version.etag,
        metadata=header.metadata,
    )


def _merge(layout: Layout, files: Sequence[_DataFile]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for tensor in file.tensors:
            other = tensors.setdefault(tensor.name, tensor)
            if other is not tensor:
                raise _duplicate_error(layout, tensor, layout.paths[other.file], file.info.path)
    for name, path in layout.weight_map.items():
        found = tensors.get(name)
        if found is None or layout.paths[found.file] != path:
            assert layout.index is not None
            place = "in no file" if found is None else f"in {layout.paths[found.file]!r}"
            uri = layout.root.join(path).uri
            raise IntegrityError(
                f"{layout.root.join(layout.index).uri}: names tensor {name!r:.200} in {path!r}, but it is {place}; "
                "index and files do not belong together, fetch the checkpoint again",
                file=uri,
                tensor=name,
            )
    return tensors


def _duplicate_error(layout: Layout, tensor: TensorInfo, first: str, second: str) -> RequestError | IntegrityError:
    problem = f"{layout.root.uri}: tensor {tensor.name!r:.200} is both in {first!r} and in {second!r}"
    if layout.index is None:
        return RequestError(f"{problem}; give the path of one file, or an index that names the files to load")
    return IntegrityError(
        f"{problem}, both of which {layout.index} names; fetch the checkpoint again",
        file=layout.root.join(second).uri,
        tensor=tensor.name,
        begin=tensor.begin,
        end=tensor.end,
    )


def _read_config(layout: Layout, browser: Browser) -> Mapping[str, object]:
    location: Location = layout.root.join("config.json")
    check_link(layout.root, "config.json")
    raw = browser.read_if_any(location)
    if raw is None:
        return {}
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{location.uri}: not valid JSON ({error}); correct it or remove it") from error
    if not isinstance(config, dict):
        raise RequestError(
            f"{location.uri}: must be a JSON object with the model's configuration; correct it or remove it"
        )
    return config
