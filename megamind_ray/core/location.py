"""Where things are: local paths and URIs."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from megamind_ray.errors import RequestError

__all__ = ["URI_FORMS", "Location", "parse_location"]

URI_FORMS: Final = "a path, file:, s3://, gs://, az://, http://, https://, hf:// or memory://"
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_SCHEMES: Final = ("s3", "gs", "az", "http", "https", "hf", "memory")
_BUCKETS: Final = ("s3", "gs", "az")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
# A presigned URL with a session's token takes 2-3 kB; servers refuse requests from 8 kB on.
_LONGEST: Final = 8192
# ORG/NAME as the hub has them, a revision, a path in it.
_HUB: Final = re.compile(
    r"(?:(?:models|datasets|spaces|buckets)/)?[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*(?:@[^/@-][^/@]*)?(?:/.*)?)?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Location:
    """A file or folder.

    Attributes:
        uri: Absolute path, or URI, without a trailing slash.
        scheme: Scheme of the URI in lower case, None for a local path.
    """

    uri: str
    scheme: str | None

    @property
    def is_local(self) -> bool:
        return self.scheme is None

    @property
    def is_web(self) -> bool:
        return self.scheme in ("http", "https")

    @property
    def is_bucket(self) -> bool:
        """Whether it is all of a bucket or container: a folder, whose name is nobody's to add to."""
        return self.scheme in _BUCKETS and self.uri.count("/") == 2

    @property
    def name(self) -> str:
        """Last part of the path, without the query of a URL."""
        return self._split_query()[0].rpartition("/")[2]

    def split(self) -> tuple[Location, str]:
        """The folder, and the name of the file in it, such that joining them with ``/`` gives ``uri`` again."""
        base, query = self._split_query()
        folder, _, name = base.rpartition("/")
        return Location(folder, self.scheme), name + query

    def join(self, path: str) -> Location:
        """A file below this folder."""
        return Location(f"{self.uri}/{path}", self.scheme)

    def _split_query(self) -> tuple[str, str]:
        if self.is_web:
            base, mark, query = self.uri.partition("?")
            return base, mark + query
        return self.uri, ""


def parse_location(uri: str | os.PathLike[str]) -> Location:
    """Reads a path or URI as users write them: ``~``, ``file:`` in all its forms, a trailing slash.

    Raises:
        RequestError: It is empty, or a URI of a kind that is not supported.
    """
    # People give None where a variable was not set, bytes, or the arguments of a call in another order.
    text = os.fspath(uri) if isinstance(uri, (str, os.PathLike)) else uri
    if not isinstance(text, str):
        raise RequestError(
            f"{text!r:.80}, of type {type(text).__name__}, names no checkpoint; give {URI_FORMS}, as text or as a Path"
        )
    if not text or "\0" in text:
        raise RequestError(f"{text!r:.80} names no checkpoint; give {URI_FORMS}")
    if len(text) > _LONGEST:
        raise RequestError(f"{text[:80]!r}... names no checkpoint: it is {len(text)} characters long; give {URI_FORMS}")
    if text.startswith("file:"):
        return Location(_local_path(_path_of_file_uri(text)), None)
    match = _SCHEME.match(text)
    if match is None and "://" not in text:
        return Location(_local_path(os.path.expanduser(text)), None)  # noqa: PTH111 - Path fails on an unknown user
    scheme = match[1].lower() if match else text.partition("://")[0]
    if match is None or scheme not in _SCHEMES:
        raise RequestError(f"{text}: {scheme}:// is not supported; give {URI_FORMS}")
    rest = text[match.end() :].rstrip("/")
    if scheme != "memory" and (not rest or rest.startswith("/")):
        raise RequestError(f"{text}: names no bucket, host or repository; give for example {scheme}://NAME/PATH")
    if found := _CONTROL.search(rest):
        raise RequestError(
            f"{text!r:.200}: has the control character {found[0]!r}; write it percent-encoded if it is meant"
        )
    if scheme == "hf":
        _check_hub(text, rest)
    return Location(f"{scheme}://{rest}", scheme)


def _check_hub(text: str, rest: str) -> None:
    """Refuses what the hub cannot have, before it is asked; names of it stand in commands that we print."""
    if _HUB.fullmatch(rest) is None or not {".", ".."}.isdisjoint(re.split("[/@]", unquote(rest))):
        raise RequestError(
            f"{text!r:.200}: is no repository of the Hugging Face hub; give hf://ORG/NAME[@REVISION][/PATH]"
        )


def _path_of_file_uri(text: str) -> str:
    rest = text.removeprefix("file:")
    if rest.startswith("//"):
        host, slash, path = rest[2:].partition("/")
        if host not in ("", "localhost"):
            raise RequestError(f"{text}: names the host {host!r}; a file: URI must be of this machine (file:///PATH)")
        rest = slash + path
    if not rest:
        raise RequestError(f"{text}: names no path; give for example file:///models/llama")
    return unquote(rest)


def _local_path(path: str) -> str:
    try:
        if b"\0" in os.fsencode(path):
            raise RequestError(f"{path!r:.200}: no path has the character NUL; correct it")
    except UnicodeEncodeError as error:
        raise RequestError(f"{path!r:.200}: no path has the character {path[error.start]!r}; correct it") from error
    absolute = str(Path(os.path.abspath(path)))  # noqa: PTH100 - Path.absolute() keeps ".."
    return "" if absolute == "/" else absolute
