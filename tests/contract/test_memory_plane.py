"""The data plane of the fakes keeps the contract that it stands in for."""

from __future__ import annotations

import pytest

from megamind_ray.testing.contracts import DataPlaneContract
from megamind_ray.testing.fakes import MemoryPlane


class TestMemoryPlane(DataPlaneContract):
    @pytest.fixture
    def plane(self) -> MemoryPlane:
        return MemoryPlane()
