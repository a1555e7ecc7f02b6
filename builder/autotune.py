"""Chooses, by time on this host, among the kernels that the recipe allows.

One engine serves every step size with one choice a thing, so a candidate's cost is a weighted sum over the step sizes
of its time over the fastest candidate's at that size. Ratios make the sizes comparable: without them the largest step
alone would decide. The weights favour small steps, where a person waits for each token.

Order: thread count (with each recipe's default kernels), then the kernel of each matmul shape, then the attention's
block size, query tile and kv split, each with the choices before it fixed.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from castline.builder.linear_sites import NO_SURROUNDINGS, Surroundings
from castline.builder.options import DEFAULT_BLOCK_SIZE
from castline.builder.recipes import LINEAR_W4_G32, MatmulKernel, Recipe
from castline.builder.tuning_cases import AttentionCase, Bench, MatmulCase, Shape
from castline.engines.manifest import Tuning
from castline.plugins.contract import AttentionAttributes

STEP_WEIGHTS: Mapping[int, float] = {1: 0.30, 8: 0.20, 32: 0.20, 128: 0.15, 512: 0.15}
"""Packed tokens of a step: one stream, small and full decode batches, a mixed step, a full prefill chunk."""

WIDE_ROWS = (8, 16, 32, 128)
"""Rows at which Linear's wide kernels are timed against the narrow ones, where the host has them."""
DEFAULT_WIDE_ROWS = 16
"""Where the two differ by less than noise: a whole tile of the matrix units."""

THREAD_STEP_WEIGHTS: Mapping[int, float] = {1: 0.5, 128: 0.5}

NOISE = 0.02
"""Share by which two timings of one thing differ on a quiet host."""

THREADS_NOISE = 0.10
"""Of thread counts. Where another process keeps a core busy, all cores are hardly faster than one, and the engine would
keep one for good; where memory limits them all, more threads cost a few per cent."""

TUNED_BLOCK_SIZES = (DEFAULT_BLOCK_SIZE, 16, 64)
QUERY_TILES = (0, 4, 8, 16, 32)
KV_SPLITS = (0, 256, 512, 1024)
"""0 lets the kernel choose from the shape of the call; splits are whole key tiles of 256."""


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """A call of the attention operator that serving meets, and its weight."""

    name: str
    weight: float
    batch: int
    query_len: int
    kv_len: int


ATTENTION_STEPS = (
    AttentionStep("decode 1 x 1024", 0.35, batch=1, query_len=1, kv_len=1024),
    AttentionStep("decode 32 x 256", 0.35, batch=32, query_len=1, kv_len=256),
    AttentionStep("prefill 256 at 512", 0.30, batch=1, query_len=256, kv_len=512),
)


@dataclass(frozen=True, slots=True)
class TuningRequest:
    """What is to be tuned. ``attention`` holds the attributes of the model's most frequent attention node."""

    recipe: Recipe
    layer_shapes: tuple[Shape, ...]
    head_shapes: tuple[Shape, ...]
    attention: AttentionAttributes
    cores: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    surroundings: Mapping[Shape, Surroundings] = field(default_factory=dict)
    """What Linear takes in around the matmuls of a shape; nothing where a shape is not named."""
    symmetric_shapes: frozenset[Shape] = frozenset()
    """Of the layers' shapes, with a 4-bit recipe: whose weights are on symmetric grids as they come."""
    has_wide: bool = False
    """Whether this host runs Linear's wide kernels."""
    threads: int | None = None
    """Fixed by the user, or None."""
    block_size: int | None = None
    """Fixed by the user, or None."""

    def kernels(self, shape: Shape) -> tuple[MatmulKernel, ...]:
        """What the recipe allows for matmuls of *shape* and can compute them; the first is the default."""
        allowed = self.recipe.head_kernels if shape in self.head_shapes else self.recipe.layer_kernels
        if shape in self.symmetric_shapes:
            allowed = (LINEAR_W4_G32, *allowed)
        return tuple(kernel for kernel in allowed if kernel.takes(shape[0]))

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return tuple(dict.fromkeys((*self.layer_shapes, *self.head_shapes)))


