"""What a file is that should be safetensors and is not: its first 8 bytes tell the kinds that people meet."""

from __future__ import annotations

from typing import Final

__all__ = ["other_kind"]

_PAGE: Final = (
    "is a web page or XML, most often a login or an error of the server that was saved under this name; fetch the file "
    "itself, with a token where the model asks for one"
)
_PICKLE: Final = (
    "is a pickle of torch under another name, which can run any code when it is read, so it is not; convert it once, "
    "where you trust it: torch.load(..., weights_only=True), then safetensors.torch.save_file"
)
_JSON: Final = (
    "is JSON from its first byte, most often an index or an error of the server that was saved under this name; fetch "
    "the file itself"
)
_KINDS: Final = (
    (b"version ", "is a pointer of git-lfs, the file itself was not fetched; run `git lfs pull` in its folder"),
    (b"<", _PAGE),
    (b"PK\x03\x04", _PICKLE),  # torch.save
    (b"\x80\x02\x8a\x0a", _PICKLE),  # torch.save before 1.6
    (b"{", _JSON),
    (b"[", _JSON),
    (b"GGUF", "is a GGUF file; fetch the safetensors files of the model"),
    (b"\x89HDF\r\n", "is an HDF5 file; fetch the safetensors files of the model"),
    (b"\x93NUMPY", "is a numpy array; fetch the safetensors files of the model"),
    (b"\x1f\x8b\x08", "is compressed by gzip; unpack it with gunzip"),
    (b"\x28\xb5\x2f\xfd", "is compressed by zstd; unpack it with unzstd"),
)


def other_kind(prefix: bytes) -> str | None:
    """What a file is and what to do about it, as the predicate of a sentence; None where that cannot be told.

    To be asked only where the first 8 bytes cannot be the length of a header: as a length some of them are possible.

    Args:
        prefix: The first 8 bytes of the file.
    """
    text = prefix.lstrip() or prefix  # pages often begin with a line end
    return next((words for mark, words in _KINDS if text.startswith(mark) or prefix.startswith(mark)), None)
