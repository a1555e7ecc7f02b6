"""The tuner's choices with a scripted bench, its cache, and the real bench on small shapes."""

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from castline.builder import cores
from castline.builder.autotune import (
    STEP_WEIGHTS,
    TuningRequest,
    autotune,
    cheapest,
    count_cases,
    default_choices,
    thread_candidates,
)
from castline.builder.bench import CachedBench, OrtBench, attention_feeds
from castline.builder.bench_models import inputs, matmul_model
from castline.builder.cores import physical_cores
from castline.builder.linear_sites import NO_SURROUNDINGS, Surroundings
from castline.builder.recipes import FP32, LINEAR_W4_G32, LINEAR_W8_G32, RECIPES, MatmulKernel, Recipe, Tolerance
from castline.builder.tuning_cache import TuningCache, TuningEnvironment, default_cache_dir
from castline.builder.tuning_cases import AttentionCase, MatmulCase
from castline.engines.errors import BuildError
from castline.engines.manifest import Host
from castline.plugins.contract import AttentionAttributes, KvDtypeCode, kv_pool_name
from castline.plugins.cpu.session import SessionOptions, native_options
from castline.plugins.linear import MAX_K, Activation

ATTENTION = AttentionAttributes(
    layer=0, num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, block_size=32, kv_dtype=KvDtypeCode.INT8
)
KERNELS = tuple(MatmulKernel(f"k{block}", 8, block, 4) for block in (32, 64, 128))
THREE_KERNELS = Recipe("three", "three kernels everywhere", KERNELS, KERNELS, Tolerance(0.02, 0.94))
HOST = Host("cpu", "x86_64", "a cpu", ("avx2",), 4)
ENVIRONMENT = TuningEnvironment(HOST, "1.32.0", "0" * 64, "avx2")


def request(**changes: object) -> TuningRequest:
    fields: dict[str, object] = {
        "recipe": THREE_KERNELS,
        "layer_shapes": ((64, 96), (96, 64)),
        "head_shapes": ((64, 512),),
        "attention": ATTENTION,
        "cores": 4,
        "max_model_len": 2048,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 512,
    }
    return TuningRequest(**{**fields, **changes})  # type: ignore[arg-type]


class ScriptedBench:
    """Times given by functions of the case; remembers what it was asked."""

    def __init__(
        self,
        matmul: Callable[[MatmulCase], float] = lambda case: 1.0,
        attention: Callable[[AttentionCase], float] = lambda case: 1.0,
    ) -> None:
        self._matmul, self._attention = matmul, attention
        self.matmuls: list[MatmulCase] = []
        self.attentions: list[AttentionCase] = []

    def matmul(self, case: MatmulCase) -> float:
        self.matmuls.append(case)
        return self._matmul(case)

    def attention(self, case: AttentionCase) -> float:
        self.attentions.append(case)
        return self._attention(case)


def test_weights_are_shares() -> None:
    """A weight table that does not sum to one would make costs of two tables incomparable in the report."""
    assert sum(STEP_WEIGHTS.values()) == pytest.approx(1.0)


def test_cheapest_is_by_ratio_not_by_sum() -> None:
    """By plain sum the largest step would decide alone: b saves 100 us of 10,000 and triples every decode step."""
    times = {"a": {"1": 10.0, "512": 10_000.0}, "b": {"1": 30.0, "512": 9_900.0}}
    assert cheapest(times, {"1": 0.5, "512": 0.5}) == "a"


def test_tie_falls_to_the_default() -> None:
    """Equal candidates must not make two builds differ."""
    times = {name: {"1": 5.0} for name in ("default", "other")}
    assert cheapest(times, {"1": 1.0}) == "default"


def test_noise_does_not_dethrone_the_default() -> None:
    """A candidate ahead by one per cent is ahead by chance; one ahead by ten is not."""
    assert cheapest({"default": {"1": 100.0}, "other": {"1": 99.0}}, {"1": 1.0}) == "default"
    assert cheapest({"default": {"1": 100.0}, "other": {"1": 90.0}}, {"1": 1.0}) == "other"


