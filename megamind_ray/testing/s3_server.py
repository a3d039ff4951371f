"""An S3 API on loopback, for tests and benchmarks: moto's server in a process of its own.

In a process of its own, because it is slow enough to be what a benchmark would measure if it shared our interpreter.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import urllib3

__all__ = ["CREDENTIALS", "S3Server"]

# Any are right for moto; variables of the ecosystem, which the libraries read themselves.
CREDENTIALS: Final[Mapping[str, str]] = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
}
# What moto looks at in a signature is that there is one.
_SIGNED: Final = (
    "AWS4-HMAC-SHA256 Credential=testing/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
)
_BOUND_S: Final = 60.0
# Ends with its standard input, so that it never outlives a test run.
_PROGRAM: Final = """
import logging, sys
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print("http://%s:%d" % server.get_host_and_port(), flush=True)
sys.stdin.read()
server.stop()
"""


class S3Server:
    """Serves buckets until it is closed.

    Attributes:
        uri: Its endpoint.
    """

    def __init__(self) -> None:
        """Starts it.

        Raises:
            AssertionError: It does not start; moto with its ``server`` extra is needed.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        self.uri = self._process.stdout.readline().strip()
        if not self.uri:
            self.close()
            raise AssertionError("moto's server does not start; run: pip install 'moto[server]'")
        self._http = urllib3.PoolManager(timeout=_BOUND_S, retries=False)

    def environment(self, endpoint: str | None = None) -> dict[str, str]:
        """Variables that lead clients here, or to a proxy in front of it."""
        return {**CREDENTIALS, "AWS_ENDPOINT_URL": endpoint or self.uri}

    def make_bucket(self, bucket: str) -> None:
        """Makes an empty bucket."""
        self._put(f"/{bucket}", b"")

    def put(self, bucket: str, key: str, data: bytes, *, public: bool = False) -> None:
        """Writes an object, or replaces it; a public one may be read without a signature."""
        self._put(f"/{bucket}/{key}", data, acl="public-read" if public else "private")

    def put_folder(self, bucket: str, prefix: str, folder: Path) -> None:
        """Writes the files of a folder below a prefix."""
        for path in sorted(folder.iterdir()):
            self.put(bucket, f"{prefix}/{path.name}", path.read_bytes())

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_BOUND_S)
        finally:
            self._process.kill()
            self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _put(self, path: str, data: bytes, *, acl: str = "private") -> None:
        headers = {"Authorization": _SIGNED, "x-amz-acl": acl}
        response = self._http.request("PUT", self.uri + path, body=data, headers=headers)
        assert response.status == 200, f"PUT {path}: {response.status} {response.data[:200]!r}"
