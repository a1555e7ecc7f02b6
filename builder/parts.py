"""Which part of a model a weight belongs to, by the names that transformers gives its modules."""

from collections.abc import Iterable, Mapping

PART_WORDS: Mapping[str, tuple[str, ...]] = {
    "embedding": ("embed", "wte", "wpe"),
    "head": ("lm_head",),
    "attention": ("attn", "attention", "qkv"),
    "mlp": ("mlp", "feed_forward", "ffn", "fc1", "fc2"),
    "norms": ("norm", "ln_"),
}
"""The last part with a word in the name wins: a norm inside the attention is a norm."""

OTHER = "other"
SHARED = "embedding and head"
"""Of a model whose head is its embedding, stored once."""


def part_of(name: str) -> str:
    """The part of the weight called *name*."""
    parts = [part for part, words in PART_WORDS.items() if any(word in name for word in words)]
    return parts[-1] if parts else OTHER


def bytes_by_part(weights: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Bytes of each part that has any, of (name, bytes) pairs, in the order of PART_WORDS."""
    sizes = dict.fromkeys((*PART_WORDS, OTHER), 0)
    for name, size in weights:
        sizes[part_of(name)] += size
    if not (sizes["embedding"] and sizes["head"]):
        sizes = {SHARED: sizes.pop("embedding") + sizes.pop("head"), **sizes}
    return {part: size for part, size in sizes.items() if size}