@pytest.mark.parametrize(("one_core_us", "chosen"), [(96.0, 4), (80.0, 1)])
def test_a_busy_host_does_not_cost_the_engine_its_cores(one_core_us: float, chosen: int) -> None:
    """While another process held a core, one thread timed 4 % faster than two; the engine was left with one."""
    bench = ScriptedBench(lambda case: one_core_us if case.threads == 1 else 100.0)
    assert autotune(request(), bench, lambda: None).num_threads == chosen


def test_defaults_are_the_first_kernels_and_all_cores() -> None:
    """--no-tune promises documented choices, with head and layers each from its own list."""
    choices = default_choices(request(recipe=RECIPES["int4"]))
    assert not choices.measured
    assert choices.kernels[64, 96] is RECIPES["int4"].layer_kernels[0]
    assert choices.kernels[64, 512] is RECIPES["int4"].head_kernels[0]
    assert (choices.num_threads, choices.block_size, choices.query_tile, choices.kv_split) == (4, 32, 0, 0)


@pytest.mark.parametrize("recipe", ["int8", "q4_1", "int4"])
def test_a_matmul_too_long_for_linear_has_other_kernels(recipe: str) -> None:
    """Linear refuses K above its limit, and would do so when the finished engine is loaded."""
    asked = request(recipe=RECIPES[recipe], layer_shapes=((MAX_K, 8), (MAX_K + 1, 8)), head_shapes=((MAX_K + 1, 9),))
    bench = ScriptedBench()
    choices = [default_choices(asked).kernels, autotune(asked, bench, lambda: None).kernels]
    for kernels in choices:
        assert kernels[MAX_K, 8].is_linear
        assert not kernels[MAX_K + 1, 8].is_linear
        assert not kernels[MAX_K + 1, 9].is_linear
    assert not [case for case in bench.matmuls if case.k > MAX_K and case.kernel.is_linear]


def test_weights_on_a_symmetric_grid_have_its_kernel_first() -> None:
    """It multiplies the same weights with fewer bytes; the head keeps its 8 bits."""
    symmetric = frozenset({(64, 96)})
    asked = request(recipe=RECIPES["q4_1"], symmetric_shapes=symmetric)
    assert asked.kernels((64, 96)) == (LINEAR_W4_G32, *RECIPES["q4_1"].layer_kernels)
    assert asked.kernels((96, 64)) == RECIPES["q4_1"].layer_kernels
    assert asked.kernels((64, 512)) == RECIPES["q4_1"].head_kernels
    slow = ScriptedBench(lambda case: 2.0 if case.kernel.name == LINEAR_W4_G32.name else 1.0)
    assert autotune(asked, slow, lambda: None).kernels[64, 96].name == "linear-w4dm-g32"


def test_picks_the_fastest_of_each() -> None:
    """Each shape has its own winner; attention attributes are chosen one after the other."""
    _, narrow, wide = KERNELS

    def matmul(case: MatmulCase) -> float:
        fastest = wide if case.k == 64 else narrow
        return (10.0 if case.kernel == fastest else 20.0) / (2 if case.threads == 2 else 1)

    def attention(case: AttentionCase) -> float:
        a = case.attributes
        return 1.0 + abs(a.block_size - 64) + abs(a.query_tile - 8) + abs(a.kv_split - 256)

    bench = ScriptedBench(matmul, attention)
    choices = autotune(request(), bench, lambda: None)
    assert choices.measured
    assert choices.num_threads == 2
    assert choices.kernels == {(64, 96): wide, (96, 64): narrow, (64, 512): wide}
    assert (choices.block_size, choices.query_tile, choices.kv_split) == (64, 8, 256)
    assert {case.attributes.block_size for case in bench.attentions if case.attributes.query_tile} == {64}


