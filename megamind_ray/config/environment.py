"""Variables of others that say something to us: Ray's, the AWS tools', and the Hugging Face client's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["AwsEnvironment", "aws_environment", "hub_cache_path", "ray_address"]


def ray_address(environ: Mapping[str, str] | None = None) -> str | None:
    """Ray's own variable for the cluster to join, or None."""
    env = os.environ if environ is None else environ
    return env.get("RAY_ADDRESS") or None


@dataclass(frozen=True, slots=True)
class AwsEnvironment:
    """What the environment says to S3 clients, as far as one must be chosen or told.

    The variables themselves are read by the clients.

    Attributes:
        variables: All ``AWS_*`` variables, some of them secret: never shown. Equal environments share a client.
        endpoint: Address of the S3 API, None for Amazon's own.
        needs_files: Credentials are in files of the AWS tools (a profile), which only some clients read.
    """

    variables: frozenset[tuple[str, str]] = field(repr=False)
    endpoint: str | None
    needs_files: bool


def aws_environment(environ: Mapping[str, str] | None = None) -> AwsEnvironment:
    """The AWS tools' own variables."""
    env = os.environ if environ is None else environ
    home = Path(env.get("HOME") or "/")
    # By os.path: Path.exists raises where a folder may not be looked into, as /root for another user of a container.
    files = [
        Path(env.get("AWS_SHARED_CREDENTIALS_FILE") or home / ".aws/credentials"),
        Path(env.get("AWS_CONFIG_FILE") or home / ".aws/config"),
    ]
    given = any(env.get(name) for name in ("AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE", "AWS_WEB_IDENTITY_TOKEN_FILE"))
    return AwsEnvironment(
        variables=frozenset((name, value) for name, value in env.items() if name.startswith("AWS_")),
        endpoint=env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL") or None,
        needs_files=bool(env.get("AWS_PROFILE")) or (not given and any(map(os.path.exists, files))),
    )


def hub_cache_path(environ: Mapping[str, str] | None = None) -> Path:
    """Where the Hugging Face client keeps what it downloaded, by its own variables."""
    env = os.environ if environ is None else environ
    home = env.get("HF_HOME") or os.path.join(env.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")  # noqa: PTH118
    named = env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")  # noqa: PTH118
    return Path(os.path.expanduser(named))  # noqa: PTH111 - Path fails where there is no home
