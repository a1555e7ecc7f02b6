"""Which shapes a build tries, and how the tuner chooses: on a compiler and a clock that are told what to say."""

from dataclasses import asdict, replace
from typing import Any

import pytest

from castline.builder.tensorrt.kernel_shapes import FALLBACKS, attention_shapes, sampling_shapes
from castline.builder.tensorrt.tune_kernels import KernelTuner, everything, plain_attributes
from castline.engines.errors import BuildError
from castline.engines.kernel_choices import NOTHING_KNOWN, KernelChoice, KernelChoices
from castline.engines.sku import load_sku
from castline.plugins.contract import AttentionAttributes, KvDtypeCode
from castline.plugins.tensorrt.candidates import Tuned
from castline.plugins.tensorrt.compile import Compiled, KernelCompiler, KernelShape
from castline.plugins.tensorrt.kernel_set import KernelSpec

A = AttentionAttributes(0, 9, 3, 64, 0.125, 32, int(KvDtypeCode.FP8), rotary_dim=64)
KNOWN = KernelChoices(
    "triton",
    (
        KernelChoice("decode_split", 128, 8, 3, "timed on GPU", "fp8", 64, max_splits=64),
        KernelChoice("prefill", 32, 8, 2, "pruned, not timed", "fp8", 64, rows=128),
        KernelChoice("sample", 4096, 16, 1, "timed on GPU"),
    ),
)
TUNED = Tuned("decode", "fp8", 64)


def test_known_shape_comes_first_then_what_fits_anywhere() -> None:
    """A choice that spills with this node's window must not stop a build."""
    shapes = list(attention_shapes(KNOWN, "decode_split", A))
    assert shapes[0] == (KernelShape(128, 16, 8, 3, 64), "timed on GPU")
    assert [shape for shape, _ in shapes[1:]] == list(FALLBACKS)
    assert [shape for shape, _ in attention_shapes(KNOWN, "decode", A)] == list(FALLBACKS)
    assert [shape for shape, _ in attention_shapes(NOTHING_KNOWN, "decode_split", A)] == list(FALLBACKS)


def test_prefill_takes_its_tokens_from_rows_and_group() -> None:
    """A group of 3 has 4 rows a token: 128 rows are 32 tokens."""
    shape, _ = next(attention_shapes(KNOWN, "prefill", A))
    assert (shape.queries, shape.tile) == (32, 32)
    assert next(attention_shapes(KNOWN, "prefill", replace(A, num_heads=3)))[0].queries == 128


def test_merge_joins_as_many_parts_as_the_split_makes() -> None:
    """The launcher reads the most parts from the merge: a smaller number would waste the choice."""
    assert next(attention_shapes(KNOWN, "decode_merge", A))[0].max_splits == 64
    assert next(attention_shapes(NOTHING_KNOWN, "decode_merge", A))[0].max_splits == 32


def test_heads_and_types_that_nothing_is_known_of() -> None:
    for other in (replace(A, head_dim=128), replace(A, kv_dtype=int(KvDtypeCode.BF16))):
        assert [shape for shape, _ in attention_shapes(KNOWN, "prefill", other)] == list(FALLBACKS)
    assert next(attention_shapes(KNOWN, "prefill", replace(A, head_dim=48)))[0].tile == 32  # padded to 64


def test_sampling_shapes() -> None:
    assert next(sampling_shapes(KNOWN, "sample")) == (KernelShape(tile=4096, num_warps=16), "timed on GPU")
    assert [shape.num_warps for shape, _ in sampling_shapes(KNOWN, "greedy")] == [8, 16, 4]


class Compiler:
    """Stands for Triton: kernels of which the wide spill, and which are the larger the wider."""

    def __init__(self, spilling: int, spilling_with_window: int = 1000) -> None:
        self.spilling, self.spilling_with_window = spilling, spilling_with_window

    def attention(self, _self: Any, a: AttentionAttributes, shape: KernelShape, names: tuple[str, ...]) -> Any:
        if shape.tile >= (self.spilling_with_window if a.window else self.spilling):
            raise BuildError("spilled")
        spec = KernelSpec(names[0], names[0], "", (), asdict(shape), shape.num_warps, 100 * shape.tile, shape.tile, 0)  # type: ignore[arg-type]
        yield Compiled(spec, b"")