def test_what_the_user_fixed_is_not_tuned() -> None:
    """--threads and --block-size would otherwise be accepted and ignored."""
    bench = ScriptedBench(attention=lambda case: float(case.attributes.block_size))
    choices = autotune(request(threads=3, block_size=128), bench, lambda: None)
    assert (choices.num_threads, choices.block_size) == (3, 128)
    assert {case.threads for case in bench.matmuls} == {3}
    assert {case.attributes.block_size for case in bench.attentions} == {128}
    assert not any(name.startswith(("threads", "attention block_size")) for name in choices.timings_us)


def test_cases_stay_within_the_limits() -> None:
    """A kernel must not win by a step size that this engine never meets."""
    bench = ScriptedBench()
    autotune(request(threads=1, max_model_len=128, max_num_seqs=8, max_num_batched_tokens=32), bench, lambda: None)
    assert {case.rows for case in bench.matmuls if case.n == 512} == {1, 8}
    assert {case.rows for case in bench.matmuls if case.n != 512} == {1, 8, 32}
    assert max(case.kv_len for case in bench.attentions) <= 128


def test_progress_counts_every_timing() -> None:
    """The bar ends exactly at its end."""
    for asked in (request(), request(recipe=LINEAR_OR_NOT, has_wide=True)):
        advanced: list[None] = []
        autotune(asked, script_of_wide(1.0, 5.0, 9.0), lambda: advanced.append(None))  # noqa: B023
        assert len(advanced) == count_cases(asked)


def test_manifest_holds_every_timing() -> None:
    """The report shows each candidate of each thing that was tuned, the choice among them."""
    choices = autotune(request(), ScriptedBench(), lambda: None)
    tuning = choices.manifest()
    assert tuning.matmul["64x96"] in tuning.timings_us["matmul 64x96, 512"]
    assert set(tuning.timings_us["threads, 1"]) == {"4", "2", "1"}
    assert set(tuning.attention) == {"block_size", "query_tile", "kv_split"}


LINEAR_OR_NOT = Recipe(
    "two", "Linear or not", (LINEAR_W8_G32, KERNELS[0]), (LINEAR_W8_G32, KERNELS[0]), Tolerance(0.02, 0.94)
)