@dataclass(frozen=True, slots=True)
class TuningChoices:
    """One kernel a matmul shape, and the attention's attributes."""

    kernels: Mapping[Shape, MatmulKernel]
    num_threads: int
    block_size: int
    query_tile: int = 0
    kv_split: int = 0
    measured: bool = False
    timings_us: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def manifest(self) -> Tuning:
        return Tuning(
            measured=self.measured,
            num_threads=self.num_threads,
            matmul={f"{k}x{n}": kernel.name for (k, n), kernel in self.kernels.items()},
            wide_rows={f"{k}x{n}": kernel.wide_rows for (k, n), kernel in self.kernels.items() if kernel.is_linear},
            attention={"block_size": self.block_size, "query_tile": self.query_tile, "kv_split": self.kv_split},
            timings_us={name: dict(times) for name, times in self.timings_us.items()},
        )


def default_choices(request: TuningRequest) -> TuningChoices:
    """Without tuning: each recipe's first kernel, every usable physical core, blocks of 32 tokens."""
    return TuningChoices(
        kernels={shape: request.kernels(shape)[0] for shape in request.shapes},
        num_threads=request.threads or request.cores,
        block_size=request.block_size or DEFAULT_BLOCK_SIZE,
    )


def count_cases(request: TuningRequest) -> int:
    """Upper bound of the timings `autotune` takes: the length of its progress bar."""
    counter = _Counter()
    autotune(request, counter, lambda: None)
    return counter.count


def autotune(request: TuningRequest, bench: Bench, advance: Callable[[], None]) -> TuningChoices:
    """Times the candidates with *bench*, calling *advance* after each timing, and takes the cheapest of each."""
    tuner = _Tuner(request, bench, advance)
    threads = request.threads or tuner.threads()
    kernels = {shape: tuner.kernel(shape, threads) for shape in request.shapes}
    block_size = request.block_size or tuner.attention("block_size", TUNED_BLOCK_SIZES, threads)
    tuner.fix_attention(block_size=block_size)
    query_tile = tuner.attention("query_tile", QUERY_TILES, threads)
    tuner.fix_attention(query_tile=query_tile)
    kv_split = tuner.attention("kv_split", KV_SPLITS, threads)
    return TuningChoices(kernels, threads, block_size, query_tile, kv_split, measured=True, timings_us=tuner.timings_us)


def cheapest(times: Mapping[str, Mapping[str, float]], weights: Mapping[str, float], noise: float = NOISE) -> str:
    """The candidate of least weighted relative time.

    *times* maps candidate → step → microseconds; *weights* maps step → weight. The first candidate is the default: it
    stays unless another is cheaper by more than *noise*, the share by which timings vary: two builds choose alike.
    """
    fastest = {step: min(by_step[step] for by_step in times.values()) for step in weights}

    def cost(candidate: str) -> float:
        return sum(weight * times[candidate][step] / fastest[step] for step, weight in weights.items())

    default, best = next(iter(times)), min(times, key=cost)
    return default if cost(default) <= cost(best) * (1 + noise) else best


