"""The fewest tokens of a text, known before it is encoded: never more than it has, and enough to refuse by."""

import sys
import unicodedata
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from castline.runtime.text_bound import _NFC_SHRINKS, TextBound, text_bound
from castline.runtime.token_bytes import BYTE_LEVEL
from castline.runtime.tokenizer import Tokenizer

# What a tokenizer may shorten: runs, white space of every kind, spaces that stand for themselves, text that composes,
# bytes that vocabularies lack, and their own added tokens.
PIECES = [
    " ",
    "   ",
    "\t\n",
    "\u3000",
    "\u2003",
    "▁",
    "▁▁",
    "the",
    "\u212a",
    "e\u0301",
    "\u1fd3",
    "\u0399\u0344",
    "\x04",
    "\x04" * 50,
]
PIECES += ["\U000a1234", "日本", "🌍", "<s>", "</s>", "<unk>", "€ plain", "<|lone|>", "\ufb01", "x" * 30, "\r"]
pieces = st.lists(st.sampled_from(PIECES) | st.text(alphabet=st.characters(blacklist_categories=("Cs",))), max_size=30)


def bound_of(backend: Backend) -> TextBound:
    return text_bound(backend, backend.get_vocab(with_added_tokens=True))


def byte_level(missing: str = "", **added: bool) -> Backend:
    """With tokens of up to ten spaces, and without the bytes of *missing*."""
    chars = [char for char, byte in BYTE_LEVEL.items() if byte not in missing.encode()]
    merges = [("Ġ" * count, "Ġ") for count in range(1, 10)]
    vocab = {token: place for place, token in enumerate([*chars, *("Ġ" * count for count in range(2, 11))])}
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|lone|>", special=True, normalized=False, **added)])
    return backend


def composing() -> Backend:
    """As Qwen 2's."""
    backend = byte_level()
    backend.normalizer = normalizers.NFC()
    return backend


def splitting() -> Backend:
    """As Llama 3's."""
    backend = byte_level()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\s+|\w+"), "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return backend


KNOWN: dict[str, tuple[Callable[[], Backend], int]] = {
    "byte level": (byte_level, 10),
    "some bytes missing": (lambda: byte_level(missing="\x04\U000a1234"), 10),
    "a token that takes the spaces around it": (lambda: byte_level(lstrip=True, rstrip=True), 10),
    "composing": (composing, 10 * _NFC_SHRINKS),
    "splitting": (splitting, 10),
}


@pytest.mark.parametrize("kind", list(KNOWN))
def test_the_bound_is_the_longest_token(kind: str) -> None:
    """A bound that is none refuses nothing, and a text of megabytes is encoded only to be refused."""
    make, longest = KNOWN[kind]
    bound = bound_of(make())
    assert bound.bytes_per_token == longest
    text = "abc\U0010ffff" * 10_000 * longest
    assert bound.is_exceeded(text, 69_999)
    assert not bound.is_exceeded(text, 70_000)


@pytest.mark.parametrize("kind", list(KNOWN))
@settings(deadline=None, max_examples=200)
@given(parts=pieces)
def test_no_text_has_fewer_tokens(kind: str, parts: list[str]) -> None:
    """One that has would be refused though it fits."""
    backend, text = _made(kind), "".join(parts)
    bound = bound_of(backend)
    for repeated in (text, text * 20):
        assert not bound.is_exceeded(repeated, len(backend.encode(repeated, add_special_tokens=False).ids))


def _made(kind: str, made: dict[str, Backend] = {}) -> Backend:  # noqa: B006 (made once a run)
    if kind not in made:
        made[kind] = KNOWN[kind][0]()
    return made[kind]


@settings(deadline=None, max_examples=200)
@given(parts=pieces)
def test_no_text_has_fewer_tokens_in_vocabularies_of_each_kind(
    tokenizers_by_kind: dict[str, Tokenizer], smollm2: Tokenizer, parts: list[str]
) -> None:
    for tokenizer in (*tokenizers_by_kind.values(), smollm2):
        for text in ("".join(parts), "".join(parts) * 20):
            assert not tokenizer.has_more(text, len(tokenizer.encode(text, add_special_tokens=False)))


def test_vocabularies_that_have_a_bound(tokenizers_by_kind: dict[str, Tokenizer], smollm2: Tokenizer) -> None:
    """GPT-2's, Llama 2's and Gemma's kind have, the real one too; a Unigram model's tokens may be of any length."""
    text = "no merge" * 10_000
    bounded = {name: tokenizer.has_more(text, 1000) for name, tokenizer in tokenizers_by_kind.items()}
    assert bounded == {
        "byte_level": True,
        "llama_like": True,
        "gemma_like": True,
        "unigram": False,
        "metaspace_unprefixed": False,
    }
    assert smollm2.has_more(text, len(text) // 81)
    assert not smollm2.has_more(text, len(text) // 81 + 1)


def unknown_fused() -> Backend:
    return Backend(models.BPE(vocab={"a": 0, "<unk>": 1}, merges=[], unk_token="<unk>", fuse_unk=True))


def with_normalizer(normalizer: normalizers.Normalizer) -> Callable[[], Backend]:
    def make() -> Backend:
        backend = byte_level()
        backend.normalizer = normalizer
        return backend

    return make


def dropping() -> Backend:
    backend = byte_level()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(use_regex=False)]
    )
    return backend


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (unknown_fused, "b" * 1000),
        (with_normalizer(normalizers.Strip()), " " * 1000 + "a"),
        (with_normalizer(normalizers.Replace(Regex(" +"), " ")), " " * 1000),
        (with_normalizer(normalizers.Replace("longer", "s")), "longer" * 1000),
        (with_normalizer(normalizers.Sequence([normalizers.NFC(), normalizers.StripAccents()])), "\u0301" * 1000),
        (dropping, " " * 1000 + "a"),
    ],
)
def test_what_may_lose_text_has_no_bound(make: Callable[[], Backend], text: str) -> None:
    """Whatever its length, such a text may be a token or two."""
    backend = make()
    assert not bound_of(backend).is_exceeded(text, 1)
    assert len(backend.encode(text).ids) < 1001


def test_composition_shortens_no_text_by_more() -> None:
    """The bytes of a text are shared out among its decomposed characters; so no composed character has more of them
    than its parts have at most.
    """
    most: dict[str, float] = {}
    chars = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code <= 0xDFFF]
    for char in chars:
        parts = unicodedata.normalize("NFD", char)
        for part in parts:
            most[part] = max(most.get(part, 0), len(char.encode()) / len(parts))
    for char in chars:
        if unicodedata.is_normalized("NFC", char):
            assert sum(most[part] for part in unicodedata.normalize("NFD", char)) <= _NFC_SHRINKS * len(char.encode())
