"""Which files make a checkpoint: a single file, a folder with an index, or a folder of data files."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from megamind_ray.core.location import Location
from megamind_ray.errors import IntegrityError, RequestError, listed
from megamind_ray.io.parts import require_all_parts, what_to_fetch
from megamind_ray.io.safetensors_header import strict_json_object
from megamind_ray.io.storage import Browser, Listing, PathKind

__all__ = ["INDEX_SUFFIX", "Layout", "check_link", "find_layout"]

DATA_SUFFIX: Final = ".safetensors"
INDEX_SUFFIX: Final = ".safetensors.index.json"
_MAIN_FILE: Final = "model.safetensors"
_MAIN_INDEX: Final = "model.safetensors.index.json"
_PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_OTHER_FORMATS: Final = (".json", ".gguf", ".ggml", ".onnx", ".h5", ".npz", ".npy", ".msgpack", ".txt", ".md", ".zip")
_HUB_MODEL: Final = "models--"
_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w-]*(\.[\w-]+)*/[A-Za-z0-9][\w-]*(\.[\w-]+)*")
# Mistral publishes the same weights a second time under its own names; nobody wants both.
_SECOND_COPY: Final = "consolidated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The files of a checkpoint.

    Attributes:
        root: Their folder.
        paths: Data files relative to it, sorted.
        index: Name of the index file, None without one.
        weight_map: Name of each tensor -> path of its file, as the index says; empty without one.
        is_single: The user named one data file.
    """

    root: Location
    paths: tuple[str, ...]
    index: str | None = None
    weight_map: Mapping[str, str]
    is_single: bool = False


def find_layout(location: Location, browser: Browser, *, named: str = "") -> Layout:
    """Finds the data files of a checkpoint and reads its index, where there is one.

    Of a model in the Hugging Face cache (``models--ORG--NAME``) the snapshot is taken that ``refs/main`` names.
    ``named`` is how the user named it, for messages.

    Files of the folder that an index does not name are left alone. Without an index, all ``.safetensors`` files count,
    less hidden ones and ``consolidated*`` beside others.

    Raises:
        RequestError: Nothing there, only pickle files, some parts of several, more than one index, or an index that
            names files which are missing or outside the folder.
        IntegrityError: The index is malformed.
        SourceError: The storage does not answer.
    """
    kind = browser.kind(location)
    if kind is PathKind.MISSING:
        raise RequestError(
            f"{location.uri}: no such file or folder; check the path of the checkpoint{_hub_hint(named)}"
        )
    if kind is PathKind.OTHER:
        raise RequestError(
            f"{location.uri}: neither a file nor a folder; give a safetensors file or a folder with some"
        )
    if kind is PathKind.FOLDER:
        return _folder_layout(_snapshot(location, browser) or location, browser)
    root, name = location.split()
    if location.name.endswith(".index.json"):
        return _index_layout(root, name, browser.listing(root), browser)
    _refuse_other_formats(location)
    return Layout(root=root, paths=(_readable(name, location),), weight_map={}, is_single=True)


def _hub_hint(named: str) -> str:
    """People give models of the Hugging Face hub as its own library takes them."""
    return (
        f", or give hf://{named} for the model of that name on the Hugging Face hub"
        if _HUB_NAME.fullmatch(named)
        else ""
    )


def check_link(root: Location, path: str) -> None:
    """Refuses a link out of a local folder, other than into the blobs of a Hugging Face cache.

    Raises:
        RequestError: The file is outside ``root`` once links are followed.
    """
    if not root.is_local:
        return
    folder = Path(root.uri or "/").resolve()
    target = Path(os.path.realpath(folder / path))
    if target.is_relative_to(folder):
        return
    for revision in (folder, *folder.parents):  # .../models--ORG--NAME/snapshots/REVISION, or a folder in it
        if revision.parent.name == "snapshots" and target.parent == (revision.parent.parent / "blobs").resolve():
            return
    raise RequestError(
        f"{root.uri}/{path}: is a link to {target}, outside its folder, which is followed only in the layout of the "
        "Hugging Face cache (snapshots/REVISION/FILE -> blobs/HASH); copy the file, or give the folder it is in"
    )


def _snapshot(folder: Location, browser: Browser) -> Location | None:
    """The snapshot to load of a model's folder in the Hugging Face cache; None of any other folder."""
    if not folder.is_local or not folder.name.startswith(_HUB_MODEL):
        return None
    snapshots = folder.join("snapshots")
    if browser.kind(snapshots) is not PathKind.FOLDER:
        return None
    listing = browser.listing(snapshots)
    found = () if listing is None else listing.folders
    main = folder.join("refs/main")
    if browser.kind(main) is PathKind.FILE:
        revision = browser.read_whole(main).decode(errors="replace").strip()
        if revision in found:
            return snapshots.join(revision)
        problem = f"refs/main names the snapshot {revision!r:.200}, which is not there"
    else:
        problem = "has no refs/main"
    raise RequestError(
        f"{folder.uri}: {problem}; give the folder of one snapshot ({listed(found) or 'there is none'}), or fetch the "
        "model again"
    )