def thread_candidates(cores: int) -> tuple[int, ...]:
    """All cores, half and a quarter of them: beyond the memory's bandwidth more threads only wait."""
    return tuple(dict.fromkeys((cores, max(1, cores // 2), max(1, cores // 4))))


class _Tuner:
    """Times candidates and keeps every timing by the name that the manifest gives it."""

    def __init__(self, request: TuningRequest, bench: Bench, advance: Callable[[], None]) -> None:
        self._request = request
        self._bench = bench
        self._advance = advance
        self._attributes = replace(request.attention, block_size=request.block_size or DEFAULT_BLOCK_SIZE)
        self.timings_us: dict[str, dict[str, float]] = {}

    def threads(self) -> int:
        """The count that computes every layer shape fastest with the default kernels."""
        counts = thread_candidates(self._request.cores)
        if len(counts) == 1:
            return counts[0]
        times = {
            str(count): {str(rows): self._layer_us(rows, count) for rows in THREAD_STEP_WEIGHTS} for count in counts
        }
        return int(self._choose("threads", times, _by_name(THREAD_STEP_WEIGHTS), THREADS_NOISE))

    def kernel(self, shape: Shape, threads: int) -> MatmulKernel:
        candidates: dict[str, MatmulKernel] = {}
        for kernel in self._request.kernels(shape):
            wide_rows = self._wide_rows(shape, kernel, threads) if kernel.is_linear and self._request.has_wide else 0
            candidates[kernel.name] = replace(kernel, wide_rows=wide_rows)
        if len(candidates) == 1:
            return next(iter(candidates.values()))
        weights = self._row_weights(shape)
        times = {
            name: {str(rows): self._matmul_us(shape, kernel, rows, threads) for rows in weights}
            for name, kernel in candidates.items()
        }
        return candidates[self._choose(f"matmul {shape[0]}x{shape[1]}", times, _by_name(weights))]

    def _wide_rows(self, shape: Shape, kernel: MatmulKernel, threads: int) -> int:
        """Rows from which the wide kernels are to be used, or -1 for never: what costs least over all sizes timed."""
        narrow, wide = replace(kernel, wide_rows=-1), replace(kernel, wide_rows=1)
        sizes = [rows for rows in WIDE_ROWS if rows <= self._most_rows(shape)]
        if not sizes:
            return 0
        narrow_us = {rows: self._matmul_us(shape, narrow, rows, threads) for rows in sizes}
        wide_us = {rows: self._matmul_us(shape, wide, rows, threads) for rows in sizes}
        for rows in sizes:
            times = {"narrow": round(narrow_us[rows], 2), "wide": round(wide_us[rows], 2)}
            self.timings_us[f"wide rows {shape[0]}x{shape[1]}, {rows}"] = times
        costs = {
            str(first): {str(rows): (wide_us if 0 < first <= rows else narrow_us)[rows] for rows in sizes}
            for first in (*sorted(sizes, key=lambda rows: rows != DEFAULT_WIDE_ROWS), -1)
        }
        return int(cheapest(costs, {str(rows): 1 / len(sizes) for rows in sizes}))

    def attention(self, attribute: str, candidates: Iterable[int], threads: int) -> int:
        """The best value of one attribute of the attention node, with the others as they stand."""
        steps = _steps_for(attribute, self._request.max_model_len)
        times = {
            str(value): {
                step.name: self._attention_us(replace(self._attributes, **{attribute: value}), step, threads)
                for step in steps
            }
            for value in candidates
        }
        return int(self._choose(f"attention {attribute}", times, {step.name: step.weight for step in steps}))

    def fix_attention(self, **attributes: int) -> None:
        self._attributes = replace(self._attributes, **attributes)

    def _row_weights(self, shape: Shape) -> Mapping[int, float]:
        """The head sees a row for each sequence; a layer a row for each token of the step."""
        return {rows: weight for rows, weight in STEP_WEIGHTS.items() if rows <= self._most_rows(shape)}

    def _most_rows(self, shape: Shape) -> int:
        request = self._request
        return request.max_num_seqs if shape in request.head_shapes else request.max_num_batched_tokens

    def _layer_us(self, rows: int, threads: int) -> float:
        request = self._request
        return sum(self._matmul_us(shape, request.kernels(shape)[0], rows, threads) for shape in request.layer_shapes)

    def _matmul_us(self, shape: Shape, kernel: MatmulKernel, rows: int, threads: int) -> float:
        around = self._request.surroundings.get(shape, NO_SURROUNDINGS)
        microseconds = self._bench.matmul(MatmulCase(*shape, kernel, rows, threads, around))
        self._advance()
        return microseconds

    def _attention_us(self, attributes: AttentionAttributes, step: AttentionStep, threads: int) -> float:
        case = AttentionCase(attributes, step.batch, step.query_len, step.kv_len, threads)
        microseconds = self._bench.attention(case)
        self._advance()
        return microseconds

    def _choose(
        self,
        what: str,
        times: Mapping[str, Mapping[str, float]],
        weights: Mapping[str, float],
        noise: float = NOISE,
    ) -> str:
        for step in weights:
            self.timings_us[f"{what}, {step}"] = {name: round(by_step[step], 2) for name, by_step in times.items()}
        return cheapest(times, weights, noise)


def _steps_for(attribute: str, max_model_len: int) -> tuple[AttentionStep, ...]:
    """The steps on which an attribute can matter, cut to the engine's longest sequence."""
    if attribute == "query_tile":
        steps = [step for step in ATTENTION_STEPS if step.query_len > 1]
    elif attribute == "kv_split":
        steps = [step for step in ATTENTION_STEPS if step.query_len == 1]
    else:
        steps = list(ATTENTION_STEPS)
    return tuple(
        replace(step, query_len=min(step.query_len, max_model_len), kv_len=min(step.kv_len, max_model_len))
        for step in steps
    )


def _by_name(weights: Mapping[int, float]) -> dict[str, float]:
    return {str(rows): weight for rows, weight in weights.items()}


class _Counter:
    """A bench that only counts."""

    def __init__(self) -> None:
        self.count = 0

    def matmul(self, case: MatmulCase) -> float:
        return self.attention(case)

    def attention(self, case: MatmulCase | AttentionCase) -> float:
        self.count += 1
        return 1.0
