"""Files on the Hugging Face hub: found through its client, read as any file on a web server."""

from __future__ import annotations

import importlib
from typing import Any

from megamind_ray.config import RetryConfig
from megamind_ray.core.location import Location
from megamind_ray.io.filesystems import call_filesystem, fsspec_filesystem
from megamind_ray.io.http_source import HttpSource
from megamind_ray.io.retry import request_bound_s
from megamind_ray.io.source import Source, storage_errors

__all__ = ["open_hub"]


def open_hub(location: Location, retry: RetryConfig) -> Source:
    """Opens a file of a repository.

    The client's own reads fetch blocks of 5 MiB ahead of what was asked for, and repeat by themselves what fails
    (docs/design/0011); it says where the file is, and who asks for it.

    Raises:
        RequestError: No such file, no permission, or the package is not installed.
        OSError: The hub did not answer.
    """
    filesystem, path = fsspec_filesystem(location, retry)
    utilities: Any = importlib.import_module("huggingface_hub.utils")
    with storage_errors(location.uri):
        address = call_filesystem(filesystem, "url", path, bound_s=request_bound_s(retry))
    headers = utilities.build_hf_headers(token=filesystem.token)
    return HttpSource(location.uri, retry, address=address, headers=headers)
