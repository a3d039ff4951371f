"""Random demands, planned and compiled, then executed on random file bytes by a few lines of numpy."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megamind_ray.config import Config, IoConfig, PoolConfig, RoutingConfig
from megamind_ray.core.demands import Demands, ModuleTensor, SliceTable, ViewTable
from megamind_ray.core.ids import ExtentId, LoadId, NodeId, Rank
from megamind_ray.core.manifest import FileChecksums, FileInfo, Manifest, Reference
from megamind_ray.core.parallel import Parallel
from megamind_ray.core.plan import DIRECT, Plan
from megamind_ray.core.program import AgentProgram, BlockTable, SegmentTable
from megamind_ray.core.tensor import DType, TensorInfo
from megamind_ray.core.topology import Disk, Gpu, Nic, Node, Topology
from megamind_ray.planning.build import build_plan
from megamind_ray.planning.compile import compile_agent, compile_rank, load_facts

LOAD = LoadId("m#1")
KIB64 = 64 << 10


@dataclass(frozen=True)
class Tensor:
    """A matrix of bytes in a file; ``split`` is rows, columns, whole, halves (packed columns) or none."""

    file: int
    rows: int
    cols: int
    split: str
    first_rank: int
    tied: bool = False


@dataclass(frozen=True)
class Case:
    """A checkpoint, a mesh and two nodes."""

    tensors: tuple[Tensor, ...]
    num_files: int
    parallel: Parallel
    gpus: tuple[int, int]
    config: Config
    keep: bool
    sidecar: bool

    def ranks_of(self, tensor: Tensor) -> list[int]:
        """A tensor belongs to one stage, here simply a contiguous group of tp ranks."""
        first = tensor.first_rank % (self.parallel.world // self.parallel.tp) * self.parallel.tp
        return list(range(first, first + self.parallel.tp))

    def boxes(self, tensor: Tensor) -> dict[int, list[tuple[slice, slice]]]:
        """By rank, the column-wise concatenated boxes of its local tensor."""
        boxes: dict[int, list[tuple[slice, slice]]] = {}
        ranks = self.ranks_of(tensor)
        every = slice(None)
        for position, rank in enumerate(ranks):
            if tensor.split == "whole":
                boxes[rank] = [(every, slice(0, tensor.cols))]
            elif tensor.split == "rows":
                boxes[rank] = [(_part(0, tensor.rows, position, len(ranks)), slice(0, tensor.cols))]
            elif tensor.split == "columns":
                boxes[rank] = [(every, _part(0, tensor.cols, position, len(ranks)))]
            elif tensor.split == "halves":
                middle = tensor.cols // 2
                parts = [(0, middle), (middle, tensor.cols)]
                boxes[rank] = [(every, _part(low, high, position, len(ranks))) for low, high in parts]
        return boxes

    @cached_property
    def files(self) -> list[np.ndarray]:
        sizes = [self._begin(file, None) for file in range(self.num_files)]
        return [np.random.default_rng(file).integers(0, 256, size, np.uint8) for file, size in enumerate(sizes)]

    def _begin(self, file: int, stop: int | None) -> int:
        sizes = [t.rows * t.cols for t in self.tensors[:stop] if t.file == file]
        return 100 + 7 * file + sum(sizes)

    @cached_property
    def manifest(self) -> Manifest:
        files = tuple(
            FileInfo(path=f"{i}.safetensors", size_bytes=self._begin(i, None), data_begin=100 + 7 * i)
            for i in range(self.num_files)
        )
        infos = [
            TensorInfo(f"t{i}", DType.U8, (t.rows, t.cols), t.file, b := self._begin(t.file, i), b + t.rows * t.cols)
            for i, t in enumerate(self.tensors)
        ]
        sums = tuple(FileChecksums(header_crc32=0, chunks_crc32=(1, 2, 3)) for _ in files)
        reference = Reference(origin="sidecar", chunk_bytes=self.config.io.chunk_bytes, files=sums)
        return Manifest(
            uri="memory://x",
            root="memory://x",
            files=files,
            tensors={info.name: info for info in infos},
            reference=reference if self.sidecar else None,
        )

    @cached_property
    def demands(self) -> Demands:
        sets: dict[tuple[int, ...], int] = {}
        views: list[tuple[int, ...]] = []
        shapes: list[tuple[int, ...]] = []
        rows: list[tuple[int, ...]] = []
        names = [f"t{i}" for i in range(len(self.tensors))]
        for index, tensor in enumerate(self.tensors):
            begin = self._begin(tensor.file, index)
            pieces: dict[tuple[int, ...], list[int]] = {}
            for rank, boxes in self.boxes(tensor).items():
                local = self.local(tensor, rank)
                shapes.append(local.shape)
                views.append((rank, index, index, 0, local.size, len(shapes) - 1))
                if tensor.tied:
                    names.append(f"t{index}.tied")
                    views.append((rank, index, len(names) - 1, 1, local.size, len(shapes) - 1))
                offset = 0
                for row, col in boxes:
                    low, high, _ = row.indices(tensor.rows)
                    width = col.stop - col.start
                    key = (begin + low * tensor.cols + col.start, width, high - low, offset, local.shape[1])
                    if width and high > low:
                        pieces.setdefault(key, []).append(rank)
                    offset += width
            for (src, width, num, offset, pitch), ranks in pieces.items():
                consumers = sets.setdefault(tuple(ranks), len(sets))
                stride = tensor.cols if num > 1 else width
                rows.append((tensor.file, index, index, src, width, num, stride, offset, pitch, consumers))
        rows.sort(key=lambda row: (row[0], row[3]))
        table = np.array(rows, np.int64).reshape(-1, 10).T
        view_table = np.array(views, np.int64).reshape(-1, 6).T
        return Demands(
            parallel=self.parallel,
            tensors=tuple(
                ModuleTensor(
                    name=f"t{i}",
                    dtype=DType.U8,
                    shape=(t.rows, t.cols),
                    nbytes=t.rows * t.cols,
                    placement=t.split,
                    reason="test",
                    replicated=t.split == "whole",
                )
                for i, t in enumerate(self.tensors)
            ),
            names=tuple(names),
            shapes=tuple(shapes),
            views=ViewTable(**dict(zip(ViewTable.__slots__, view_table, strict=True))),
            slices=SliceTable(**dict(zip(SliceTable.__slots__, table, strict=True))),
            consumer_sets=tuple(sets),
        )

    def local(self, tensor: Tensor, rank: int) -> np.ndarray:
        """What the rank must hold in the end."""
        begin = self._begin(tensor.file, self.tensors.index(tensor))
        matrix = self.files[tensor.file][begin : begin + tensor.rows * tensor.cols].reshape(tensor.rows, tensor.cols)
        return np.concatenate([matrix[box] for box in self.boxes(tensor)[rank]], axis=1)

    @cached_property
    def topology(self) -> Topology:
        return Topology(nodes=tuple(_node(i, count) for i, count in enumerate(self.gpus)))

    @cached_property
    def plan(self) -> Plan:
        return build_plan(self.manifest, self.demands, self.topology, config=self.config, keep=self.keep)


def _part(low: int, high: int, position: int, num: int) -> slice:
    step = -(-(high - low) // num)
    return slice(min(low + position * step, high), min(low + (position + 1) * step, high))


def _node(index: int, num_gpus: int) -> Node:
    return Node(
        id=NodeId(f"n{index}"),
        gpus=tuple(Gpu(index=i, memory_bytes=1 << 34, free_bytes=1 << 34, nvlink_group=0) for i in range(num_gpus)),
        memory_bytes=1 << 36,
        pool_bytes=1 << 30,
        disks=(Disk(name="d", bytes_per_s=(1 + index) * 1e9),),
        nics=(Nic(name="e", bytes_per_s=1e9),),
    )


# From empty to several chunks; the rows of the last are so wide that their runs are read one by one.
_SHAPES = st.sampled_from([(0, 3), (1, 1), (3, 257), (64, 64), (257, 1000), (1000, 257), (900, 1000), (4, 250_000)])
_TENSORS = st.builds(
    lambda shape, **rest: Tensor(rows=shape[0], cols=shape[1], **rest),
    shape=_SHAPES,
    file=st.integers(0, 1),
    split=st.sampled_from(["rows", "columns", "whole", "halves", "none"]),
    first_rank=st.integers(0, 7),
    tied=st.booleans(),
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    parallel = Parallel(tp=draw(st.sampled_from([1, 2, 3, 4])), pp=draw(st.integers(1, 2)), dp=draw(st.integers(1, 2)))
    chunk = KIB64 * draw(st.integers(1, 3))
    first = draw(st.integers(0, parallel.world))
    return Case(
        # Distinct objects, so that `local` finds each by value only once.
        tensors=tuple(draw(st.lists(_TENSORS, max_size=8, unique=True))),
        num_files=2,
        parallel=parallel,
        gpus=(first, parallel.world - first),
        config=Config(
            io=IoConfig(
                chunk_bytes=chunk,
                extent_bytes=chunk * draw(st.integers(1, 4)),
                max_gap_bytes=draw(st.sampled_from([0, 100, 4096, chunk])),
            ),
            routing=RoutingConfig(force_pool=draw(st.booleans()), min_direct_bytes=draw(st.sampled_from([0, 50_000]))),
            pool=PoolConfig(keep_fraction=draw(st.sampled_from([0.0, 0.5]))),
        ),
        keep=draw(st.booleans()),
        sidecar=draw(st.booleans()),
    )


def cut_blocks(
    files: list[np.ndarray], extents: object, blocks: BlockTable, segments: SegmentTable
) -> dict[int, np.ndarray]:
    """What an agent, or a rank for its direct extents, does: read each extent, cut its blocks."""
    read = {
        int(e): (int(begin), files[file][begin:end])
        for e, file, begin, end in zip(extents.extent, extents.file, extents.begin, extents.end, strict=True)
    }
    cut: dict[int, np.ndarray] = {}
    for row in range(len(blocks)):
        if int(blocks.extent[row]) not in read:
            continue
        origin, data = read[int(blocks.extent[row])]
        part = segments.rows(int(blocks.first_segment[row]), int(blocks.first_segment[row + 1]))
        packed = []
        for src, run, num, stride in zip(
            part.src_offset, part.run_bytes, part.num_runs, part.src_stride_bytes, strict=True
        ):
            for i in range(num):
                at = src - origin + i * stride
                assert 0 <= at <= at + run <= len(data), "a segment reaches beyond its extent"
                packed.append(data[at : at + run])
        block = np.concatenate(packed)
        assert len(block) == blocks.nbytes[row]
        cut[int(blocks.block[row])] = block
    return cut


def execute(case: Case, rank: int, pool: dict[int, np.ndarray]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Runs the program of a rank; gives its views and how often each byte of its arena was written."""
    program = compile_rank(case.plan, case.manifest, Rank(rank), LOAD)
    mine = cut_blocks(case.files, program.extents, program.blocks, program.segments)
    arena, writes = np.zeros(program.arena_bytes, np.uint8), np.zeros(program.arena_bytes, np.int64)
    base = {view.tensor: view.offset for view in program.views}
    for row, block in enumerate(program.blocks.block.tolist()):
        data = pool[block] if block in program.pool_blocks else mine[block]
        part = program.segments.rows(*program.blocks.first_segment[row : row + 2].tolist())
        for i in range(len(part)):
            at = int(part.block_offset[i])
            for run in range(part.num_runs[i]):
                dst = base[int(part.tensor[i])] + int(part.dst_offset[i] + run * part.dst_stride_bytes[i])
                arena[dst : dst + part.run_bytes[i]] = data[at : at + part.run_bytes[i]]
                writes[dst : dst + part.run_bytes[i]] += 1
                at += int(part.run_bytes[i])
    views = {view.name: arena[view.offset : view.offset + view.nbytes].reshape(view.shape) for view in program.views}
    return views, writes