def _folder_layout(folder: Location, browser: Browser) -> Layout:
    listing = browser.listing(folder)
    if listing is None:
        return _probed_layout(folder, browser)
    files = [name for name in listing.files if not name.startswith(".")]
    indexes = [name for name in files if name.endswith(INDEX_SUFFIX)]
    if indexes:
        if len(indexes) > 1 and _MAIN_INDEX not in indexes:
            raise RequestError(f"{folder.uri}: has several indexes; give the path of one: {', '.join(indexes)}")
        return _index_layout(folder, _MAIN_INDEX if _MAIN_INDEX in indexes else indexes[0], listing, browser)
    paths = [name for name in files if name.endswith(DATA_SUFFIX)]
    paths = [name for name in paths if not name.startswith(_SECOND_COPY)] or paths
    if paths:
        require_all_parts(folder.uri, paths, listing)
        return Layout(root=folder, paths=tuple(_readable(path, folder) for path in paths), weight_map={})
    pickles = [name for name in files if name.endswith(_PICKLES)]
    if pickles:
        raise _pickle_error(folder.uri, pickles)
    raise RequestError(
        f"{folder.uri}: {_what_is_there(listing)}; give a folder with {DATA_SUFFIX} files, or such a file"
    )


def _readable(name: str, location: Location) -> str:
    """The name of a data file, which becomes a column of the plan."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{location.uri}: the file name {name!r} is not UTF-8; rename the file") from error
    return name


def _what_is_there(listing: Listing) -> str:
    if not listing.files and not listing.folders:
        return "the folder is empty"
    hint = f" (it has the folders {listed(listing.folders)})" if listing.folders else ""
    return f"no {DATA_SUFFIX} files directly in this folder{hint}"


def _probed_layout(folder: Location, browser: Browser) -> Layout:
    """A folder on a web server, which has no listing: try the two names that Hugging Face uses.

    The index need not be there, and some servers refuse to say so. If the file is refused too, that is the answer.
    """
    raw = browser.read_if_any(folder.join(_MAIN_INDEX))
    if raw is not None:
        return _index_layout(folder, _MAIN_INDEX, None, browser, raw)
    if browser.kind(folder.join(_MAIN_FILE)) is PathKind.FILE:
        return Layout(root=folder, paths=(_MAIN_FILE,), weight_map={})
    raise RequestError(
        f"{folder.uri}: serves neither {_MAIN_INDEX} nor {_MAIN_FILE}; give the address of a {DATA_SUFFIX} file "
        f"or of an {INDEX_SUFFIX} file"
    )


def _index_layout(
    root: Location, name: str, listing: Listing | None, browser: Browser, raw: bytes | None = None
) -> Layout:
    """As the index says; ``raw`` is what is in it, where that has been read."""
    uri = root.join(name).uri
    check_link(root, name)
    weight_map = _parse_index(browser.read_whole(root.join(name)) if raw is None else raw, uri)
    paths = tuple(sorted(set(weight_map.values())))
    pickles = [path for path in paths if path.endswith(_PICKLES)]
    if pickles:
        raise _pickle_error(uri, pickles)
    if listing is not None:
        missing = [path for path in paths if "/" not in path and path not in listing.files]
        if missing:
            raise RequestError(
                f"{uri}: names {len(missing)} of {len(paths)} files that are not there: {listed(missing)}; "
                f"{what_to_fetch(listing)}"
            )
    return Layout(root=root, paths=paths, index=name, weight_map=weight_map)


def _parse_index(raw: bytes, uri: str) -> dict[str, str]:
    weight_map = strict_json_object(raw, uri=uri, what="index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise IntegrityError(
            f"{uri}: the index has no weight_map with tensors; fetch it again, or remove it to load all files",
            file=uri,
        )
    safe: dict[str, str] = {}
    for tensor, path in weight_map.items():
        if not isinstance(path, str):
            raise IntegrityError(
                f"{uri}: tensor {tensor!r:.200}: {path!r:.200} is not the name of a file; fetch the index again",
                file=uri,
                tensor=tensor,
            )
        if path not in safe:
            safe[path] = _safe_path(path, tensor, uri)
    return {tensor: safe[path] for tensor, path in weight_map.items()}


def _safe_path(path: str, tensor: str, uri: str) -> str:
    """The path of an index entry, if it stays in the folder whatever storage it is."""
    parts = PurePosixPath(path).parts
    # "::" and "://" would make fsspec open something else; a backslash is a folder on some systems.
    if not parts or path.startswith("/") or ".." in parts or any(mark in path for mark in ("\\", "\0", "::", "://")):
        raise RequestError(
            f"{uri}: tensor {tensor!r:.200}: the file {path!r:.200} is not a path inside the checkpoint's folder; "
            "do not trust this checkpoint, or correct the index"
        )
    return "/".join(parts)


def _refuse_other_formats(location: Location) -> None:
    name = location.name.lower()
    if name.endswith(_PICKLES):
        raise _pickle_error(location.uri, [location.name])
    if name.endswith(_OTHER_FORMATS):
        raise RequestError(
            f"{location.uri}: not a safetensors file; give a {DATA_SUFFIX} file, an {INDEX_SUFFIX} file or a folder"
        )


def _pickle_error(uri: str, names: Sequence[str]) -> RequestError:
    old = names[0]
    new = Path(old).with_suffix(DATA_SUFFIX).name
    return RequestError(
        f"{uri}: only pickle files ({listed(names)}), which can run any code when they are read, so they are not. "
        "Convert each once, where you trust it: "
        'python -c "import torch; from safetensors.torch import save_file; '
        f"w = torch.load('{old}', map_location='cpu', weights_only=True); "
        f"save_file({{k: v.clone().contiguous() for k, v in w.items()}}, '{new}')\""
    )
