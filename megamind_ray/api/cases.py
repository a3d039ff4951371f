"""What to compare, as people write it: ``tp=8,pp=2``, ``topology=dgx-a100-80gb``, a sweep over axes of the mesh."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from megamind_ray.api.whatif import Case
from megamind_ray.config import Config, PlacementConfig, overridden
from megamind_ray.core.parallel import Parallel
from megamind_ray.errors import RequestError
from megamind_ray.planning import resolve_topology
from megamind_ray.policies.registry import placement_policy

__all__ = ["AXES", "parse_case", "sweep_meshes"]

AXES = ("tp", "pp", "dp", "ep")
_KEYS = (*AXES, "topology", "placement", "keep")
_MAX_DIGITS = 18  # of a number of ranks: what is longer is a typing mistake


def parse_case(text: str, base: Case) -> Case:
    """A case that differs from another one in what the text says.

    Args:
        text: Comma-separated ``key=value``; keys are the axes, ``topology`` (a file or a preset), ``placement`` (a
            policy), ``keep`` (``yes`` or ``no``), and any setting by its name (``io.read_threads``).
        base: Everything else.

    Raises:
        RequestError: An unknown key, or a value that is not allowed.
    """
    values: dict[str, str] = {}
    for item in text.split(","):
        key, sign, value = (part.strip() for part in item.partition("="))
        if not sign or (key not in _KEYS and "." not in key):
            raise RequestError(
                f"--compare {text!r}: {item!r} is none of {', '.join(f'{known}=...' for known in _KEYS)} and no "
                "setting (io.read_threads=...); for example --compare tp=8,pp=2 or --compare placement=first_fit"
            )
        if key in values:
            raise RequestError(f"--compare {text!r}: {key} is there twice; a case has one value of it")
        values[key] = value
    sizes = {axis: _size(text, axis, values[axis]) for axis in AXES if axis in values}
    case = replace(base, label=text, parallel=Parallel(**(asdict(base.parallel) | sizes)))
    if "topology" in values:
        case = replace(case, topology=resolve_topology(values["topology"]))
    if "keep" in values:
        if values["keep"] not in ("yes", "no"):
            raise RequestError(f"--compare {text!r}: keep={values['keep']!r} must be yes or no")
        case = replace(case, keep=values["keep"] == "yes")
    return replace(case, config=_settings(text, values, case.config))


def _settings(text: str, values: Mapping[str, str], config: Config) -> Config:
    changed: dict[str, dict[str, object]] = {}
    for key, value in values.items():
        section, dot, name = key.partition(".")
        if dot:
            changed.setdefault(section, {})[name] = value
    if "placement" in values:
        placement_policy(PlacementConfig(policy=values["placement"]))  # an unknown name is no case that does not fit
        changed.setdefault("placement", {})["policy"] = values["placement"]
    return overridden(config, changed, f"--compare {text!r}")


def _size(text: str, axis: str, value: str) -> int:
    if not value.isdecimal() or len(value) > _MAX_DIGITS:
        raise RequestError(f"--compare {text!r}: {axis}={value!r} must be a number of ranks")
    return int(value)


def sweep_meshes(axes: Sequence[str], base: Parallel, num_gpus: int) -> list[Parallel]:
    """All meshes that differ from ``base`` in some axes, each a power of two, with at most ``num_gpus`` ranks.

    Raises:
        RequestError: An axis is none of tp, pp, dp and ep, or no mesh is small enough.
    """
    if not axes or any(axis not in AXES for axis in axes):
        raise RequestError(f"--sweep {','.join(axes)}: axes are {', '.join(AXES)}, for example --sweep tp,pp")
    if len(set(axes)) < len(axes):
        raise RequestError(f"--sweep {','.join(axes)}: an axis is there twice; name each one once")
    powers = [1 << exponent for exponent in range(max(1, num_gpus).bit_length())]
    found = []
    for values in itertools.product(powers, repeat=len(axes)):
        sizes = asdict(base) | dict(zip(axes, values, strict=True))
        if sizes["tp"] * sizes["pp"] * sizes["dp"] <= num_gpus and sizes["dp"] * sizes["tp"] % sizes["ep"] == 0:
            found.append(Parallel(**sizes))
    if not found:
        raise RequestError(
            f"--sweep {','.join(axes)}: no mesh of at most {num_gpus} ranks with the other axes as given ({base}); "
            "take smaller ones, or hardware with more GPUs"
        )
    return found
