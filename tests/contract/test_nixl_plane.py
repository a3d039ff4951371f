"""The real NIXL keeps the contract of data planes, and between two processes survives what may befall either."""

from __future__ import annotations

import base64
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest

from megamind_ray.actors.messages import Place
from megamind_ray.actors.nixl_endpoint import NixlEndpoint, WireError, nixl_is_installed
from megamind_ray.actors.nixl_wire import NixlWire
from megamind_ray.testing.contracts import DataPlaneContract
from megamind_ray.testing.fake_nixl import SharedMemoryPlane
from megamind_ray.units import MIB

pytestmark = pytest.mark.skipif(
    not nixl_is_installed(), reason="nixl is not installed (pip install megamind-ray[rdma])"
)

BUFFER_BYTES = 64 * MIB
BLOCK_BYTES = 24 * MIB
BOUND_S = 30.0

# Another process that has a pool with bytes of a known seed, says where, and makes progress until it is told to end.
_HOLDER = """
import base64, mmap, pickle, sys
import numpy as np
from megamind_ray.actors.nixl_endpoint import NixlEndpoint
pool = np.frombuffer(mmap.mmap(-1, 48 << 20), np.uint8)
pool[:] = np.random.default_rng(5).integers(0, 256, pool.nbytes, np.uint8)
endpoint = NixlEndpoint(buffer_bytes=1 << 20, pool_bytes=pool.nbytes, region_bytes=16 << 20)
place = endpoint.place(pool.ctypes.data + 4096, int(sys.argv[1]))
print("place", base64.b64encode(pickle.dumps(place)).decode(), flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module", autouse=True)
def over_tcp() -> Iterator[None]:
    """As between hosts: in shared memory there would be no other side to stop."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("UCX_TLS", "tcp,self")
        yield


@pytest.fixture(scope="module")
def store() -> SharedMemoryPlane:
    return SharedMemoryPlane()


@pytest.fixture
def endpoint(store: SharedMemoryPlane) -> Iterator[NixlEndpoint]:
    found = NixlEndpoint(buffer_bytes=BUFFER_BYTES, pool_bytes=store.pool_bytes)
    yield found
    found.close()


class Holder:
    """The other process."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", _HOLDER, str(BLOCK_BYTES)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.place: Place | None = None
        for line in self.process.stdout:
            if line.startswith("place "):
                self.place = pickle.loads(base64.b64decode(line.split()[1]))
                break

    def close(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=BOUND_S)


@pytest.fixture
def holder() -> Iterator[Holder]:
    one = Holder()
    yield one
    one.close()


def expected() -> np.ndarray:
    return np.random.default_rng(5).integers(0, 256, 48 * MIB, np.uint8)[4096 : 4096 + BLOCK_BYTES]


def wait_until_free(endpoint: NixlEndpoint) -> None:
    until_s = time.monotonic() + BOUND_S
    while endpoint._room._free != [(0, BUFFER_BYTES)]:
        assert time.monotonic() < until_s, "memory did not come back"
        with endpoint._returned:
            endpoint._look_at_late()
        time.sleep(0.01)


class TestNixl(DataPlaneContract):
    @pytest.fixture
    def plane(self, store: SharedMemoryPlane, endpoint: NixlEndpoint) -> Iterator[NixlWire]:
        """Blocks of one endpoint, offered to another one in this process."""
        other = NixlEndpoint(buffer_bytes=BUFFER_BYTES, pool_bytes=store.pool_bytes)
        target = NixlWire(store, other)

        class Plane(NixlWire):
            fetch = target.fetch  # type: ignore[assignment]

        yield Plane(store, endpoint)
        assert target.faults == ()
        other.close()


def test_bytes_of_another_process_come_as_they_are(endpoint: NixlEndpoint, holder: Holder) -> None:
    assert holder.place is not None
    assert len(holder.place.parts) == 2, "the block lies in two regions"
    for _ in range(3):
        with endpoint.read(holder.place, timeout_s=BOUND_S) as data:
            assert np.array_equal(data, expected())
    wait_until_free(endpoint)


def test_a_process_that_died_is_an_error_and_leaves_no_memory_behind(endpoint: NixlEndpoint, holder: Holder) -> None:
    assert holder.place is not None
    with endpoint.read(holder.place, timeout_s=BOUND_S) as data:
        assert data[0] == expected()[0]
    holder.process.kill()
    holder.process.wait(BOUND_S)
    for _ in range(2):
        with pytest.raises(WireError, match=holder.place.endpoint), endpoint.read(holder.place, timeout_s=BOUND_S):
            pass
    wait_until_free(endpoint)


def test_a_process_that_is_silent_costs_the_deadline_and_its_late_bytes_hit_nobody(
    endpoint: NixlEndpoint, holder: Holder
) -> None:
    assert holder.place is not None
    with endpoint.read(holder.place, timeout_s=BOUND_S):
        pass
    holder.process.send_signal(signal.SIGSTOP)
    with pytest.raises(WireError, match="did not come in time"), endpoint.read(holder.place, timeout_s=0.3):
        pass
    assert endpoint._room._free == [(BLOCK_BYTES, BUFFER_BYTES)], "it may yet write there"
    holder.process.send_signal(signal.SIGCONT)
    wait_until_free(endpoint)
    with endpoint.read(holder.place, timeout_s=BOUND_S) as data:
        assert np.array_equal(data, expected())