def script_of_wide(narrow_us: float, wide_us: float, other_us: float) -> ScriptedBench:
    """Narrow kernels take a time for each row, wide ones for each 16 rows, others for each row."""

    def matmul(case: MatmulCase) -> float:
        if not case.kernel.is_linear:
            return other_us * case.rows
        wide = 0 < case.kernel.wide_rows <= case.rows
        return wide_us * -(-case.rows // 16) if wide else narrow_us * case.rows

    return ScriptedBench(matmul)


@pytest.mark.parametrize(("wide_us", "first"), [(5.0, 8), (12.0, 16), (40.0, -1)])
def test_wide_kernels_from_where_they_win(wide_us: float, first: int) -> None:
    """Wide kernels compute 16 rows for the price of one: too early they cost a decode step, too late a prefill."""
    choices = autotune(request(recipe=LINEAR_OR_NOT, has_wide=True), script_of_wide(1.0, wide_us, 9.0), lambda: None)
    assert {kernel.wide_rows for kernel in choices.kernels.values()} == {first}
    assert {kernel.name for kernel in choices.kernels.values()} == {"linear-w8-g32"}
    tuning = choices.manifest()
    assert tuning.matmul["64x96"] == "linear-w8-g32"
    assert tuning.wide_rows["64x96"] == first
    assert set(tuning.timings_us["wide rows 64x96, 16"]) == {"narrow", "wide"}


def test_one_disturbed_timing_does_not_turn_wide_kernels_off() -> None:
    """On a busy host one wide timing of four came out 3 % slower than the narrow one, and 30 times slower than the next
    size's: the engine was left without wide kernels at every size."""
    calm = script_of_wide(1.0, 5.0, 90.0)

    def matmul(case: MatmulCase) -> float:
        disturbed = case.rows == 32 and case.kernel.is_linear
        return (1000.0 if case.kernel.wide_rows == -1 else 1030.0) if disturbed else calm.matmul(case)

    choices = autotune(request(recipe=LINEAR_OR_NOT, has_wide=True), ScriptedBench(matmul), lambda: None)
    assert {kernel.wide_rows for kernel in choices.kernels.values()} == {8}


def test_wide_kernels_are_not_timed_where_there_are_none() -> None:
    """Without matrix units both are one kernel, and timing noise would be written into the engine."""
    bench = script_of_wide(1.0, 0.1, 9.0)
    choices = autotune(request(recipe=LINEAR_OR_NOT), bench, lambda: None)
    assert {case.kernel.wide_rows for case in bench.matmuls} == {0}
    assert {kernel.wide_rows for kernel in choices.kernels.values()} == {0}


def test_another_kernel_wins_where_it_is_faster() -> None:
    """Linear is a candidate like any other."""
    choices = autotune(request(recipe=LINEAR_OR_NOT, has_wide=True), script_of_wide(1.0, 5.0, 0.1), lambda: None)
    assert {kernel.name for kernel in choices.kernels.values()} == {KERNELS[0].name}
    assert not choices.manifest().wide_rows


def test_matmuls_are_timed_with_what_surrounds_them() -> None:
    """The norm before QKV and the gate of the MLP are inside one kernel and outside another."""
    bench = ScriptedBench()
    around = Surroundings(norm=True)
    autotune(request(surroundings={(64, 96): around}), bench, lambda: None)
    assert {case.around for case in bench.matmuls if case.n == 96} == {around}
    assert {case.around for case in bench.matmuls if case.n != 96} == {NO_SURROUNDINGS}
    bare, normed = (MatmulCase(64, 96, KERNELS[0], 1, 1, s).describe() for s in (NO_SURROUNDINGS, around))
    assert bare != normed


def test_thread_candidates_of_small_hosts() -> None:
    """One core has one candidate, not three times the same."""
    assert thread_candidates(1) == (1,)
    assert thread_candidates(2) == (2, 1)
    assert thread_candidates(16) == (16, 8, 4)


CASE = {"k": 64, "n": 96, "kernel": "a"}


def test_cache_returns_what_was_put(tmp_path: Path) -> None:
    """The second build reads timings instead of taking them."""
    cache = TuningCache(tmp_path, ENVIRONMENT)
    assert cache.get("matmul", CASE) is None
    cache.put("matmul", CASE, 12.5)
    assert TuningCache(tmp_path, ENVIRONMENT).get("matmul", CASE) == 12.5
    assert TuningCache(tmp_path, ENVIRONMENT).get("matmul", dict(reversed(CASE.items()))) == 12.5


@pytest.mark.parametrize(
    "other",
    [
        TuningEnvironment(Host("cpu", "x86_64", "another cpu", ("avx2",), 4), "1.32.0", "0" * 64, "avx2"),
        TuningEnvironment(Host("cpu", "x86_64", "a cpu", ("avx2", "avx512f"), 4), "1.32.0", "0" * 64, "avx2"),
        TuningEnvironment(Host("cpu", "x86_64", "a cpu", ("avx2",), 8), "1.32.0", "0" * 64, "avx2"),
        TuningEnvironment(HOST, "1.33.0", "0" * 64, "avx2"),
        TuningEnvironment(HOST, "1.32.0", "1" * 64, "avx2"),
        TuningEnvironment(HOST, "1.32.0", "0" * 64, "portable"),
    ],
    ids=["cpu", "isa", "cores", "onnxruntime", "plugin", "kernels"],
)
def test_cache_knows_its_environment(tmp_path: Path, other: TuningEnvironment) -> None:
    """A home directory shared by two hosts must not give one the other's timings."""
    TuningCache(tmp_path, ENVIRONMENT).put("matmul", CASE, 12.5)
    assert TuningCache(tmp_path, other).get("matmul", CASE) is None
    assert TuningCache(tmp_path, ENVIRONMENT).get("attention", CASE) is None
    assert TuningCache(tmp_path, ENVIRONMENT).get("matmul", {**CASE, "n": 97}) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\x00", b'{"key": "x", "microseconds": 1.0}', b"null"])
def test_damaged_entry_is_a_miss_and_is_replaced(tmp_path: Path, content: bytes) -> None:
    """A file cut short by a full disk must not stop a build, nor be believed."""
    cache = TuningCache(tmp_path, ENVIRONMENT)
    cache.put("matmul", CASE, 12.5)
    [entry] = tmp_path.rglob("*.json")
    entry.write_bytes(content)
    assert cache.get("matmul", CASE) is None
    cache.put("matmul", CASE, 13.5)
    assert cache.get("matmul", CASE) == 13.5


@pytest.mark.parametrize("microseconds", ["-1.0", "0.0", "1e999"])
def test_impossible_timing_is_a_miss(tmp_path: Path, microseconds: str) -> None:
    """A zero would win every comparison and divide by zero."""
    cache = TuningCache(tmp_path, ENVIRONMENT)
    cache.put("matmul", CASE, 12.5)
    [entry] = tmp_path.rglob("*.json")
    entry.write_text(entry.read_text().replace("12.5", microseconds))
    assert cache.get("matmul", CASE) is None


def test_unwritable_cache_is_no_error(tmp_path: Path) -> None:
    """A read-only home directory makes builds slower, not impossible."""
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    cache = TuningCache(blocked, ENVIRONMENT)
    cache.put("matmul", CASE, 12.5)
    assert cache.get("matmul", CASE) is None


def _hammer(directory: Path, value: float) -> None:
    cache = TuningCache(directory, ENVIRONMENT)
    for _ in range(200):
        cache.put("matmul", CASE, value)
        assert cache.get("matmul", CASE) in (1.0, 2.0)


def test_concurrent_builds_share_a_cache(tmp_path: Path) -> None:
    """Two writers of one entry: every reader sees one of the two whole, and no temporary file stays."""
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_hammer, args=(tmp_path, value)) for value in (1.0, 2.0)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert [path.suffix for path in tmp_path.rglob("*") if path.is_file()] == [".json"]


