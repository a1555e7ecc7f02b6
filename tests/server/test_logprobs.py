"""Alignment of log-probabilities with text, without a server."""

import math
from typing import Any

import pytest

from castline.runtime.client import Output
from castline.runtime.events import FinishReason, TokenLogprobs
from castline.server.openai_logprobs import CompletionLogprobWriter, LogprobAligner, TokenTexts, chat_logprobs

EOS, SPECIAL = 257, 258


@pytest.fixture
def texts(engine: Any) -> TokenTexts:
    return TokenTexts(engine.tokenizer)


def entry(token_id: int, top: tuple[tuple[int, float], ...] = ()) -> TokenLogprobs:
    return TokenLogprobs(token_id, -0.5, 1, top)


def output(text: str, ids: bytes | list[int], reason: FinishReason | None = None, stop: Any = None) -> Output:
    return Output(0, text, tuple(ids), tuple(entry(i) for i in ids), reason, stop)


def released(aligner: LogprobAligner, *outputs: Output) -> list[list[int]]:
    return [[e.token_id for e in aligner.push(o)] for o in outputs]


def test_an_entry_waits_for_its_text(texts: TokenTexts) -> None:
    """Prevents a stream from sending the log-probability of a token whose text may still be taken back."""
    aligner = LogprobAligner(texts, (EOS,))
    first, second, last = output("a", b"aE"), output("", b"N"), output("ENx", b"x", FinishReason.LENGTH)
    assert released(aligner, first, second, last) == [[97], [], [69, 78, 120]]


def test_a_stop_string_takes_its_entries_with_it(texts: TokenTexts) -> None:
    """Prevents entries whose bytes are not in the text."""
    aligner = LogprobAligner(texts, (EOS,))
    assert released(aligner, output("a", b"aEN"), output("", b"D", FinishReason.STOP, "END")) == [[97], []]


@pytest.mark.parametrize(
    ("shown", "ids"),
    [
        ("\ufffd\ufffdab", b"\xa1\xa1ab"),
        ("\ufffdab", b"\xf0\x9f\x99ab"),
        ("\ufffd", b"\xe2\x82"),
        ("\ufffd\ufffd", b"\xe2\xff"),
        ("é\ufffd", b"\xc3\xa9\xe2"),
    ],
)
def test_what_is_no_text_is_counted_as_it_is_shown(app: Any, shown: str, ids: bytes) -> None:
    """Prevents the tokens of a stop string from being told after bytes that are longer as U+FFFD."""
    app.engine.reply_ids = [*ids, *b"STOP", *b" and more", EOS]
    body = {"messages": [{"role": "user", "content": "hi"}], "stop": ["STOP"], "logprobs": True}
    (choice,) = app.http.post("/v1/chat/completions", json=body).json()["choices"]
    assert choice["message"]["content"] == shown
    assert [entry["bytes"] for entry in choice["logprobs"]["content"]] == [[byte] for byte in ids]


@pytest.mark.parametrize("dropped", [0, 1, 2])
def test_spaces_that_the_start_of_a_text_drops_hold_nothing_back(texts: TokenTexts, dropped: int) -> None:
    """Prevents the last tokens before a stop string from being lost where SentencePiece drops its first space."""
    shown = "  ab"[dropped:]
    pieces = [output(shown[:1], b"  a"), output(shown[1:], b"bS"), output("", b"T", FinishReason.STOP, "ST")]
    entries = [entry for part in released(LogprobAligner(texts, (EOS,)), *pieces) for entry in part]
    assert bytes(entries) == b"  ab"


def test_the_token_that_ends_the_text_has_no_entry(texts: TokenTexts) -> None:
    """Prevents </s> among the tokens of a text that does not show it."""
    assert released(LogprobAligner(texts, (EOS,)), output("a", [97, EOS], FinishReason.STOP)) == [[97]]
    assert released(LogprobAligner(texts, (EOS,)), output("a", [97, 98], FinishReason.STOP, 98)) == [[97]]


def test_a_length_finish_keeps_every_entry(texts: TokenTexts) -> None:
    """Prevents losing the entries of an unfinished character at max_tokens."""
    aligner = LogprobAligner(texts, (EOS,))
    assert released(aligner, output("", [0xF0, 0x9F]), output("\ufffd", [0x99], FinishReason.LENGTH)) == [
        [],
        [0xF0, 0x9F, 0x99],
    ]


def test_a_special_token_has_no_bytes(texts: TokenTexts) -> None:
    """Prevents bytes that do not join to the text, and an entry that waits for text that never comes."""
    aligner = LogprobAligner(texts, (EOS,))
    assert released(aligner, output("a", [97, SPECIAL]), output("b", [98])) == [[97, SPECIAL], [98]]
    content = chat_logprobs([entry(97), entry(SPECIAL), entry(98)], texts).content
    assert [e.bytes for e in content] == [[97], None, [98]]
    assert content[1].token == "<|x|>"


def test_a_space_alone_has_its_byte_where_texts_drop_their_first(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """SentencePiece's lone space decodes to nothing by itself: taken for a special token, it made every entry early."""
    monkeypatch.setattr(engine.tokenizer, "decode", lambda token_ids, **_: bytes(token_ids).decode().removeprefix(" "))
    assert TokenTexts(engine.tokenizer)(ord(" ")) == (" ", b" ")


def test_part_of_a_character_is_shown_as_bytes(texts: TokenTexts) -> None:
    """Prevents U+FFFD as the name of a token."""
    assert texts(0xE2) == ("bytes:\\xe2", b"\xe2")


def test_minus_infinity_is_a_number_in_json(texts: TokenTexts) -> None:
    """C38: prevents null or -Infinity in JSON."""
    top = chat_logprobs([entry(97, ((97, -0.5), (98, -math.inf)))], texts).content[0].top_logprobs
    assert [t.logprob for t in top] == [-0.5, -9999.0]


def test_offsets_count_characters_over_chunks(texts: TokenTexts) -> None:
    """Prevents byte offsets, and offsets that start again with every chunk."""
    writer = CompletionLogprobWriter(texts)
    first = writer.prompt([256, 97], [None, entry(97)], "a")
    second = writer.generated([entry(i) for i in "é".encode()])
    third = writer.generated([entry(98)])
    assert first.text_offset + second.text_offset + third.text_offset == [0, 0, 1, 1, 2]
    assert first.token_logprobs == [None, -0.5]
    assert first.top_logprobs == [None, {"a": -0.5}]
