"""Which part of a model a weight belongs to, by the names that transformers gives its modules."""

from collections.abc import Iterable, Mapping

PART_WORDS: Mapping[str, tuple[str, ...]] = {
    "norms": ("norm", "ln_"),
    "embedding": ("embed", "wte", "wpe"),
    "head": ("lm_head", "output_projection"),
    "attention": ("attn", "attention", "qkv"),
    "mlp": ("mlp", "feed_forward", "ffn", "experts", "fc1", "fc2"),
}
"""The first part with a word in the name wins: a norm inside the attention is a norm."""

OTHER = "other"


def part_of(name: str) -> str:
    """The part of the weight called *name*."""
    return next((part for part, words in PART_WORDS.items() if any(word in name for word in words)), OTHER)


def bytes_by_part(weights: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Bytes of each part, of (name, bytes) pairs."""
    sizes: dict[str, int] = {}
    for name, size in weights:
        part = part_of(name)
        sizes[part] = sizes.get(part, 0) + size
    return sizes
