"""One response as it arrives, on a clock of the test's own; and the bodies sent."""

import json
from collections.abc import Iterator
from itertools import count

import pytest

from castline.server.bench.client import Failure, StreamReader
from castline.server.bench.connection import Address
from castline.server.bench.errors import BenchError
from castline.server.bench.protocol import BodyOptions, RequestSpec, encode_body, error_text


def ticking() -> Iterator[float]:
    """1 s passes from one frame to the next."""
    yield from map(float, count(1))


def read(*frames: str, status: int = 200) -> StreamReader:
    ticks = ticking()
    reader = StreamReader(lambda: next(ticks))
    for frame in frames:
        reader.on_body(status, frame.encode())
    reader.finish(status)
    return reader


def text(value: str, finish_reason: str | None = None) -> str:
    return f"data: {json.dumps({'choices': [{'text': value, 'finish_reason': finish_reason}]})}\n\n"


def delta(finish_reason: str | None = None, **fields: str) -> str:
    return f"data: {json.dumps({'choices': [{'delta': fields, 'finish_reason': finish_reason}]})}\n\n"


USAGE = 'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}\n\n'
DONE = "data: [DONE]\n\n"


def test_arrivals_of_a_completion() -> None:
    """The first text is the first token; a token without text counts after it; the closing chunk does not."""
    reader = read(": wait\n\n", text(""), text("a"), text(""), text("c"), text("", "length"), USAGE, DONE)
    assert reader.failure is None
    assert reader.arrivals == [3.0, 4.0, 5.0]
    assert (reader.finish_reason, reader.usage and reader.usage.completion_tokens) == ("length", 3)


def test_text_in_the_closing_chunk_counts() -> None:
    """Servers that finish with the last token's own chunk must not lose that token."""
    assert read(text("a"), text("b", "length"), DONE).arrivals == [1.0, 2.0]


def test_arrivals_of_a_chat() -> None:
    """The role alone is no token: a time to first token taken from it measures the HTTP stack. Reasoning is text."""
    reader = read(delta(role="assistant", content=""), delta(reasoning_content="hm"), delta(content="a"), delta("stop"))
    assert reader.failure is None
    assert reader.arrivals == [2.0, 3.0]


def test_frames_need_not_be_events() -> None:
    """Two events in one frame arrive together; one event in two frames arrives with the second."""
    whole = text("a") + text("b") + text("c")
    reader = read(whole[:-5], whole[-5:], text("", "stop"))
    assert reader.arrivals == [1.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("frames", "failure"),
    [
        ([text("a"), 'data: {"error": {"message": "fell over"}}\n\n'], Failure("stream error", "fell over")),
        ([text("a"), 'data: {"error": "fell over"}\n\n', DONE], Failure("stream error", "fell over")),
        ([text("a"), 'event: error\ndata: {"detail": "fell over"}\n\n'], Failure("stream error", "fell over")),
        ([text("a"), "event: error\ndata: fell over\n\n"], Failure("stream error", "fell over")),
        (
            [text("a"), 'data: {"object": "error", "message": "fell over"}\n\n', DONE],
            Failure("stream error", "fell over"),
        ),
        ([text("a")], Failure("malformed", "the stream ended without a finish_reason")),
        (['{"choices": [{"text": "a"}]}'], Failure("malformed", "the answer is no stream of events")),
        ([text("", "stop"), DONE], Failure("no output", "the stream ended without a token")),
    ],
)
def test_failures(frames: list[str], failure: Failure) -> None:
    """A status of 200 is no success: the stream must end as a stream, and bring something."""
    assert read(*frames).failure == failure


def test_malformed_event() -> None:
    """Broken JSON is named as such, and what follows cannot mend it."""
    failure = read(text("a"), "data: {oops\n\n", text("b", "stop"), DONE).failure
    assert failure is not None
    assert failure.kind == "malformed"


def test_error_status_carries_its_message() -> None:
    """The words of the server are the cure; they may come in pieces."""
    reader = read('{"error": {"message": "max_tokens is ', 'too large"}}', status=400)
    assert reader.failure == Failure("http 400", "max_tokens is too large")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"error": {"message": "a"}}', "a"),
        (b'{"object": "error", "message": "b\\nb"}', "b b"),
        (b'{"detail": [{"loc": ["body", "top_k"]}]}', '[{"loc":["body","top_k"]}]'),
        (b"<html>\n bad  gateway</html>", "<html> bad gateway</html>"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"", "no explanation"),
        (b"x" * 999, "x" * 300),
    ],
)
def test_error_text(body: bytes, says: str) -> None:
    """Every server words its errors in a shape of its own; none may crash the client."""
    assert error_text(body) == says


def test_bodies() -> None:
    """A field that was not asked for is not sent: strict servers refuse it."""
    spec = RequestSpec(5, "one two")
    plain = json.loads(encode_body(spec, BodyOptions("m", "completions", ignore_eos=False, include_usage=False)))
    assert plain == {"model": "m", "prompt": "one two", "max_tokens": 5, "temperature": 0.0, "stream": True}
    assert "top_p" not in plain
    assert json.loads(encode_body(spec, BodyOptions("m", "completions", top_p=0.9)))["top_p"] == 0.9
    chat = json.loads(encode_body(spec, BodyOptions("m", "chat", 0.7)))
    assert chat["messages"] == [{"role": "user", "content": "one two"}]
    assert (chat["ignore_eos"], chat["stream_options"], chat["temperature"]) == (True, {"include_usage": True}, 0.7)
    turns = ({"role": "system", "content": "s"}, {"role": "user", "content": "u"})
    assert json.loads(encode_body(RequestSpec(1, messages=turns), BodyOptions("m", "chat")))["messages"] == list(turns)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://127.0.0.1:8000", Address("127.0.0.1", 8000, False, "")),
        ("http://host/v1/", Address("host", 80, False, "")),
        ("https://host/llm/v1", Address("host", 443, True, "/llm")),
        ("http://[::1]:81/x/", Address("::1", 81, False, "/x")),
    ],
)
def test_addresses(url: str, address: Address) -> None:
    """With or without /v1: both are what people paste."""
    assert Address.parse(url) == address


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", "http://host:port", ""])
def test_bad_addresses(url: str) -> None:
    """Refused before a connection is tried, naming the option."""
    with pytest.raises(BenchError, match="--url"):
        Address.parse(url)
