"""Times one kernel in a real ONNX Runtime session, as the engine will run it.

The fastest of several runs is kept: noise only ever adds time. Sizes are in elements, times in microseconds.
"""

import time
from collections.abc import Callable

import numpy as np
import onnxruntime as ort

from castline.builder.bench_models import Feeds, inputs, matmul_model
from castline.builder.tuning_cache import TuningCache
from castline.builder.tuning_cases import AttentionCase, Bench, MatmulCase
from castline.engines.capacity import blocks_for
from castline.plugins.contract import BLOCK_TABLE, CU_QUERY_LENS, KV_LENS, SLOT_MAPPING, QkNorm, kv_pool_name
from castline.plugins.cpu.node_model import (
    COS,
    K_NORM_WEIGHT,
    Q_NORM_WEIGHT,
    QKV,
    SIN,
    block_bytes,
    node_inputs,
    serialise_node_model,
)

MIN_RUNS = 3
MAX_RUNS = 1000
CASE_SECONDS = 0.15
"""Time spent on one case once MIN_RUNS are done."""


class OrtBench:
    """Times cases with ONNX Runtime; *session_options* makes the options that the engine's own session has."""

    def __init__(self, session_options: Callable[[int], ort.SessionOptions], seed: int = 0) -> None:
        self._session_options = session_options
        self._random = np.random.default_rng(seed)
        self._matmul_key: tuple[object, ...] = ()
        self._matmul_session: ort.InferenceSession | None = None

    def matmul(self, case: MatmulCase) -> float:
        key = (case.k, case.n, case.kernel, case.around, case.threads)
        if key != self._matmul_key or self._matmul_session is None:
            model, weights = matmul_model(case.k, case.n, case.kernel, case.around, self._random)
            self._matmul_session = self._session(model, case.threads, weights)
            self._matmul_key = key
        return time_session(self._matmul_session, inputs(case.k, case.n, case.around, case.rows, self._random))

    def attention(self, case: AttentionCase) -> float:
        session = self._session(serialise_node_model(case.attributes), case.threads, {})
        return time_session(session, attention_feeds(case, self._random))

    def _session(self, model: bytes, threads: int, weights: Feeds) -> ort.InferenceSession:
        options = self._session_options(threads)
        values = [ort.OrtValue.ortvalue_from_numpy(array) for array in weights.values()]
        options.add_external_initializers(list(weights), values)
        return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


class CachedBench:
    """A bench that asks the cache first."""

    def __init__(self, bench: Bench, cache: TuningCache) -> None:
        self._bench = bench
        self._cache = cache

    def matmul(self, case: MatmulCase) -> float:
        return self._cached("matmul", case, lambda: self._bench.matmul(case))

    def attention(self, case: AttentionCase) -> float:
        return self._cached("attention", case, lambda: self._bench.attention(case))

    def _cached(self, op: str, case: MatmulCase | AttentionCase, measure: Callable[[], float]) -> float:
        known = self._cache.get(op, case.describe())
        if known is not None:
            return known
        microseconds = measure()
        self._cache.put(op, case.describe(), microseconds)
        return microseconds


def time_session(session: ort.InferenceSession, feeds: Feeds) -> float:
    """Microseconds of the fastest of several runs, inputs and outputs bound once."""
    binding = session.io_binding()
    for name, array in feeds.items():
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
    for output in session.get_outputs():
        binding.bind_output(output.name, "cpu")
    session.run_with_iobinding(binding)
    best = float("inf")
    stop = time.perf_counter() + CASE_SECONDS
    for run in range(MAX_RUNS):
        started = time.perf_counter()
        session.run_with_iobinding(binding)
        ended = time.perf_counter()
        best = min(best, ended - started)
        if ended > stop and run + 1 >= MIN_RUNS:
            break
    return best * 1e6


def attention_feeds(case: AttentionCase, random: np.random.Generator) -> Feeds:
    """A step of *batch* equal sequences over blocks in random order."""
    a = case.attributes
    tokens = case.batch * case.query_len
    blocks = blocks_for(case.kv_len, a.block_size)
    table = random.permutation(case.batch * blocks).reshape(case.batch, blocks).astype(np.int32)
    positions = np.arange(case.kv_len - case.query_len, case.kv_len)
    slots = table[:, positions // a.block_size] * a.block_size + positions % a.block_size
    angles = random.standard_normal((tokens, a.rotary_dim // 2), np.float32)
    q_norm, k_norm = (1, 1) if a.qk_norm == QkNorm.PER_HEAD else (a.num_heads, a.num_kv_heads)
    feeds: Feeds = {
        QKV: random.standard_normal((tokens, (a.num_heads + 2 * a.num_kv_heads) * a.head_dim), np.float32),
        COS: np.cos(angles),
        SIN: np.sin(angles),
        Q_NORM_WEIGHT: np.ones(q_norm * a.head_dim, np.float32),
        K_NORM_WEIGHT: np.ones(k_norm * a.head_dim, np.float32),
        kv_pool_name(0): np.zeros((case.batch * blocks, block_bytes(a)), np.uint8),
        SLOT_MAPPING: slots.reshape(-1).astype(np.int32),
        CU_QUERY_LENS: np.arange(0, tokens + 1, case.query_len, dtype=np.int32),
        KV_LENS: np.full(case.batch, case.kv_len, np.int32),
        BLOCK_TABLE: table,
    }
    return {name: feeds[name] for name in node_inputs(a) if name}