def agent_program(case: Case, node: str, **options: object) -> AgentProgram:
    none = np.zeros(0, np.int64)
    return compile_agent(case.plan, case.manifest, NodeId(node), LOAD, credit_bytes=1, keep_blocks=none, **options)


def full_pool(case: Case) -> dict[int, np.ndarray]:
    pool: dict[int, np.ndarray] = {}
    for node in case.topology.nodes:
        program = agent_program(case, node.id)
        new = cut_blocks(case.files, program.extents, program.blocks, program.segments)
        assert not pool.keys() & new.keys(), "a block is cut by two nodes"
        pool |= new
    return pool


@given(cases())
@settings(max_examples=60, deadline=None)
def test_every_rank_holds_its_slices_and_every_byte_of_them_is_written_once(case: Case) -> None:
    pool = full_pool(case)
    for rank in case.parallel.ranks:
        views, writes = execute(case, rank, pool)
        expected = {f"t{i}": t for i, t in enumerate(case.tensors) if rank in case.boxes(t)}
        for name, tensor in expected.items():
            np.testing.assert_array_equal(views[name], case.local(tensor, rank))
            if tensor.tied:
                assert np.shares_memory(views[name], views[f"{name}.tied"]) or not views[name].size
        assert writes.max(initial=0) <= 1
        assert writes.sum() == sum(case.local(tensor, rank).size for tensor in expected.values())


