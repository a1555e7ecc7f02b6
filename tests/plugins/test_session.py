"""CpuSession over a two-layer engine graph small enough to compute by hand."""

import gc
import os
import sys
import time
import weakref
from dataclasses import asdict, replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from castline.engines.errors import EngineError
from castline.plugins.contract import AttentionAttributes, StepTensors
from castline.plugins.cpu.node_model import block_bytes
from castline.plugins.cpu.operator_profile import Role
from castline.plugins.cpu.session import CpuSession, SessionOptions
from castline.plugins.cpu.step_binding import _number_slots
from castline.plugins.reference import AttentionInputs, ReferencePool, paged_attention

VOCAB, WIDTH, BLOCKS, MAX_POSITION = 40, 24, 6, 128


class TinyEngine:
    """embedding -> 2 x (x + attention(x @ qkv) @ out) -> rows -> head, as an ONNX model and in NumPy."""

    def __init__(self, attributes: AttentionAttributes) -> None:
        a = self.attributes = attributes
        rng = np.random.default_rng(0)
        heads = a.num_heads * a.head_dim

        def weight(*shape: int) -> np.ndarray:
            return (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)

        angles = np.outer(np.arange(MAX_POSITION), 1.0 / 10 ** np.linspace(0, 2, a.rotary_dim // 2))
        self.weights = {
            "embedding": rng.standard_normal((VOCAB, WIDTH)).astype(np.float32),
            "cos": np.cos(angles).astype(np.float32),
            "sin": np.sin(angles).astype(np.float32),
            "head": weight(WIDTH, VOCAB),
        }
        for layer in range(2):
            self.weights[f"qkv.{layer}"] = weight(WIDTH, heads + 2 * a.num_kv_heads * a.head_dim)
            self.weights[f"out.{layer}"] = weight(heads, WIDTH)

    def model(self) -> onnx.ModelProto:
        node = helper.make_node
        nodes = [
            node("Gather", ["embedding", "input_ids"], ["x.0"]),
            node("Gather", ["cos", "positions"], ["c"]),
            node("Gather", ["sin", "positions"], ["s"]),
        ]
        for i in range(2):
            step = ["slot_mapping", "cu_query_lens", "kv_lens", "block_table"]
            values = asdict(self.attributes) | {"layer": i}
            inputs = [f"p.{i}", "c", "s", "", "", f"kv_pool.{i}", *step]
            nodes += [
                node("MatMul", [f"x.{i}", f"qkv.{i}"], [f"p.{i}"]),
                node("PagedAttention", inputs, [f"a.{i}"], domain="castline", **values),
                node("MatMul", [f"a.{i}", f"out.{i}"], [f"o.{i}"]),
                node("Add", [f"x.{i}", f"o.{i}"], [f"x.{i + 1}"]),
            ]
        nodes += [node("Gather", ["x.2", "logits_indices"], ["rows"]), node("MatMul", ["rows", "head"], ["logits"])]
        info = helper.make_tensor_value_info
        integers = {
            "input_ids": (TensorProto.INT64, ["T"]),
            "positions": (TensorProto.INT64, ["T"]),
            "slot_mapping": (TensorProto.INT32, ["T"]),
            "cu_query_lens": (TensorProto.INT32, ["B1"]),
            "kv_lens": (TensorProto.INT32, ["B"]),
            "block_table": (TensorProto.INT32, ["B", "M"]),
            "logits_indices": (TensorProto.INT64, ["R"]),
        }
        inputs = [info(name, *spec) for name, spec in integers.items()]
        inputs += [info(f"kv_pool.{i}", TensorProto.UINT8, ["N", block_bytes(self.attributes)]) for i in range(2)]
        graph = helper.make_graph(
            nodes,
            "tiny",
            inputs,
            [info("logits", TensorProto.FLOAT, ["R", VOCAB])],
            [numpy_helper.from_array(w, name) for name, w in self.weights.items()],
        )
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("castline", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)

    def logits(self, step: StepTensors, pools: list[ReferencePool]) -> np.ndarray:
        w = self.weights
        x = w["embedding"][step.input_ids]
        for i in range(2):
            inputs = AttentionInputs(
                qkv=x @ w[f"qkv.{i}"],
                slot_mapping=step.slot_mapping,
                cu_query_lens=step.cu_query_lens,
                kv_lens=step.kv_lens,
                block_table=step.block_table,
                cos=w["cos"][step.positions],
                sin=w["sin"][step.positions],
            )
            x = x + paged_attention(self.attributes, inputs, pools[i]) @ w[f"out.{i}"]
        return x[step.logits_indices] @ w["head"]


def make_step(spans, tables, rows, block_size=16):
    """Tokens start .. stop of each sequence, whose ids follow from sequence and position."""
    tokens = [(s, p) for s, (start, stop) in enumerate(spans) for p in range(start, stop)]
    positions = np.array([p for _, p in tokens], np.int64)
    slots = [tables[s][p // block_size] * block_size + p % block_size for s, p in tokens]
    return StepTensors(
        input_ids=np.array([(7 * p + 11 * s + 3) % VOCAB for s, p in tokens], np.int64),
        positions=positions,
        slot_mapping=np.array(slots, np.int32),
        cu_query_lens=np.cumsum([0, *(stop - start for start, stop in spans)]).astype(np.int32),
        kv_lens=np.array([stop for _, stop in spans], np.int32),
        block_table=np.array(tables, np.int32).reshape(len(spans), len(tables[0]) if tables else 0),
        logits_indices=np.array(rows, np.int64),
    )


@pytest.fixture
def engine(tools):
    return TinyEngine(tools.attributes())


@pytest.fixture
def graph(engine, tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(engine.model(), path)
    return path


@pytest.fixture
def session(engine, graph):
    options = SessionOptions(num_threads=2)
    with CpuSession(
        graph, num_blocks=BLOCKS, block_size=16, block_bytes=block_bytes(engine.attributes), options=options
    ) as session:
        yield session


@pytest.fixture
def pools(engine):
    return [ReferencePool.zeros(engine.attributes, BLOCKS) for _ in range(2)]


FIRST = make_step([(0, 20), (0, 9)], [[4, 1], [0, 0]], [19, 28, 0])
SECOND = make_step([(20, 21), (9, 12)], [[4, 1], [0, 0]], [0, 3])


def test_steps_equal_the_reference(session, engine, pools) -> None:
    """Pools bound to the wrong layer, inputs swapped, or a pool copied instead of written in place."""
    assert (session.num_layers, session.vocab_size) == (2, VOCAB)
    for step in (FIRST, SECOND):
        np.testing.assert_allclose(session.step(step), engine.logits(step, pools), rtol=0, atol=1e-4)


def test_rows_vary(session, engine, pools) -> None:
    """R is 0 for a step of chunks alone, and larger than ever before in the next: the logits buffer must follow."""
    for rows in ([], [28], list(range(29)), [], [3]):
        step = replace(FIRST, logits_indices=np.array(rows, np.int64))
        logits = session.step(step)
        assert logits.shape == (len(rows), VOCAB)
        np.testing.assert_allclose(logits, engine.logits(step, pools), rtol=0, atol=1e-4)


def test_steps_of_one_shape_read_their_own_inputs(session, engine, pools) -> None:
    """What is bound stays bound while shapes stay: a step that reads the integers of the step before it."""
    session.step(FIRST)
    engine.logits(FIRST, pools)
    last = None
    for position in range(20, 24):  # the second sequence's block table and tokens change, no shape does
        step = make_step(
            [(position, position + 1), (position - 11, position - 10)], [[4, 1], [0, position % 3]], [1, 0]
        )
        given = {name: array.copy() for name, array in step.feeds().items()}
        logits = session.step(step)
        np.testing.assert_allclose(logits, engine.logits(step, pools), rtol=0, atol=1e-4)
        assert last is None or logits is last, "addresses are asked for anew at every step"
        last = logits
        for name, array in step.feeds().items():
            np.testing.assert_array_equal(array, given[name])
            array.fill(0)  # the caller's again


def test_empty_step(session) -> None:
    """No sequences at all: a warm-up or an idle tick."""
    empty = make_step([], [], [])
    assert session.step(empty).shape == (0, VOCAB)
    assert session.step(replace(empty, block_table=np.zeros((0, 2), np.int32))).shape == (0, VOCAB)


def test_strided_inputs(session, engine, pools) -> None:
    """A slice of a larger buffer is bound by address: its strides would be ignored, and its neighbours read."""
    wide = np.zeros((2, 8), np.int32)
    wide[:, ::4] = FIRST.block_table
    step = replace(FIRST, block_table=wide[:, ::4], logits_indices=np.array([28, 7, 19, 7])[::2])
    np.testing.assert_allclose(session.step(step), engine.logits(step, pools), rtol=0, atol=1e-4)


def test_copied_blocks_continue_alike(session) -> None:
    """Copy on write: the copy must hold every layer's K and V, also where one copy reads another's destination."""
    session.step(FIRST)
    expected = session.step(SECOND).copy()
    session.step(FIRST)
    session.copy_blocks([(4, 2), (2, 3), (1, 5)])
    moved = make_step([(20, 21), (9, 12)], [[3, 5], [0, 0]], [0, 3])
    np.testing.assert_array_equal(session.step(moved), expected)
    with pytest.raises(EngineError, match="block copy 0 -> 6: the pool has 6 blocks"):
        session.copy_blocks([(0, 6)])


def test_failed_step_is_an_engine_error(session, engine, pools) -> None:
    """A step that fails names the tensor, and the next step is unharmed."""
    session.step(FIRST)
    with pytest.raises(EngineError, match=r"the step failed: .*slot_mapping\[0\] is 192"):  # counted in both layers
        session.step(replace(SECOND, slot_mapping=SECOND.slot_mapping + 76))
    engine.logits(FIRST, pools)
    np.testing.assert_allclose(session.step(SECOND), engine.logits(SECOND, pools), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "broken",
    [
        {"input_ids": np.zeros(29, np.int32)},
        {"block_table": np.zeros((2, 2), np.int64)},
        {"positions": np.zeros((29, 1), np.int64)},
        {"input_ids": np.full(29, VOCAB, np.int64)},
    ],
)
def test_wrong_inputs_are_engine_errors(session, broken) -> None:
    """Another dtype or rank bound by address would be read as garbage."""
    with pytest.raises(EngineError, match="the step failed"):
        session.step(replace(FIRST, **broken))


def test_pool_is_aligned_zeroed_and_in_place(session) -> None:
    """The kernels' loads want 64-byte blocks, and the graph must write the very array that copy_blocks copies."""
    assert session.pool.shape == (BLOCKS, 2, session.block_bytes)
    assert session.pool.ctypes.data % 64 == 0
    assert session.pool[0, 1].ctypes.data % 64 == 0
    assert not session.pool.any()
    session.step(FIRST)
    assert [bool(session.pool[b, 0].any()) for b in range(BLOCKS)] == [True, True, False, False, True, False]
    assert (session.pool[:, 1].any(axis=1) == session.pool[:, 0].any(axis=1)).all()


def test_blocks_without_memory_are_slower_and_right(engine, graph, pools) -> None:
    """A step may be ahead of what was provided: the pages that it faults in must be those of its own blocks."""
    size = block_bytes(engine.attributes)
    with CpuSession(graph, num_blocks=BLOCKS, block_size=16, block_bytes=size, num_provided=0) as session:
        for step in (FIRST, SECOND):
            np.testing.assert_allclose(session.step(step), engine.logits(step, pools), rtol=0, atol=1e-4)
            assert session.provide(0, 3) is (sys.platform == "linux")
    assert not session.provide(0, 3)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_slots_are_numbered_over_layers(dtype) -> None:
    """The slot of a layer's block as the kernels compute it: another block's, or a write for a token that has none."""
    slots = np.array([-1, 0, 15, 16, 37, -1, 95], dtype)
    wanted = [-1 if s < 0 else s // 16 * 3 * 16 + s % 16 for s in slots.tolist()]
    out = np.full_like(slots, 99)
    _number_slots(slots, 16, 3, out)
    assert out.tolist() == wanted
    assert slots.tolist() == [-1, 0, 15, 16, 37, -1, 95]


def test_wrong_graphs_are_refused(engine, graph, tmp_path) -> None:
    """A bundle whose parts do not fit each other fails at load, with the field, not in its first step."""
    size = block_bytes(engine.attributes)
    with pytest.raises(EngineError, match=rf"kv_pool\.0 has blocks of {size} bytes, the engine of 64"):
        CpuSession(graph, num_blocks=BLOCKS, block_size=16, block_bytes=64)
    (tmp_path / "torn.onnx").write_bytes(graph.read_bytes()[:-100])
    with pytest.raises(EngineError, match=r"cannot load .*torn\.onnx"):
        CpuSession(tmp_path / "torn.onnx", num_blocks=1, block_size=16, block_bytes=size)
    with pytest.raises(EngineError, match=r"cannot load .*absent\.onnx"):
        CpuSession(tmp_path / "absent.onnx", num_blocks=1, block_size=16, block_bytes=size)
    other = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "other",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])],
    )
    model = helper.make_model(other, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    with pytest.raises(EngineError, match=r"no input kv_pool\.0"):
        CpuSession(model.SerializeToString(), num_blocks=1, block_size=16, block_bytes=size)


def test_more_slots_than_int32_counts_are_refused(engine, graph) -> None:
    """Slots that wrap round would write into other sequences' blocks."""
    with pytest.raises(EngineError, match=r"2,147,483,648 slots.*ask for at most 67108863 blocks"):
        CpuSession(graph, num_blocks=1 << 26, block_size=16, block_bytes=block_bytes(engine.attributes))


def test_options_reach_the_runtime(engine, graph, tmp_path) -> None:
    """Options that are accepted and ignored."""
    options = SessionOptions(
        num_threads=1, config={"session.disable_prepacking": "1"}, profile_prefix=str(tmp_path / "profile")
    )
    with CpuSession(
        graph, num_blocks=BLOCKS, block_size=16, block_bytes=block_bytes(engine.attributes), options=options
    ) as session:
        native = session._session.get_session_options()
        assert native.get_session_config_entry("session.disable_prepacking") == "1"
        assert native.intra_op_num_threads == 1
        session.step(FIRST)
    (profile,) = tmp_path.glob("profile*.json")
    assert "PagedAttention" in profile.read_text()


def test_a_profiled_session_goes_on(session, tmp_path) -> None:
    """Opening the graph anew must keep the pool and the results, and a recording that is over leaves no file."""
    session.step(FIRST)
    expected = session.step(SECOND).copy()
    for _ in range(2):
        session.start_profile(str(tmp_path / "operators"))
        begin = time.perf_counter_ns()
        results = [session.step(SECOND).copy() for _ in range(3)]
        end = time.perf_counter_ns()
        runs = session.end_profile()
        np.testing.assert_array_equal(results, [expected] * 3)
        np.testing.assert_array_equal(session.step(SECOND), expected)
        assert len(runs) == 3
        assert begin < runs[1].start_ns < end, "on the caller's clock"
        for run in runs:
            roles = [operator.role for operator in run.operators]
            assert (roles.count(Role.QKV), roles.count(Role.ATTENTION), roles.count(Role.OUT)) == (2, 2, 2)
            assert roles[-1] is Role.HEAD
    assert list(tmp_path.glob("operators*")) == []
    session.close()
    with pytest.raises(EngineError, match="closed"):
        session.start_profile("")


def test_close_releases_everything(engine, graph) -> None:
    """A second engine in the same process must find the first one's pool and threads gone."""
    gc.collect()  # sessions of earlier tests end before the count
    threads = tasks()
    session = CpuSession(
        graph,
        num_blocks=BLOCKS,
        block_size=16,
        block_bytes=block_bytes(engine.attributes),
        options=SessionOptions(num_threads=3),
    )
    session.step(FIRST)
    native, pool = weakref.ref(session._session), weakref.ref(session.pool.base)
    assert len(tasks()) == len(threads) + 2
    session.close()
    session.close()
    gc.collect()
    assert native() is None
    assert pool() is None
    assert tasks() == threads
    with pytest.raises(EngineError, match="closed"):
        session.step(FIRST)


def tasks() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def cpu_seconds(threads: set[str]) -> float:
    total = 0
    for task in threads:
        with open(f"/proc/self/task/{task}/schedstat") as stat:
            total += int(stat.read().split()[0])
    return total / 1e9


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="reads Linux's /proc")
def test_idle_session_uses_no_cpu(engine, graph) -> None:
    """Threads that spin after a step hold a core of a server that has nothing to do."""
    before = tasks()
    options = SessionOptions(num_threads=2)
    step = make_step([(0, 96)], [[0, 1, 2, 3, 4, 5]], [95])  # enough work to hand some to the second thread
    with CpuSession(
        graph, num_blocks=BLOCKS, block_size=16, block_bytes=block_bytes(engine.attributes), options=options
    ) as session:
        workers = tasks() - before
        assert len(workers) == 1
        for _ in range(5000):  # on a busy machine the second thread may sleep through many
            session.step(step)
            if cpu_seconds(workers) > 0.0005:
                break
        used = cpu_seconds(workers)
        assert used > 0.0005
        time.sleep(0.5)
        assert cpu_seconds(workers) - used < 0.05, "a thread that spins takes ten times that"
