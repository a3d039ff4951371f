"""The one configuration tree. The environment is read here and nowhere else.

Order, later wins: defaults, the profile that ``megamind tune`` wrote on this machine, a TOML file, ``MEGAMIND_*``
variables (``MEGAMIND_IO_CHUNK_BYTES`` is ``io.chunk_bytes``), arguments.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import stat
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from megamind_ray.core.location import parse_location
from megamind_ray.core.profile import Machine, Profile, parse_profile
from megamind_ray.errors import RequestError
from megamind_ray.units import GIB, KIB, MIB, format_bytes, parse_bytes

__all__ = [
    "AwsEnvironment",
    "Config",
    "DeadlineConfig",
    "DirectMode",
    "IoConfig",
    "LoadConfig",
    "PlacementConfig",
    "PlanConfig",
    "PoolConfig",
    "ProfileState",
    "ProfileStatus",
    "RetryConfig",
    "RoutingConfig",
    "find_profile",
    "load_config",
    "profile_path",
    "ray_address",
    "setting_origins",
    "this_machine",
]

DirectMode = Literal["auto", "always", "never"]
ProfileState = Literal["in force", "absent", "off", "ignored"]

_log = logging.getLogger(__name__)

# Waits are shorter: not every clock takes more, and none takes what is not finite.
_DAY_S = 86400
_MAX_DIGITS = 18


def _require(ok: bool, field_name: str, value: object, remedy: str) -> None:
    if not ok:
        raise RequestError(f"config {field_name} = {value!r}: {remedy}")


def _absolute_mirror(base: str) -> str:
    try:
        return parse_location(base).uri
    except RequestError as error:
        raise RequestError(f"config io.mirrors: {error.message}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class IoConfig:
    """Reading from storage.

    Attributes:
        chunk_bytes: Unit of checksum and retry; a sidecar's value goes before it.
        extent_bytes: Longest contiguous read.
        max_gap_bytes: Gaps between demanded ranges up to this size are read over.
        remote_gap_bytes: The same for storage behind a network, where one more request costs more than these bytes.
        read_threads: Reads of local files in flight per process.
        remote_threads: Requests in flight per process to storage behind a network.
        direct: Whether local files are read past the page cache (``O_DIRECT``): ``auto`` where their bytes are not in
            it, ``always``, or ``never``.
        mirrors: Folders or URIs with the same files; asked, in this order, where the checkpoint's own storage fails.
            Kept as absolute paths, of the working directory of who made the configuration: workers have others.
    """

    chunk_bytes: int = 8 * MIB
    extent_bytes: int = 32 * MIB
    max_gap_bytes: int = 4 * KIB
    remote_gap_bytes: int = MIB
    read_threads: int = 8
    remote_threads: int = 16
    direct: DirectMode = "auto"
    mirrors: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _require(
            64 * KIB <= self.chunk_bytes <= GIB and self.chunk_bytes % (4 * KIB) == 0,
            "io.chunk_bytes",
            self.chunk_bytes,
            "take a multiple of 4 KiB from 64 KiB to 1 GiB (8-12 MiB is good)",
        )
        _require(
            self.extent_bytes >= self.chunk_bytes,
            "io.extent_bytes",
            self.extent_bytes,
            f"must be at least io.chunk_bytes = {format_bytes(self.chunk_bytes)}",
        )
        _require(0 <= self.max_gap_bytes <= self.chunk_bytes, "io.max_gap_bytes", self.max_gap_bytes, "0 to a chunk")
        _require(self.remote_gap_bytes >= 0, "io.remote_gap_bytes", self.remote_gap_bytes, "take 0 or more bytes")
        for name in ("read_threads", "remote_threads"):
            _require(1 <= getattr(self, name) <= 256, f"io.{name}", getattr(self, name), "take 1 to 256 threads")
        modes = get_args(DirectMode)
        _require(self.direct in modes, "io.direct", self.direct, f"take {', '.join(modes)}")
        _require(all(self.mirrors), "io.mirrors", self.mirrors, "name a folder or URI in each")
        object.__setattr__(self, "mirrors", tuple(map(_absolute_mirror, self.mirrors)))

    def is_remote(self, root: str) -> bool:
        """Whether ``root``, which is ``Manifest.root``, is behind a network."""
        return "://" in root and not root.startswith("file:")

    def reads_in_flight(self, root: str) -> int:
        """How many reads of a checkpoint one process has in flight; ``root`` is ``Manifest.root``."""
        return self.remote_threads if self.is_remote(root) else self.read_threads

    def gap_bytes(self, root: str) -> int:
        """Gaps up to this size are read over; ``root`` is ``Manifest.root``."""
        return min(self.remote_gap_bytes, self.chunk_bytes) if self.is_remote(root) else self.max_gap_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryConfig:
    """Retries of one chunk on one node: exponential back-off with jitter.

    Attributes:
        attempts: Reads of one chunk from one source, the first included.
        first_wait_s: Longest wait before the second attempt; doubled for each further one.
        max_wait_s: Longest wait before any attempt.
        request_s: A request to storage behind a network that brings nothing for so long has failed.
        quarantine_share: A source of which this share of reads fails is not asked again while there is another.
        quarantine_reads: Reads before that share is looked at.
    """

    attempts: int = 4
    first_wait_s: float = 0.1
    max_wait_s: float = 5.0
    request_s: float = 30.0
    quarantine_share: float = 0.25
    quarantine_reads: int = 16

    def __post_init__(self) -> None:
        _require(1 <= self.attempts <= 20, "retry.attempts", self.attempts, "take 1 to 20")
        _require(
            0 <= self.max_wait_s < _DAY_S, "retry.max_wait_s", self.max_wait_s, "take 0 s or more, less than a day"
        )
        _require(
            0 <= self.first_wait_s <= self.max_wait_s,
            "retry.first_wait_s",
            self.first_wait_s,
            "must be from 0 to retry.max_wait_s",
        )
        _require(0 < self.request_s < _DAY_S, "retry.request_s", self.request_s, "take more than 0 s, less than a day")
        _require(
            0 < self.quarantine_share <= 1, "retry.quarantine_share", self.quarantine_share, "take more than 0, up to 1"
        )
        _require(self.quarantine_reads >= 1, "retry.quarantine_reads", self.quarantine_reads, "take 1 or more reads")


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolConfig:
    """Use of the object store.

    Attributes:
        max_fraction: Share of a node's object store that blocks may take, replicas included.
        keep_fraction: Share of that which kept blocks may take; the rest stays for streaming.
    """

    max_fraction: float = 0.75
    keep_fraction: float = 0.8

    def __post_init__(self) -> None:
        _require(
            0 < self.max_fraction <= 0.75, "pool.max_fraction", self.max_fraction, "take more than 0, at most 0.75"
        )
        _require(0 <= self.keep_fraction <= 0.95, "pool.keep_fraction", self.keep_fraction, "take 0 to 0.95")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig:
    """Limits of the parallel plan.

    Attributes:
        max_replicated_share: A plan that replicates more of the checkpoint's bytes for want of a rule is refused.
        alignment_bytes: Alignment of each view in the arena.
    """

    max_replicated_share: float = 0.30
    alignment_bytes: int = 256

    def __post_init__(self) -> None:
        _require(
            0 <= self.max_replicated_share <= 1,
            "plan.max_replicated_share",
            self.max_replicated_share,
            "take a share from 0 to 1",
        )
        _require(
            16 <= self.alignment_bytes <= 4 * KIB and self.alignment_bytes.bit_count() == 1,
            "plan.alignment_bytes",
            self.alignment_bytes,
            "take a power of two from 16 to 4096",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementConfig:
    """Which policy puts coordinates on GPUs: ``best_fit`` or ``first_fit``."""

    policy: str = "best_fit"


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingConfig:
    """Which policy gives extents to readers and routes.

    Attributes:
        policy: ``balanced``.
        force_pool: Send every byte through the pool, also those that one rank alone needs.
        min_direct_bytes: An extent of one rank is read by that rank itself from this size on.
    """

    policy: str = "balanced"
    force_pool: bool = False
    min_direct_bytes: int = 1 * MIB

    def __post_init__(self) -> None:
        _require(self.min_direct_bytes >= 0, "routing.min_direct_bytes", self.min_direct_bytes, "take 0 or more bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadConfig:
    """Behaviour under faults.

    Attributes:
        max_worker_restarts: Replacements of one rank in one load.
    """

    max_worker_restarts: int = 2

    def __post_init__(self) -> None:
        _require(self.max_worker_restarts >= 0, "load.max_worker_restarts", self.max_worker_restarts, "take 0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadlineConfig:
    """Every wait has one (docs/design/0001).

    Attributes:
        poll_s: One long poll for blocks.
        call_s: A control call: progress, cancel, release.
        actor_start_s: Start of a worker or an agent.
        stall_s: A load without any progress.
        close_s: Stopping and giving everything back.
    """

    poll_s: float = 5.0
    call_s: float = 30.0
    actor_start_s: float = 120.0
    stall_s: float = 120.0
    close_s: float = 20.0

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            _require(0 < value < _DAY_S, f"deadlines.{item.name}", value, "take more than 0 s and less than a day")


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """All settings."""

    io: IoConfig = field(default_factory=IoConfig)
    retry: RetryConfig = field(default_factory=RetryConfig)
    pool: PoolConfig = field(default_factory=PoolConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    load: LoadConfig = field(default_factory=LoadConfig)
    deadlines: DeadlineConfig = field(default_factory=DeadlineConfig)


ENV_PREFIX = "MEGAMIND_"
# Variables with the prefix that are not settings of this tree: files, and switches of the test suite.
_RESERVED = ("MEGAMIND_CONFIG", "MEGAMIND_PROFILE", "MEGAMIND_REQUIRE_", "MEGAMIND_TEST_")
# A program that loads a thousand files is told once why a profile is not for it.
_told: set[tuple[Path | None, str]] = set()

_REMEDY = "measure again with `megamind tune`, remove it with `megamind tune --reset`, or set MEGAMIND_PROFILE=off"

_Layer = tuple[str, Mapping[str, Mapping[str, object]]]


def load_config(
    path: str | Path | None = None,
    overrides: Mapping[str, Mapping[str, object]] | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    profile: bool = True,
) -> Config:
    """Builds the configuration.

    Args:
        path: TOML file; default is ``$MEGAMIND_CONFIG`` where set.
        overrides: By section and field; goes before file and environment.
        environ: In place of the process's environment (for tests).
        profile: Whether the profile of this machine counts. Not for settings that go to other machines, as those of a
            cluster do (docs/design/0014).

    Raises:
        RequestError: No such file, a key that is not known, a value that is not allowed, or a broken profile.
    """
    env = os.environ if environ is None else environ
    return _build(_layers(path, overrides, env, profile=profile))


def setting_origins(
    path: str | Path | None = None, environ: Mapping[str, str] | None = None, *, profile: bool = True
) -> dict[str, str]:
    """Where the value of each setting that ``load_config`` gives comes from: ``"io.direct"`` -> ``"default"``.

    Raises:
        RequestError: As ``load_config``.
    """
    env = os.environ if environ is None else environ
    origins = {
        f"{section}.{item.name}": "default"
        for section, kind in get_type_hints(Config).items()
        for item in dataclasses.fields(kind)
    }
    for origin, layer in _layers(path, None, env, profile=profile):
        origins.update({f"{section}.{name}": origin for section, fields in layer.items() for name in fields})
    return origins


def _layers(
    path: str | Path | None,
    overrides: Mapping[str, Mapping[str, object]] | None,
    env: Mapping[str, str],
    *,
    profile: bool,
) -> list[_Layer]:
    """What goes over the defaults, the weakest first, each with where it comes from."""
    layers: list[_Layer] = []
    source = path if path is not None else env.get("MEGAMIND_CONFIG") or None
    if source is not None:
        layers.append((f"file {source}", _read_toml(Path(source))))
    layers += [("environment", _from_environ(env)), ("arguments", overrides or {})]
    found = find_profile(env) if profile else None
    if found is None or found.profile is None or found.state != "in force":
        if found is not None and found.state == "ignored":
            _tell(found.path, found.reason)
        return layers
    measured: list[_Layer] = [(f"profile {found.path}", found.profile.settings), *layers]
    try:
        _build(measured)
    except RequestError:
        _build(layers)  # what is wrong without the profile, too, is the user's to correct
        _tell(found.path, "its settings cannot be joined with those of the file, environment or arguments")
        return layers
    return measured


def _build(layers: Sequence[_Layer]) -> Config:
    values: dict[str, dict[str, object]] = {}
    for origin, layer in layers:
        _merge(values, layer, origin)
    sections = get_type_hints(Config)
    return Config(**{name: sections[name](**fields) for name, fields in values.items()})


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileStatus:
    """What became of the profile.

    Attributes:
        path: Where it is, or would be; None where there is no home directory to look in.
        state: Whether it is used.
        reason: Why not, where it is ignored.
        profile: Its content, where there is one of a schema that is known.
    """

    path: Path | None
    state: ProfileState
    reason: str = ""
    profile: Profile | None = None


def profile_path(environ: Mapping[str, str] | None = None) -> Path | None:
    """Where the profile is: ``$MEGAMIND_PROFILE``, else ``megamind-ray/profile.toml`` in the user's configuration.

    Also where it would be if ``MEGAMIND_PROFILE`` were not ``off``. None where the environment names no home directory.
    """
    env = os.environ if environ is None else environ
    named = env.get("MEGAMIND_PROFILE", "")
    if named and named.lower() != "off":
        return Path(named)
    base = env.get("XDG_CONFIG_HOME", "")
    if not base.startswith("/"):  # the specification of these folders has relative ones ignored
        home = env.get("HOME", "")
        base = f"{home}/.config" if home else ""
    return Path(base, "megamind-ray", "profile.toml") if base else None


def find_profile(environ: Mapping[str, str] | None = None) -> ProfileStatus:
    """Looks for the profile, and whether it is one of this machine.

    Raises:
        RequestError: It is broken, or ``MEGAMIND_PROFILE`` names a file that cannot be read.
    """
    env = os.environ if environ is None else environ
    path, named = profile_path(env), env.get("MEGAMIND_PROFILE", "")
    is_off = named.lower() == "off"
    if is_off or path is None:
        return ProfileStatus(path=path, state="off" if is_off else "absent")
    try:
        text = _read_file(path)
    except (OSError, ValueError) as error:
        return _without_profile(path, error, is_named=bool(named))
    found = parse_profile(text, str(path))
    reason = found.foreign_reason(this_machine())
    if reason is not None:
        return ProfileStatus(path=path, state="ignored", reason=reason, profile=found)
    try:
        _build([("settings", found.settings)])
    except RequestError as error:
        raise RequestError(f"profile {path}: {error}; {_REMEDY}") from error
    return ProfileStatus(path=path, state="in force", profile=found)


def this_machine() -> Machine:
    """What a profile must have been measured on to be used here."""
    # By name: the package's own module leads to all others, as the contract of layers sees it.
    release: str = import_module("megamind_ray").__version__
    return Machine(hostname=socket.gethostname(), cpus=os.cpu_count() or 1, release=release)


def _without_profile(path: Path, error: OSError | ValueError, *, is_named: bool) -> ProfileStatus:
    """No profile was asked for by name: a home directory that is not there, or not this user's, is no mistake."""
    if not is_named and isinstance(error, FileNotFoundError | NotADirectoryError):
        return ProfileStatus(path=path, state="absent")
    if not is_named and isinstance(error, PermissionError):
        return ProfileStatus(path=path, state="ignored", reason="this user may not read it")
    raise RequestError(f"profile {path}: cannot be read ({error}); {_REMEDY}") from error


