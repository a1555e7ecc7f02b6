"""From a SKU's choices to the shapes that a kernel is compiled with: what is known, then what fits anywhere."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from castline.engines.kernel_choices import KernelChoice, KernelChoices
from castline.plugins.contract import AttentionAttributes, KvDtypeCode
from castline.plugins.tensorrt.compile import KernelShape, power_of_two
from castline.plugins.tensorrt.kernel_set import KernelName

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