@given(cases())
@settings(max_examples=150, deadline=None)
def test_extents_are_disjoint_and_on_the_grid(case: Case) -> None:
    extents = case.plan.tables["extents"].to_pylist()
    chunk = case.plan.chunk_bytes
    for one, two in itertools.pairwise(extents):
        assert one["file"] < two["file"] or (one["file"] == two["file"] and one["end"] <= two["begin"])
    demanded = {t.file: np.zeros(case.manifest.files[t.file].size_bytes, bool) for t in case.tensors}
    for row in zip(*(getattr(case.demands.slices, name).tolist() for name in SliceTable.__slots__), strict=True):
        file, _, _, src, run, num, stride, *_ = row
        for i in range(num):
            demanded[file][src + i * stride : src + i * stride + run] = True
    for extent in extents:
        info = case.manifest.files[extent["file"]]
        assert info.data_begin <= extent["begin"] < extent["end"] <= info.size_bytes
        longest = case.config.io.extent_bytes * (1 if extent["route"] == DIRECT else 4)
        assert extent["end"] - extent["begin"] <= longest
        needed = demanded[extent["file"]]
        for border, inside in ((extent["begin"], extent["begin"]), (extent["end"], extent["end"] - 1)):
            on_grid = (border - info.data_begin) % chunk == 0 or border == info.size_bytes
            # Off the grid an extent begins and ends only where the demanded bytes do.
            assert on_grid or (needed[inside] and not case.sidecar)
        first = (extent["begin"] - info.data_begin) // chunk
        borders = np.arange(first, -(-(extent["end"] - info.data_begin) // chunk)) * chunk + info.data_begin
        in_chunk = np.add.reduceat(needed[: extent["end"]].astype(np.int64), np.maximum(borders, extent["begin"]))
        assert in_chunk.all(), "a chunk is read of which nobody needs a byte"
    covered = {file: np.zeros(len(needed), bool) for file, needed in demanded.items()}
    for extent in extents:
        covered[extent["file"]][extent["begin"] : extent["end"]] = True
    assert all((covered[file] | ~needed).all() for file, needed in demanded.items())


def _sets(plan: Plan) -> list[tuple[int, ...]]:
    """The ranks of each set that a plan names."""
    members: dict[int, list[int]] = {}
    for row in plan.tables["consumers"].to_pylist():
        members.setdefault(row["consumers"], []).append(row["rank"])
    assert list(members) == list(range(len(members)))
    return [tuple(ranks) for ranks in members.values()]


@given(cases())
@settings(max_examples=100, deadline=None)
def test_blocks_hold_their_segments_back_to_back_for_ranks_of_the_reading_route(case: Case) -> None:
    tables, sets = case.plan.tables, _sets(case.plan)
    extents, segments = tables["extents"].to_pylist(), tables["segments"].to_pylist()
    by_block = {key: list(rows) for key, rows in itertools.groupby(segments, key=lambda row: row["block"])}
    for block in tables["blocks"].to_pylist():
        offset = 0
        for segment in by_block[block["block"]]:
            assert segment["block_offset"] == offset
            offset += segment["run_bytes"] * segment["num_runs"]
        assert offset == block["nbytes"] > 0
        extent, consumers = extents[block["extent"]], sets[block["consumers"]]
        taken = {rank for segment in by_block[block["block"]] for rank in sets[segment["consumers"]]}
        assert consumers == tuple(sorted(taken))
        if extent["route"] == DIRECT:
            assert consumers == (extent["rank"],)
            assert not case.keep
            assert not case.config.routing.force_pool


@given(cases())
@settings(max_examples=60, deadline=None)
def test_an_extent_has_one_block_for_each_set_of_nodes_and_they_need_all_of_it(case: Case) -> None:
    tables, sets = case.plan.tables, _sets(case.plan)
    nodes = tables["ranks"]["node"].to_pylist()
    blocks = tables["blocks"].to_pylist()
    homes = [frozenset(nodes[rank] for rank in sets[block["consumers"]]) for block in blocks]
    keys = [(block["extent"], home) for block, home in zip(blocks, homes, strict=True)]
    assert len(set(keys)) == len(keys)
    for segment in tables["segments"].to_pylist():
        assert frozenset(nodes[rank] for rank in sets[segment["consumers"]]) == homes[segment["block"]]


@given(cases())
@settings(max_examples=60, deadline=None)
def test_segments_of_a_block_lie_in_the_order_of_the_file(case: Case) -> None:
    segments = case.plan.tables["segments"].to_pylist()
    for before, after in itertools.pairwise(segments):
        assert before["block"] != after["block"] or before["src_offset"] <= after["src_offset"]


@given(cases())
@settings(max_examples=60, deadline=None)
def test_a_rank_s_program_has_the_segments_that_it_takes_with_their_places_in_the_block(case: Case) -> None:
    sets, rows = _sets(case.plan), case.plan.tables["segments"].to_pylist()
    of_block = {key: list(group) for key, group in itertools.groupby(rows, key=lambda row: row["block"])}
    for rank in case.parallel.ranks:
        program = compile_rank(case.plan, case.manifest, rank, LOAD)
        found = {}
        for row, block in enumerate(program.blocks.block.tolist()):
            first, last = program.blocks.first_segment[row : row + 2].tolist()
            assert program.blocks.num_segments[row] == len(of_block[block])
            found[block] = program.segments.position[first:last].tolist()
        expected = {
            block: [at for at, segment in enumerate(segments) if rank in sets[segment["consumers"]]]
            for block, segments in of_block.items()
        }
        assert found == {block: places for block, places in expected.items() if places}


@given(cases())
@settings(max_examples=60, deadline=None)
def test_readers_are_consumers_and_direct_readers_are_the_rank_s_own_node(case: Case) -> None:
    nodes = case.plan.tables["ranks"]["node"].to_pylist()
    facts = load_facts(case.plan, max_worker_restarts=2)
    for extent in case.plan.tables["extents"].to_pylist():
        consumers = facts.consumers[ExtentId(extent["extent"])]
        assert extent["node"] in {nodes[rank] for rank in consumers}
        if extent["route"] == DIRECT:
            assert consumers == (extent["rank"],)
            assert ExtentId(extent["extent"]) not in facts.reader
        else:
            assert facts.reader[ExtentId(extent["extent"])] == extent["node"]


@given(cases())
@settings(max_examples=60, deadline=None)
def test_equal_input_gives_equal_tables(case: Case) -> None:
    again = replace(case)
    assert again.plan.tables == case.plan.tables
    assert again.plan.notes == case.plan.notes


@given(cases(), st.data())
@settings(max_examples=60, deadline=None)
def test_a_fragment_reads_any_extent_again_for_some_ranks_only(case: Case, data: st.DataObject) -> None:
    num_extents = len(case.plan.tables["extents"])
    extents = [ExtentId(e) for e in range(num_extents) if data.draw(st.booleans())]
    rank = Rank(data.draw(st.integers(0, case.parallel.world - 1)))
    program = agent_program(case, "n1", extents=extents, ranks=[rank])
    blocks = cut_blocks(case.files, program.extents, program.blocks, program.segments)
    whole = compile_rank(case.plan, case.manifest, rank, LOAD)
    assert sorted(blocks) == [b for b, e in zip(whole.blocks.block, whole.blocks.extent, strict=True) if e in extents]
    assert set(program.consumer_sets.values()) <= {(rank,)}
    assert program.relays == {}


@given(cases())
@settings(max_examples=60, deadline=None)
def test_relays_count_the_blocks_that_a_node_takes_from_another(case: Case) -> None:
    nodes = case.plan.tables["ranks"]["node"].to_pylist()
    programs = {node.id: agent_program(case, node.id) for node in case.topology.nodes}
    for node, program in programs.items():
        for other in programs.keys() - {node}:
            theirs = programs[other]
            sets = [theirs.consumer_sets[index] for index in theirs.blocks.consumers.tolist()]
            taken = sum(any(nodes[rank] == node for rank in members) for members in sets)
            assert program.relays.get(other, 0) == taken
