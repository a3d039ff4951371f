"""Ray's object store as a data plane."""

from __future__ import annotations

import pytest

import megamind_ray as mm
from megamind_ray.actors.dataplane import RayObjectStore
from megamind_ray.testing.contracts import DataPlaneContract


class TestRayObjectStore(DataPlaneContract):
    @pytest.fixture
    def plane(self, cluster: mm.Cluster) -> RayObjectStore:
        assert cluster.address
        return RayObjectStore()
