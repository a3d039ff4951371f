"""The colours of the page of a load can be told from the background and from each other, by everybody."""

from __future__ import annotations

import itertools
import re
from importlib import resources

import numpy as np
import numpy.typing as npt
import pytest

from megamind_ray.report.timeline_layout import KINDS

Colour = npt.NDArray[np.float64]

# What is seen in one row of one group, side by side.
SIDE_BY_SIDE = ("read", "verify", "cut", "put", "wire", "copy")
# Linear RGB as seen without red and without green cones: Machado, Oliveira, Fernandes 2009, severity 1.
VISIONS = {
    "all cones": np.eye(3),
    "no red cones": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "no green cones": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
}
# CIE 1976: about 2.3 can just be told apart side by side; small marks need several times that.
FAR_ENOUGH = 12.0


def schemes() -> dict[str, dict[str, Colour]]:
    style = resources.files("megamind_ray.report").joinpath("assets", "timeline.css").read_text(encoding="utf-8")
    light, dark = re.findall(r":root \{(.*?)\}", style, re.DOTALL)[:2]
    return {name: colours(block) for name, block in (("light", light), ("dark", dark))}


def colours(block: str) -> dict[str, Colour]:
    """Linear RGB by name."""
    found = {}
    for name, digits in re.findall(r"--([\w-]+): #([0-9a-f]{6})", block):
        parts = np.array([int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)])
        found[name] = np.where(parts <= 0.03928, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return found


def contrast(a: Colour, b: Colour) -> float:
    light, dark = sorted((float(c @ [0.2126, 0.7152, 0.0722]) for c in (a, b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def lab(colour: Colour) -> Colour:
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(np.clip(to_xyz @ colour, 0.0089, None) / [0.9505, 1.0, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_kind_has_a_colour_that_stands_out(scheme: str) -> None:
    palette = schemes()[scheme]

    weak = {name: contrast(palette[name], palette["page"]) for name in (*KINDS, "fault", "limit", "accent")}

    assert {name: ratio for name, ratio in weak.items() if ratio < 3} == {}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("ground", ["page", "panel"])
def test_words_can_be_read(scheme: str, ground: str) -> None:
    palette = schemes()[scheme]

    assert all(contrast(palette[name], palette[ground]) >= 4.5 for name in ("text", "quiet", "accent", "fault"))
    assert contrast(palette["on-accent"], palette["accent"]) >= 4.5


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("vision", VISIONS)
def test_kinds_that_are_seen_side_by_side_are_told_apart(scheme: str, vision: str) -> None:
    palette = schemes()[scheme]
    seen = {name: lab(np.clip(VISIONS[vision] @ palette[name], 0, 1)) for name in SIDE_BY_SIDE}

    apart = {(a, b): float(np.linalg.norm(seen[a] - seen[b])) for a, b in itertools.combinations(SIDE_BY_SIDE, 2)}

    assert {pair: round(distance, 1) for pair, distance in apart.items() if distance < FAR_ENOUGH} == {}