class Clock:
    device_name = "NVIDIA Test"

    def __init__(self) -> None:
        self.timed = 0

    def microseconds(self, kernel: str, compiled: list[Compiled], attributes: AttentionAttributes | None) -> float:
        self.timed += 1
        assert attributes is not None
        specs = {one.spec.name: one.spec for one in compiled}
        assert len(specs) == len(compiled) == 5
        merged = specs["decode_merge"].constants["max_splits"]
        return abs(int(specs[kernel].constants["tile"]) - 32) + specs[kernel].num_warps + 1 / int(merged)  # type: ignore[call-overload]


def use(monkeypatch: pytest.MonkeyPatch, compiler: Compiler) -> None:
    monkeypatch.setattr(KernelCompiler, "attention", lambda s, a, shape, names: compiler.attention(s, a, shape, names))


def tune(tuner: KernelTuner, tuned: Tuned = TUNED, known: KernelChoices = NOTHING_KNOWN) -> KernelChoice:
    found = tuner.tune([tuned], known, lambda line: None).find(tuned.kernel, tuned.kv_dtype, tuned.head_dim)
    assert found is not None
    return found


def test_spilling_candidates_are_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The known case: integer fp8 split decode spills at tile 64 on 8.0, where 32 must be chosen."""
    use(monkeypatch, Compiler(spilling=64))
    found = tune(KernelTuner(load_sku("a100-40")))
    assert (found.tile, found.chosen, found.microseconds) == (32, "pruned, not timed", None)
    assert (found.registers, found.shared_bytes) == (32, 3200)


def test_a_choice_must_hold_with_windows_and_softcaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """One choice serves every model with such heads: what spills for some would send those to the fallbacks."""
    use(monkeypatch, Compiler(spilling=1000))
    assert tune(KernelTuner(load_sku("h200"))).tile == 128
    use(monkeypatch, Compiler(spilling=1000, spilling_with_window=128))
    assert tune(KernelTuner(load_sku("h200"))).tile == 64


def test_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Compiler(spilling=16))
    with pytest.raises(BuildError, match=r"decode fp8 64: every candidate spills registers on 8.0"):
        tune(KernelTuner(load_sku("a100-40")))


def test_the_clock_decides_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the estimate says; the choice tells on which GPU it was timed and when."""
    use(monkeypatch, Compiler(spilling=1000))
    clock = Clock()
    found = tune(KernelTuner(load_sku("h200"), clock, "2026-11-30"))
    assert (found.tile, found.num_warps, found.microseconds) == (32, 4, 4.03)
    assert found.chosen == "timed on NVIDIA Test, 2026-11-30"
    assert clock.timed == len(TUNED.candidates(""))


def test_most_parts_of_a_split_are_timed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Compiler(spilling=1000))
    split = Tuned("decode_split", "fp8", 64)
    assert tune(KernelTuner(load_sku("h200"), Clock(), "2026-11-30"), split).max_splits == 128
    assert tune(KernelTuner(load_sku("h200")), split).max_splits == 64


def test_times_stay_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pruning again on a laptop must not throw away what a GPU has measured."""
    use(monkeypatch, Compiler(spilling=1000))
    timed = KernelChoice("decode", 16, 4, 2, "timed on GPU", "fp8", 64, microseconds=3.5)
    other = KernelChoice("prefill", 16, 4, 2, "pruned, not timed", "fp8", 64)
    known = KernelChoices("triton", (timed, other))
    done = KernelTuner(load_sku("h200")).tune([TUNED], known, lambda line: None)
    assert set(done.choice) == {timed, other}
    assert tune(KernelTuner(load_sku("h200"), Clock(), "2026-11-30"), known=known).tile == 32


def test_everything_is_each_kernel_once() -> None:
    found = everything((64, 128), ("fp8", "fp16"))
    assert len(set(found)) == len(found) == 3 * 4 + 2
    assert [plain_attributes(one) is None for one in found].count(True) == 2
