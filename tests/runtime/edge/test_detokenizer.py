"""Streaming text: deltas against the full decode."""

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from castline.runtime.detokenizer import Detokenizer
from castline.runtime.tokenizer import Tokenizer

relaxed = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
texts = st.text(alphabet=st.characters(blacklist_categories=("Cs",)), max_size=60)


def stream(tokenizer: Tokenizer, token_ids: Sequence[int], prompt: Sequence[int] = ()) -> list[str]:
    """Deltas; the last is what `finish` gives."""
    detokenizer = Detokenizer(tokenizer, prompt)
    return [*(detokenizer.push(token) for token in token_ids), detokenizer.finish()]


@relaxed
@given(text=texts)
def test_deltas_of_a_text_join_to_the_full_decode(tokenizer: Tokenizer, text: str) -> None:
    """C20: SentencePiece vocabularies lost or doubled spaces between deltas."""
    ids = tokenizer.encode(text)
    deltas = stream(tokenizer, ids)
    assert "".join(deltas) == tokenizer.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in delta for delta in deltas)


@relaxed
@given(data=st.data())
def test_deltas_of_any_tokens_join_to_the_full_decode(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """A model may write bytes that are no UTF-8, special tokens inside a character, or ids that mean nothing."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30))
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@relaxed
@given(prompt=texts, text=texts)
def test_deltas_continue_the_prompt(tokenizer: Tokenizer, prompt: str, text: str) -> None:
    """The text after a prompt is what the whole decodes to beyond the prompt: its first space must not vanish."""
    prompt_ids, ids = tokenizer.encode(prompt), tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode([*prompt_ids, *ids])
    assert tokenizer.decode(prompt_ids) + "".join(stream(tokenizer, ids, prompt_ids)) == whole


@pytest.mark.parametrize("name", ["byte_level", "llama_like"])
@pytest.mark.parametrize("kept", [1, 2, 3, 4])
def test_an_emoji_over_byte_tokens(tokenizers_by_kind: dict[str, Tokenizer], name: str, kept: int) -> None:
    """C21: no U+FFFD before the end; a character cut off by max_tokens is one U+FFFD at the end."""
    tokenizer = tokenizers_by_kind[name]
    of_byte = {tokenizer.token_bytes(t): t for t in range(3, tokenizer.vocab_size)}
    emoji = [of_byte[bytes([byte])] for byte in "🦭".encode()]
    deltas = stream(tokenizer, [of_byte[b"h"], *emoji[:kept]], prompt=[of_byte[b"h"]])
    assert deltas == ["h", "", "", "", "🦭", ""] if kept == 4 else deltas == ["h", *[""] * kept, "\ufffd"]
    assert "".join(deltas) == tokenizer.decode([of_byte[b"h"], *emoji[:kept]])


def test_special_tokens_are_skipped_even_inside_a_character(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers_by_kind["byte_level"]
    of_byte = {tokenizer.token_bytes(t): t for t in range(3, tokenizer.vocab_size)}
    first, second = (of_byte[bytes([byte])] for byte in "é".encode())
    assert stream(tokenizer, [1, first, 1, second, 2]) == ["", "", "", "é", "", ""]


def test_a_prompt_of_markup_alone_leaves_the_text_at_its_start(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    """After BOS alone the text begins: the space that SentencePiece put there is dropped, as in the full decode."""
    llama = tokenizers_by_kind["llama_like"]
    ids = llama.encode("hello", add_special_tokens=False)
    assert "".join(stream(llama, ids, prompt=[1])) == "hello"
    assert "".join(stream(llama, ids, prompt=llama.encode("x"))) == " hello"


def test_invalid_bytes_are_shown_as_they_come(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    """Bytes that can never be a character do not hold back the text behind them."""
    tokenizer = tokenizers_by_kind["byte_level"]
    of_byte = {tokenizer.token_bytes(t): t for t in range(3, tokenizer.vocab_size)}
    assert stream(tokenizer, [of_byte[b"\xff"], of_byte[b"a"]]) == ["\ufffd", "a", ""]


def test_work_per_token_does_not_grow_with_the_text(
    tokenizers_by_kind: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linear time: every token's bytes are fetched once, however long the text is."""
    tokenizer = tokenizers_by_kind["byte_level"]
    detokenizer, fetched = Detokenizer(tokenizer), []
    table = tokenizer._bytes
    original = table.of
    monkeypatch.setattr(table, "of", lambda token: (fetched.append(token), original(token))[1])
    ids = tokenizer.encode("hello world 🌍 " * 200)
    for token in ids:
        detokenizer.push(token)
    assert len(fetched) < len(ids)


@relaxed
@given(text=texts)
def test_the_demo_models_vocabulary(smollm2: Tokenizer, text: str) -> None:
    """It has no token for some bytes, which encoding then drops: what is left must decode as the library decodes it."""
    ids = smollm2.encode(text)
    assert "".join(stream(smollm2, ids)) == smollm2.decode(ids) == smollm2._backend.decode(ids)
