"""Chooses the shapes of the GPU kernels for a SKU: compiled and pruned on any machine, timed where the GPU is.

What spills registers or does not fit shared memory is out; so is what does with a sliding window, a soft-cap and small
blocks, so that one choice serves every model with those heads. The rest is put in order by an estimate
(`castline.plugins.tensorrt.candidates`), and where a clock is given it is timed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Final, Protocol

import msgspec

from castline.builder.tensorrt.kernel_shapes import attention_kernels, shape_of
from castline.engines.errors import BuildError
from castline.engines.kernel_choices import NOT_TIMED, NOTHING_KNOWN, KernelChoice, KernelChoices, TunedKernel
from castline.engines.sku import Sku
from castline.plugins.contract import KV_DTYPE_CODES, AttentionAttributes
from castline.plugins.tensorrt.candidates import Tuned, enough_splits, estimate
from castline.plugins.tensorrt.compile import Compiled, KernelCompiler, KernelShape
from castline.plugins.tensorrt.kernel_set import KernelName

HEAD_DIMS: Final = (64, 128)
KV_DTYPES: Final = ("fp8", "fp16")
VOCAB_SIZE: Final = 131_072
BLOCK_SIZE: Final = 32
SPLITS: Final = (16, 32, 64, 128)
"""Most parts of a split decode that are timed."""


@dataclass(frozen=True, slots=True)
class Candidate:
    choice: KernelChoice
    compiled: Compiled


class Clock(Protocol):
    """Times compiled kernels on the GPU of this machine."""

    device_name: str

    def microseconds(
        self, kernel: TunedKernel, compiled: Sequence[Compiled], attributes: AttentionAttributes | None
    ) -> float:
        """Median of *kernel*'s own workload. *compiled* are all kernels of a node, or of the sampler."""
        ...


@dataclass(frozen=True, slots=True)
class KernelTuner:
    sku: Sku
    clock: Clock | None = None
    today: str = ""
    """ISO date of what is timed."""

    def tune(self, tuned: Sequence[Tuned], known: KernelChoices, advance: Callable[[str], None]) -> KernelChoices:
        """*known* with what was found for *tuned*; calls *advance* with a line after each. What was timed stays where
        there is no clock. Raises BuildError where every candidate of a kernel spills."""
        found = {choice.key: choice for choice in known.choice}
        for one in tuned:
            key = (one.kernel, one.kv_dtype, one.head_dim)
            before = found.get(key)
            if self.clock is None and before is not None and before.microseconds is not None:
                advance(f"{_title(one)}: kept, {before.chosen}")
                continue
            found[key] = choice = self._choose(one)
            advance(f"{_title(one)}: {_describe(choice)}")
        return KernelChoices(f"triton {version('triton')}", tuple(found.values()))

    def survivors(self, tuned: Tuned) -> list[Candidate]:
        """Candidates that neither spill nor are too large, the best by the estimate first."""
        found = []
        for choice in tuned.candidates(NOT_TIMED):
            try:
                found.append(Candidate(choice, self._compile(choice, plain_attributes(tuned))))
            except BuildError:
                continue
        if not found:
            raise BuildError(f"{_title(tuned)}: every candidate spills registers on {self.sku.compute_capability}")
        return sorted(found, key=lambda one: estimate(one.choice, one.compiled.spec, self.sku), reverse=True)

    def _choose(self, tuned: Tuned) -> KernelChoice:
        fit = (one for one in self.survivors(tuned) if self._serves_every_model(one.choice, tuned))
        best = next(fit, None)
        if best is None:
            raise BuildError(f"{_title(tuned)}: every candidate spills with a window and a soft-cap")
        if self.clock is None:  # without one the first is taken, and no other is compiled again
            if tuned.kernel == "decode_split":
                best = replace(best, choice=msgspec.structs.replace(best.choice, max_splits=enough_splits(self.sku)))
            return _measured(best, None, NOT_TIMED)
        times = [(self._time(one, tuned), one) for one in self._with_splits([best, *fit], tuned)]
        microseconds, best = min(times, key=lambda pair: pair[0])
        return _measured(best, microseconds, f"timed on {self.clock.device_name}, {self.today}")

    def _with_splits(self, timed: list[Candidate], tuned: Tuned) -> list[Candidate]:
        if tuned.kernel != "decode_split":
            return timed
        return [
            replace(one, choice=msgspec.structs.replace(one.choice, max_splits=splits))
            for one in timed
            for splits in SPLITS
        ]

    def _time(self, one: Candidate, tuned: Tuned) -> float:
        assert self.clock is not None
        attributes = plain_attributes(tuned)
        found: dict[KernelName, Compiled] = {tuned.kernel: one.compiled}
        if attributes is not None:
            others = {made.spec.name: made for made in self._others(attributes)}
            if tuned.kernel == "decode_split":
                shape = KernelShape(max_splits=one.choice.max_splits)
                others["decode_merge"] = next(self._compiler.attention(attributes, shape, ("decode_merge",)))
            found = {**others, **found}
        return self.clock.microseconds(tuned.kernel, list(found.values()), attributes)

    def _others(self, attributes: AttentionAttributes) -> list[Compiled]:
        """The kernels that are not being timed: a node launches by what all of them say."""
        return attention_kernels(self._compiler, NOTHING_KNOWN, attributes)

    def _serves_every_model(self, choice: KernelChoice, tuned: Tuned) -> bool:
        attributes = plain_attributes(tuned)
        if attributes is None:
            return True
        hard = replace(attributes, num_heads=8 * attributes.num_kv_heads, window=1000, softcap=30.0, block_size=16)
        try:
            self._compile(choice, hard)
        except BuildError:
            return False
        return True

    @property
    def _compiler(self) -> KernelCompiler:
        major, minor = map(int, self.sku.compute_capability.split("."))
        return KernelCompiler((major, minor), "fp16")

    def _compile(self, choice: KernelChoice, attributes: AttentionAttributes | None) -> Compiled:
        if attributes is None:
            made = self._compiler.sampling(
                VOCAB_SIZE, BLOCK_SIZE, choice.num_warps, (choice.kernel,), chunk=choice.tile
            )
        else:
            made = self._compiler.attention(attributes, shape_of(choice, attributes), (choice.kernel,))
        return next(made)


