"""The kernels of an engine, compiled with the shapes that a SKU's choices name, or else with one that fits anywhere."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Final

from castline.engines.errors import BuildError
from castline.engines.kernel_choices import KernelChoice, KernelChoices
from castline.plugins.contract import AttentionAttributes, KvDtypeCode
from castline.plugins.tensorrt.compile import Compiled, KernelCompiler, KernelShape, power_of_two
from castline.plugins.tensorrt.kernel_set import KernelName

ATTENTION_KERNELS: Final[tuple[KernelName, ...]] = ("rope_append", "decode", "decode_split", "decode_merge", "prefill")
SAMPLING_KERNELS: Final[tuple[KernelName, ...]] = ("greedy", "sample", "gather_inputs")
FALLBACKS: Final = (
    KernelShape(),
    KernelShape(tile=32),
    KernelShape(tile=32, num_warps=8),
    KernelShape(tile=16, num_warps=8, num_stages=1),
    KernelShape(tile=16, queries=8, num_warps=8, num_stages=1),
)
"""Tried in order where nothing is known, or where what is known spills with a node's window or soft-cap."""
FALLBACK: Final = "nothing known, the first that fits"
ONE_FOR_ALL: Final = "the same for every GPU"


def shape_of(choice: KernelChoice, a: AttentionAttributes) -> KernelShape:
    queries = choice.queries(a.num_heads // a.num_kv_heads)
    return KernelShape(choice.tile, queries, choice.num_warps, choice.num_stages, choice.max_splits)


def known_choice(choices: KernelChoices, name: KernelName, a: AttentionAttributes) -> KernelChoice | None:
    """`decode_merge` joins the parts of `decode_split`: it goes by that one's choice."""
    asked = "decode_split" if name == "decode_merge" else name
    return choices.find(asked, KvDtypeCode(a.kv_dtype).name.lower(), power_of_two(a.head_dim, 16))


def attention_shapes(
    choices: KernelChoices, name: KernelName, a: AttentionAttributes
) -> Iterator[tuple[KernelShape, str]]:
    """Shapes to try in order, each with how it was chosen."""
    choice = known_choice(choices, name, a)
    if choice is not None and name == "decode_merge":
        yield KernelShape(max_splits=choice.max_splits), choice.chosen
        yield KernelShape(max_splits=choice.max_splits, num_warps=8), choice.chosen
    elif choice is not None:
        yield shape_of(choice, a), choice.chosen
    note = ONE_FOR_ALL if name == "rope_append" else FALLBACK
    for shape in FALLBACKS:
        yield shape, note


def sampling_shapes(choices: KernelChoices, name: KernelName) -> Iterator[tuple[KernelShape, str]]:
    """As `attention_shapes`; ``tile`` is the chunk of logits."""
    choice = choices.find(name)
    if choice is not None:
        yield KernelShape(tile=choice.tile, num_warps=choice.num_warps), choice.chosen
    note = ONE_FOR_ALL if name == "gather_inputs" else FALLBACK
    for warps in (8, 16, 4):
        yield replace(KernelShape(tile=1024), num_warps=warps), note


def attention_kernels(compiler: KernelCompiler, choices: KernelChoices, a: AttentionAttributes) -> list[Compiled]:
    """The kernels of a node, each of the first shape that fits. Raises BuildError naming one that none fits."""
    return [
        _first_fitting(
            (partial(_attention, compiler, a, name, shape), note) for shape, note in attention_shapes(choices, name, a)
        )
        for name in ATTENTION_KERNELS
    ]


def sampling_kernels(
    compiler: KernelCompiler, choices: KernelChoices, vocab_size: int, block_size: int
) -> list[Compiled]:
    """The kernels that every engine has one of; as `attention_kernels`."""

    def make(name: KernelName, shape: KernelShape) -> Compiled:
        return next(compiler.sampling(vocab_size, block_size, shape.num_warps, (name,), chunk=shape.tile))

    return [
        _first_fitting((partial(make, name, shape), note) for shape, note in sampling_shapes(choices, name))
        for name in SAMPLING_KERNELS
    ]


def _attention(compiler: KernelCompiler, a: AttentionAttributes, name: KernelName, shape: KernelShape) -> Compiled:
    return next(compiler.attention(a, shape, (name,)))


def _first_fitting(makers: Iterable[tuple[Callable[[], Compiled], str]]) -> Compiled:
    """The first kernel that compiles, with how it was chosen; raises the BuildError of the last where none does."""
    failure: BuildError | None = None
    for make, chosen in makers:
        try:
            made = make()
        except BuildError as error:
            failure = error
        else:
            return replace(made, spec=replace(made.spec, chosen=chosen))
    assert failure is not None
    raise failure
