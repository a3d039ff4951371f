"""A file of this machine, read by ranges."""

from __future__ import annotations

import os
import stat

from megamind_ray.config import DirectMode
from megamind_ray.errors import RequestError
from megamind_ray.io.source import FileVersion, OpenSource, ShortReadError

__all__ = ["LocalSource"]


class LocalSource(OpenSource):
    """A file of this machine, read at offsets through one descriptor.

    Args:
        path: The file.
        direct: ``auto``, ``always`` or ``never``: whether to read past the page cache.

    Raises:
        OSError: It cannot be opened.
        RequestError: It is not a regular file.
    """

    def __init__(self, path: str | os.PathLike[str], *, direct: DirectMode = "auto") -> None:
        name = os.fspath(path)
        self._direct = direct
        # Non-blocking, since opening a named pipe would wait for a writer for ever.
        self._fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise RequestError(f"{name}: is not a regular file; give a safetensors file or a folder with some")
        super().__init__(name, _local_version(status))

    def read_into(self, offset: int, buffer: memoryview, *, past_cache: bool = False) -> None:
        view = buffer.cast("B")
        self.require_inside(offset, view.nbytes)
        done = 0
        while done < view.nbytes:  # Linux gives at most 2 GiB a call, network file systems less
            count = os.preadv(self._fd, [view[done:]], offset + done)
            if count == 0:
                self.check_unchanged()
                raise ShortReadError(f"end of file at byte {offset + done} of {self.size_bytes}")
            done += count

    def current_version(self) -> FileVersion:
        return _local_version(os.fstat(self._fd))

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _local_version(status: os.stat_result) -> FileVersion:
    return FileVersion(status.st_size, status.st_mtime_ns)