def _tell(path: Path | None, reason: str) -> None:
    if (path, reason) not in _told:
        _told.add((path, reason))
        _log.warning("profile %s is not used: %s; run `megamind tune` here, or set MEGAMIND_PROFILE=off", path, reason)


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


def _read_file(path: Path) -> str:
    """The text of a regular file: a pipe that nobody writes to would be waited for, and a device has no end.

    Raises:
        OSError: It is none, or cannot be read.
        ValueError: It is not UTF-8.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("it is not a regular file")
    return path.read_text(encoding="utf-8")


def _read_toml(path: Path) -> Mapping[str, Mapping[str, object]]:
    try:
        return tomllib.loads(_read_file(path))
    except (OSError, ValueError, RecursionError) as error:
        raise RequestError(f"config file {path}: cannot be read ({error}); give a TOML file") from error


def _from_environ(env: Mapping[str, str]) -> dict[str, dict[str, object]]:
    values: dict[str, dict[str, object]] = {}
    for key, value in env.items():
        if not key.startswith(ENV_PREFIX) or key.startswith(_RESERVED):
            continue
        section, _, name = key.removeprefix(ENV_PREFIX).lower().partition("_")
        values.setdefault(section, {})[name] = value
    return values


def _merge(values: dict[str, dict[str, object]], new: Mapping[str, Mapping[str, object]], origin: str) -> None:
    sections = get_type_hints(Config)
    for section, fields in new.items():
        if section not in sections:
            raise RequestError(
                f"{origin}: no section {section!r} in the configuration; there are {', '.join(sections)}"
            )
        if not isinstance(fields, Mapping):
            raise RequestError(f"{origin}: {section} = {fields!r} must be a section with settings")
        hints = get_type_hints(sections[section])
        for name, value in fields.items():
            if name not in hints:
                raise RequestError(f"{origin}: no setting {section}.{name}; there are {', '.join(hints)}")
            values.setdefault(section, {})[name] = _convert(value, hints[name], f"{origin}: {section}.{name}")


def _convert(value: object, kind: Any, what: str) -> object:
    """A TOML or text value as the field's type; byte sizes may carry a unit."""
    if kind is int and what.endswith("_bytes"):
        return parse_bytes(value, what=what)  # type: ignore[arg-type]
    if _is_huge(value):
        raise RequestError(f"{what}: the number has more than {_MAX_DIGITS} digits; take a smaller one")
    if kind is bool and isinstance(value, str) and value.lower() in ("0", "1", "true", "false"):
        return value.lower() in ("1", "true")
    if kind in (int, float) and isinstance(value, str):
        try:
            return kind(value)
        except ValueError as error:
            raise RequestError(f"{what} = {value!r}: not a number") from error
    if get_origin(kind) is Literal:
        return value  # the section itself says which are allowed
    if get_origin(kind) is tuple:
        return _texts(value, what)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise RequestError(f"{what} = {value!r}: must be of type {kind.__name__}")
    return value


def _is_huge(value: object) -> bool:
    """Whether it is a whole number that neither a float nor a message can hold."""
    if isinstance(value, str):
        return len(value) > _MAX_DIGITS and value.strip().isdigit()
    return isinstance(value, int) and not -(10**_MAX_DIGITS) < value < 10**_MAX_DIGITS


def _texts(value: object, what: str) -> tuple[str, ...]:
    """A list of texts; as one text, as in an environment variable, they are separated by commas."""
    if isinstance(value, str):
        return tuple(item.strip() for item in value.split(",") if item.strip())
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise RequestError(f"{what} = {value!r}: must be a list of texts")
    return tuple(value)