def test_second_tuning_times_nothing(tmp_path: Path) -> None:
    """The whole of a tuning comes from the cache the second time, with the same choices."""
    first = autotune(request(), CachedBench(ScriptedBench(), TuningCache(tmp_path, ENVIRONMENT)), lambda: None)
    idle = ScriptedBench()
    second = autotune(request(), CachedBench(idle, TuningCache(tmp_path, ENVIRONMENT)), lambda: None)
    assert second == first
    assert not idle.matmuls
    assert not idle.attentions


def test_a_user_without_a_home_is_told_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers run under ids that no password file knows; pathlib raises RuntimeError there."""

    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nobody)
    with pytest.raises(BuildError, match="--cache-dir"):
        default_cache_dir()


def test_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache lies where the platform's users look for it."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_cache_dir() == Path("/somewhere/castline")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache/castline"


def _options(threads: int) -> ort.SessionOptions:
    return native_options(SessionOptions(num_threads=threads))


OFFERED = {k.name: k for recipe in RECIPES.values() for k in (*recipe.layer_kernels, *recipe.head_kernels)}
OFFERED[LINEAR_W4_G32.name] = LINEAR_W4_G32
AROUND = {
    "bare": NO_SURROUNDINGS,
    "norm": Surroundings(norm=True, bias=True),
    "gated": Surroundings(norm=True, activation=Activation.SILU, gated=True),
    "gelu": Surroundings(bias=True, activation=Activation.GELU_TANH),
    "residual": Surroundings(bias=True, residual=True),
    "all": Surroundings(True, True, Activation.GELU, True, True),
}


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
@pytest.mark.parametrize("kernel", OFFERED.values(), ids=OFFERED)
def test_every_kernel_of_every_recipe_runs(kernel: MatmulKernel, around: Surroundings) -> None:
    """A recipe must not list a kernel that ONNX Runtime refuses, K not divisible by its block included."""
    bench = OrtBench(_options)
    assert bench.matmul(MatmulCase(72, 48, kernel, rows=3, threads=1, around=around)) > 0


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_linear_is_timed_with_its_surroundings_inside(around: Surroundings) -> None:
    """A Linear node timed bare, against a MatMulNBits timed bare, would not be credited with the nodes it saves."""
    random = np.random.default_rng(0)
    linear = onnx.load_from_string(matmul_model(64, 32, LINEAR_W8_G32, around, random)[0])
    plain = onnx.load_from_string(matmul_model(64, 32, FP32, around, random)[0])
    assert [node.op_type for node in linear.graph.node] == ["Linear"]
    parts = (around.norm, around.bias, around.activation, around.gated, around.residual)
    assert len(plain.graph.node) > sum(map(bool, parts))


def test_timed_arrays_are_aligned_as_mapped_weights_are() -> None:
    """NumPy's arrays begin inside a cache line: the timing would be of loads that the engine never makes."""
    random = np.random.default_rng(0)
    _, weights = matmul_model(576, 960, LINEAR_W8_G32, NO_SURROUNDINGS, random)
    arrays = [*weights.values(), *inputs(576, 960, Surroundings(residual=True), 3, random).values()]
    assert len(arrays) == 4
    assert all(array.ctypes.data % 4096 == 0 and array.flags.c_contiguous for array in arrays)