def plain_attributes(tuned: Tuned) -> AttentionAttributes | None:
    """A node of a usual model with heads of that size: what is compiled and timed. None for the sampler's kernels."""
    if not tuned.head_dim:
        return None
    return AttentionAttributes(
        layer=0,
        num_heads=32,
        num_kv_heads=8,
        head_dim=tuned.head_dim,
        scale=tuned.head_dim**-0.5,
        block_size=BLOCK_SIZE,
        kv_dtype=int(KV_DTYPE_CODES[tuned.kv_dtype]),
        rotary_dim=tuned.head_dim,
    )


def everything(head_dims: Sequence[int] = HEAD_DIMS, kv_dtypes: Sequence[str] = KV_DTYPES) -> list[Tuned]:
    """All that is tuned for heads and keys of those kinds."""
    attention = [
        Tuned(kernel, kv_dtype, head_dim)
        for kernel in ("decode", "decode_split", "prefill")
        for kv_dtype in kv_dtypes
        for head_dim in head_dims
    ]  # fmt: skip
    return [*attention, Tuned("greedy"), Tuned("sample")]


def _measured(one: Candidate, microseconds: float | None, chosen: str) -> KernelChoice:
    spec = one.compiled.spec
    return msgspec.structs.replace(
        one.choice,
        chosen=chosen,
        registers=spec.registers,
        shared_bytes=spec.shared_bytes,
        microseconds=None if microseconds is None else round(microseconds, 2),
    )


def _title(tuned: Tuned) -> str:
    return f"{tuned.kernel} {tuned.kv_dtype} {tuned.head_dim}" if tuned.head_dim else tuned.kernel


def _describe(choice: KernelChoice) -> str:
    rows = f", {choice.rows} query rows" if choice.kernel == "prefill" else ""
    splits = f", up to {choice.max_splits} parts" if choice.kernel == "decode_split" else ""
    took = "" if choice.microseconds is None else f", {choice.microseconds} µs"
    return (
        f"tile {choice.tile}{rows}, {choice.num_warps} warps, {choice.num_stages} stages{splits}; "
        f"{choice.registers} registers, {choice.shared_bytes:,} bytes shared{took}; {choice.chosen}"
    )
