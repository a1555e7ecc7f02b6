"""Messages between the two processes survive the trip, however the stream cuts them."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from castline.engines.errors import ErrorCode
from castline.runtime.client import EffectiveLimits, Stats
from castline.runtime.events import Finish, FinishReason, SequenceEvent, TokenLogprobs
from castline.runtime.request import Request
from castline.runtime.sampling_params import SamplingParams
from castline.runtime.wire import (
    Abort,
    Add,
    Command,
    Failed,
    Load,
    Pace,
    Ready,
    Report,
    StepDone,
    Stop,
    command_reader,
    encode,
    report_reader,
)

PARAMS = SamplingParams(
    n=3, max_tokens=7, logit_bias={5: -100.0, 2: 1.5}, seed=2**63, stop=("a", "é"), stop_token_ids=(1,), logprobs=0
)
COMMANDS: list[Command] = [
    Load("/some/bundle", EffectiveLimits(512, 64, 512, 16, 100, 3.1), 2),
    Add(Request("r", tuple(range(2000)), PARAMS, arrival_time=1.25, deadline=2.5, cache_salt="s", streams=False)),
    Pace(8),
    Abort("r"),
    Abort("r", 2),
    Stop(),
]
LOGPROBS = TokenLogprobs(7, -0.5, 1, ((7, -0.5), (3, float("-inf"))))
REPORTS: list[Report] = [
    Ready(),
    StepDone(
        [
            SequenceEvent("r", 0, (7,), (LOGPROBS,), cached_tokens=16, prompt_logprobs=(None, LOGPROBS)),
            SequenceEvent("r", 1, finish=Finish(FinishReason.STOP, stop_token_id=2)),
            SequenceEvent("é", 2, finish=Finish(FinishReason.ERROR, None, ErrorCode.DEADLINE_EXCEEDED, "late")),
        ],
        Stats(num_running=3, steps=9),
    ),
    Failed("out of memory"),
]


@given(st.lists(st.integers(1, 300), min_size=1))
def test_messages_survive_any_cutting_of_the_stream(cuts: list[int]) -> None:
    """A stream socket keeps no boundaries: half a length, or three messages at once, must come out as sent."""
    for reader, messages in ((command_reader(), COMMANDS), (report_reader(), REPORTS)):
        stream = b"".join(encode(message) for message in messages)
        received: list[object] = []
        position = 0
        for cut in [*cuts, len(stream)]:
            received += reader.feed(stream[position : position + cut])
            position += cut
        assert received == messages


def test_a_message_of_another_type_is_refused() -> None:
    """Mixing up the two directions must be an error at once, not a half-read message."""
    with pytest.raises(msgspec.ValidationError):
        command_reader().feed(encode(Ready()))