def test_matmul_model_computes_its_shape() -> None:
    """A timing of another shape than the case's would steer the choice wrongly and silently."""
    random = np.random.default_rng(0)
    around = Surroundings(bias=True, residual=True)
    model, weights = matmul_model(8, 5, FP32, around, random)
    options = _options(1)
    options.add_external_initializers(list(weights), [ort.OrtValue.ortvalue_from_numpy(w) for w in weights.values()])
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    feeds = inputs(8, 5, around, 3, random)
    wanted = feeds["x"] @ weights["w"] + 1 + feeds["residual"]
    np.testing.assert_allclose(session.run(None, feeds)[0], wanted, rtol=1e-5, atol=1e-5)


def test_attention_feeds_keep_the_step_contract() -> None:
    """Slots must be distinct and lie in the blocks that the table gives the sequence."""
    feeds = attention_feeds(
        AttentionCase(ATTENTION, batch=3, query_len=5, kv_len=70, threads=1), np.random.default_rng(0)
    )
    slots, table = feeds["slot_mapping"].reshape(3, 5), feeds["block_table"]
    assert len(set(slots.reshape(-1).tolist())) == 15
    assert table.shape == (3, 3)
    for row in range(3):
        assert set((slots[row] // 32).tolist()) <= set(table[row].tolist())
    assert feeds["cu_query_lens"].tolist() == [0, 5, 10, 15]
    assert feeds["kv_lens"].tolist() == [70, 70, 70]
    assert feeds[kv_pool_name(0)].shape[0] == 9


def test_hardware_threads_are_not_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four hardware threads of two cores: two threads that share a core only take turns."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(cores, "usable_cores", lambda: 4)
    for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        (tmp_path / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(f"{siblings}\n")
    assert physical_cores(tmp_path) == 2
    assert physical_cores(tmp_path / "unknown") == 4
    monkeypatch.setattr(cores, "usable_cores", lambda: 1)
    assert physical_cores(tmp_path) == 1
