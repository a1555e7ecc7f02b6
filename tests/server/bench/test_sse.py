"""The event-stream parser, against streams cut in every way."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from castline.server.bench.sse import SseEvent, SseParser

STREAM = (
    b"\xef\xbb\xbf: hello\n"
    b'data: {"text": "h\xc3\xa9"}\n\n'
    b"event: error\r\ndata:no space\r\n\r\n"
    b"id: 7\rretry: 10\rdata: one\rdata: two\r\r"
    b"event: nothing\n\n"
    b"data\n\n"
    b"data: [DONE]\n\n"
    b"data: cut off\n"
)
EVENTS = [
    SseEvent(b"", b'{"text": "h\xc3\xa9"}'),
    SseEvent(b"error", b"no space"),
    SseEvent(b"", b"one\ntwo"),
    SseEvent(b"", b""),
    SseEvent(b"", b"[DONE]"),
]


def parse(frames: list[bytes]) -> list[SseEvent]:
    parser = SseParser()
    return [event for frame in frames for event in parser.feed(frame)]


def test_whole_stream() -> None:
    """Comments, byte-order mark, all three line ends, fields without a colon, an event without data, and an unfinished
    one: each has its own rule in the standard."""
    assert parse([STREAM]) == EVENTS


def test_cut_anywhere() -> None:
    """A frame that ends inside a CR LF pair must not give an extra blank line, nor one inside a character garbage."""
    for position in range(len(STREAM)):
        assert parse([STREAM[:position], STREAM[position:]]) == EVENTS, position
    assert parse([STREAM[i : i + 1] for i in range(len(STREAM))]) == EVENTS


@given(st.lists(st.integers(0, len(STREAM)), max_size=30))
def test_cut_often(cuts: list[int]) -> None:
    """Many cuts, empty frames among them, give what the whole stream gives."""
    edges = [0, *sorted(cuts), len(STREAM)]
    assert parse([STREAM[a:b] for a, b in pairwise(edges)]) == EVENTS
