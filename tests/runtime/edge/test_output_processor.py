"""Events to outputs: text, stop strings, endings, and what the core is told."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from castline.engines.errors import EngineError, ErrorCode, RequestError
from castline.runtime.client import Output
from castline.runtime.detokenizer import Detokenizer
from castline.runtime.events import Finish, FinishReason, SequenceEvent, TokenLogprobs
from castline.runtime.output_processor import OutputProcessor, StepOutputs
from castline.runtime.request import Request
from castline.runtime.sampling_params import SamplingParams
from castline.runtime.tokenizer import Tokenizer

LENGTH = Finish(FinishReason.LENGTH)
PROMPT = (70, 71)


@pytest.fixture
def words(tokenizers_by_kind: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers_by_kind["byte_level"]


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token a byte, so that tests know where tokens end."""
    by_bytes = {tokenizer.token_bytes(t): t for t in range(3, 259)}
    return [by_bytes[bytes([byte])] for byte in text.encode()]


def processor_of(tokenizer: Tokenizer, **params: Any) -> OutputProcessor:
    processor = OutputProcessor(tokenizer)
    processor.add(Request("r", PROMPT, SamplingParams(**params)))
    return processor


def play(
    processor: OutputProcessor, ids: Sequence[int], cuts: Sequence[int] = (), finish: Finish | None = LENGTH
) -> tuple[list[Output], list[tuple[str, int | None]]]:
    """Feeds the tokens of index 0 in events cut at *cuts*; returns its outputs and the aborts."""
    bounds = [0, *sorted(set(cuts)), len(ids)]
    outputs, aborts = [], []
    for start, end in pairwise(bounds):
        logprobs = tuple(TokenLogprobs(token, -1.0, 1, ()) for token in ids[start:end])
        event = SequenceEvent("r", 0, tuple(ids[start:end]), logprobs, finish if end == len(ids) else None)
        step = processor.process([event])
        outputs += [output for _, output in step.outputs]
        aborts += step.aborts
    return outputs, aborts


def whole(outputs: Sequence[Output]) -> tuple[str, tuple[int, ...], FinishReason | None, str | int | None]:
    last = outputs[-1]
    text, ids = "".join(output.text for output in outputs), tuple(t for output in outputs for t in output.token_ids)
    return text, ids, last.finish_reason, last.stop_reason


def test_text_streams_as_it_comes(words: Tokenizer) -> None:
    outputs, aborts = play(processor_of(words), ids_of(words, "hey"), [1, 2])
    assert [output.text for output in outputs] == ["h", "e", "y"]
    assert [output.finish_reason for output in outputs] == [None, None, FinishReason.LENGTH]
    assert aborts == []


def test_prompt_comes_with_the_first_output_of_index_0(words: Tokenizer) -> None:
    """Usage and echo are taken from it: once, and only there."""
    processor = processor_of(words, n=2, prompt_logprobs=1)
    scored = (None, TokenLogprobs(71, -1.0, 1, ()))
    first = processor.process([SequenceEvent("r", 1, (70,)), SequenceEvent("r", 0, (70,), None, None, 5, scored)])
    later = processor.process([SequenceEvent("r", 0, (70,)), SequenceEvent("r", 1, (70,))])
    assert [output.prompt and output.prompt.cached_tokens for _, output in first.outputs] == [None, 5]
    info = first.outputs[1][1].prompt
    assert info is not None
    assert (info.prompt_token_ids, info.prompt_logprobs) == (PROMPT, scored)
    assert [output.prompt for _, output in later.outputs] == [None, None]


def test_prompt_only_requests_end_with_their_prompt(words: Tokenizer) -> None:
    """C34: max_tokens 0 has no token, yet an output."""
    outputs, _ = play(processor_of(words, max_tokens=0), [])
    assert whole(outputs) == ("", (), FinishReason.LENGTH, None)
    assert outputs[0].prompt is not None


def test_prompt_comes_even_without_a_token(words: Tokenizer) -> None:
    """The first event of index 0 carries it once; dropping that event for being empty would lose it for good."""
    step = processor_of(words).process([SequenceEvent("r", 0, cached_tokens=2)])
    assert [output.prompt and output.prompt.cached_tokens for _, output in step.outputs] == [2]


def test_a_fault_ends_its_request_only(words: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception while the text of one request is made must neither reach the others nor repeat at each step."""
    processor = processor_of(words, n=2)
    processor.add(Request("good", PROMPT, SamplingParams()))
    decode, bad = Detokenizer.push, ids_of(words, "!")[0]

    def push(self: Detokenizer, token_id: int) -> str:
        if token_id == bad:
            raise UnicodeError("no such byte")
        return decode(self, token_id)

    monkeypatch.setattr(Detokenizer, "push", push)
    step = processor.process([SequenceEvent("r", 0, (bad,)), SequenceEvent("good", 0, (70,)), SequenceEvent("r", 1)])
    assert [name for name, _ in step.outputs] == ["good"]
    ((name, error),) = step.failures
    assert (name, str(error)) == ("r", "internal error: UnicodeError('no such byte')")
    assert isinstance(error.__cause__, UnicodeError)
    assert step.aborts == [("r", None)]


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_the_straight_path_gives_what_the_general_one_gives(words: Tokenizer, data: st.DataObject) -> None:
    """Without stop strings the tokens go past the search for them: text and tokens of every event stay the same."""
    ids = data.draw(st.lists(st.integers(0, words.vocab_size + 3), max_size=30))
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=30))
    straight, _ = play(processor_of(words), ids, cuts)
    general, _ = play(processor_of(words, stop=("\ud800 is in no text",)), ids, cuts)
    assert straight == general


# Stop strings


def test_a_stop_string_ends_the_text_and_tells_the_core(words: Tokenizer) -> None:
    """C23: its text is hidden, the tokens end with the one that completed it, and later events are dropped."""
    processor = processor_of(words, stop=("END",))
    ids = ids_of(words, "a ENDxyz")
    outputs, aborts = play(processor, ids, range(1, len(ids)))
    assert whole(outputs) == ("a ", tuple(ids[:5]), FinishReason.STOP, "END")
    assert aborts == [("r", 0)]
    assert len(processor) == 0


def test_the_cores_own_abort_event_is_no_second_ending(words: Tokenizer) -> None:
    """There is one terminal output a continuation."""
    processor = processor_of(words, n=2, stop=("b",))
    processor.process([SequenceEvent("r", 0, tuple(ids_of(words, "ab")))])
    abort = Finish(FinishReason.ABORT, error_code=ErrorCode.CANCELLED)
    assert processor.process([SequenceEvent("r", 0, (), None, abort)]) == StepOutputs()
    assert len(processor.process([SequenceEvent("r", 1, (70,))]).outputs) == 1


def test_a_text_that_ends_in_the_core_is_not_aborted(words: Tokenizer) -> None:
    """The stop string may come with the very last token."""
    outputs, aborts = play(processor_of(words, stop=("b",)), ids_of(words, "ab"))
    assert (whole(outputs)[2:], aborts) == ((FinishReason.STOP, "b"), [])


def test_tokens_behind_an_undecided_match_are_not_reported(words: Tokenizer) -> None:
    """ "bc" is complete, "abcde" began before it: the tokens read meanwhile count only if the text goes on."""
    ids = ids_of(words, "xabcdz")
    outputs, aborts = play(processor_of(words, stop=("bc", "abcde")), ids, range(1, len(ids)), finish=None)
    assert whole(outputs) == ("xa", tuple(ids[:4]), FinishReason.STOP, "bc")
    assert aborts == [("r", 0)]
    outputs, _ = play(processor_of(words, stop=("bc", "abcde")), ids[:5], range(1, 5))
    assert whole(outputs) == ("xa", tuple(ids[:4]), FinishReason.STOP, "bc")


def test_near_misses_are_let_out_at_the_end(words: Tokenizer) -> None:
    outputs, _ = play(processor_of(words, stop=("<|end|>",)), ids_of(words, "a<|en"), [2, 3])
    assert [output.text for output in outputs] == ["a", "", "<|en"]


def test_min_tokens_holds_for_stop_strings(words: Tokenizer) -> None:
    """A stop string before min_tokens is text; one completed by token number min_tokens ends it."""
    ids = ids_of(words, "a.b.c.")
    outputs, _ = play(processor_of(words, stop=(".",), min_tokens=4), ids, range(1, 6))
    assert whole(outputs) == ("a.b", tuple(ids[:4]), FinishReason.STOP, ".")


# Stop tokens


@pytest.mark.parametrize("eos", [0, 1, 2, 60])
def test_the_ending_tokens_text_is_hidden(words: Tokenizer, eos: int) -> None:
    """C25: any of several EOS ids, also one that is no special token; it counts as a token and has no text."""
    finish = Finish(FinishReason.STOP, stop_token_id=eos)
    outputs, _ = play(processor_of(words), [*ids_of(words, "hi"), eos], [1], finish)
    assert whole(outputs) == ("hi", (*ids_of(words, "hi"), eos), FinishReason.STOP, None)


def test_a_stop_token_is_the_stop_reason_and_eos_is_not(words: Tokenizer) -> None:
    finish = Finish(FinishReason.STOP, stop_token_id=60)
    outputs, _ = play(processor_of(words, stop_token_ids=(60,)), [70, 60], finish=finish)
    assert whole(outputs)[2:] == (FinishReason.STOP, 60)


def test_eos_that_ends_nothing_leaves_stop_strings_working(words: Tokenizer) -> None:
    """C25: with ignore_eos the core goes on over EOS ids; a stop string across one still ends the text."""
    ids = [*ids_of(words, "aE"), 2, *ids_of(words, "ND!")]
    outputs, _ = play(processor_of(words, stop=("END",), ignore_eos=True), ids, range(1, len(ids)))
    assert whole(outputs) == ("a", tuple(ids[:5]), FinishReason.STOP, "END")


def test_a_stop_string_completed_before_eos_wins(words: Tokenizer) -> None:
    """Undecided when EOS comes: nothing can follow, so the complete match ends the text."""
    finish = Finish(FinishReason.STOP, stop_token_id=2)
    ids = [*ids_of(words, "abc"), 2]
    outputs, _ = play(processor_of(words, stop=("bc", "abcd")), ids, finish=finish)
    assert whole(outputs) == ("a", tuple(ids[:3]), FinishReason.STOP, "bc")


def test_a_character_cut_off_is_one_replacement_at_the_end(words: Tokenizer) -> None:
    """C21: by max_tokens, in the final output only."""
    outputs, _ = play(processor_of(words), ids_of(words, "a🌍")[:4], [1, 2, 3])
    assert [output.text for output in outputs] == ["a", "", "", "\ufffd"]


# Logprobs


def test_logprobs_stay_with_their_tokens(words: Tokenizer) -> None:
    """Also where tokens are held back by an undecided stop string."""
    ids = ids_of(words, "xabcdz")
    for stop in ((), ("bc", "abcde"), ("z",)):
        outputs, _ = play(processor_of(words, stop=stop, logprobs=0), ids, range(1, len(ids)))
        for output in outputs:
            assert output.logprobs is not None
            assert tuple(entry.token_id for entry in output.logprobs) == output.token_ids
    outputs, _ = play(processor_of(words), ids)
    assert outputs[0].logprobs is None


# Endings and failures


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (ErrorCode.DEADLINE_EXCEEDED, RequestError),
        (ErrorCode.SHUTTING_DOWN, RequestError),
        (ErrorCode.ENGINE_FAILED, EngineError),
    ],
)
def test_an_error_fails_the_request_once(words: Tokenizer, code: ErrorCode, kind: type[Exception]) -> None:
    """One failure for the whole request, behind the tokens of all of it; what is left in the core is aborted."""
    processor = processor_of(words, n=3)
    finish = Finish(FinishReason.ERROR, error_code=code, message="why")
    step = processor.process([SequenceEvent("r", 1, (), None, finish), SequenceEvent("r", 2, (), None, finish)])
    assert (step.outputs, step.failures, step.aborts) == ([], [], [("r", None)])
    abort = Finish(FinishReason.ABORT, error_code=ErrorCode.CANCELLED)
    step = processor.process([SequenceEvent("r", 0, (70, 71), None, abort)])
    assert [(output.index, output.token_ids, output.finish_reason) for _, output in step.outputs] == [
        (0, (70, 71), None)
    ]
    assert [(name, str(error)) for name, error in step.failures] == [("r", "why")]
    assert isinstance(step.failures[0][1], kind)
    assert isinstance(step.failures[0][1], EngineError) or step.failures[0][1].code is code  # type: ignore[attr-defined]
    assert step.aborts == []
    assert len(processor) == 0


def test_tokens_beside_an_error_are_text(words: Tokenizer) -> None:
    """The core hands over what it holds with the end: dropped, a stream that is cut off loses its last tokens."""
    finish = Finish(FinishReason.ERROR, error_code=ErrorCode.DEADLINE_EXCEEDED, message="late")
    processor = processor_of(words, logprobs=0)
    processor.process([SequenceEvent("r", 0, tuple(ids_of(words, "a")), (TokenLogprobs(1, -1.0, 1, ()),))])
    logprobs = tuple(TokenLogprobs(token, -1.0, 1, ()) for token in ids_of(words, "bc"))
    step = processor.process([SequenceEvent("r", 0, tuple(ids_of(words, "bc")), logprobs, finish)])
    ((_, output),) = step.outputs
    assert (output.text, output.finish_reason, output.logprobs) == ("bc", None, logprobs)
    assert [str(error) for _, error in step.failures] == ["late"]
    assert len(processor) == 0


def test_an_error_that_comes_first_stays_first(words: Tokenizer) -> None:
    """An output before it, be it the prompt's, would begin a stream and hide the error's own status."""
    finish = Finish(FinishReason.ERROR, error_code=ErrorCode.DEADLINE_EXCEEDED, message="late")
    step = processor_of(words).process([SequenceEvent("r", 0, (), None, finish, cached_tokens=0)])
    assert (step.outputs, len(step.failures)) == ([], 1)


def test_a_stop_string_beside_an_error_has_ended_the_text(words: Tokenizer) -> None:
    """What came after a text that was complete is not its reader's business."""
    finish = Finish(FinishReason.ERROR, error_code=ErrorCode.ENGINE_FAILED, message="NaN")
    step = processor_of(words, stop=("b",)).process([SequenceEvent("r", 0, tuple(ids_of(words, "abc")), None, finish)])
    ((_, output),) = step.outputs
    assert (output.text, output.finish_reason, output.stop_reason) == ("a", FinishReason.STOP, "b")
    assert (step.failures, step.aborts) == ([], [])


def test_a_request_that_failed_whole_is_not_aborted(words: Tokenizer) -> None:
    """Its only continuation has ended in the core already."""
    finish = Finish(FinishReason.ERROR, error_code=ErrorCode.ENGINE_FAILED)
    step = processor_of(words).process([SequenceEvent("r", 0, (), None, finish)])
    assert (len(step.failures), step.aborts) == (1, [])


def test_an_abort_from_outside_lets_out_what_was_held(words: Tokenizer) -> None:
    outputs, aborts = play(processor_of(words, stop=("bbb",)), ids_of(words, "abb"), finish=Finish(FinishReason.ABORT))
    assert (whole(outputs)[0], whole(outputs)[2], aborts) == ("abb", FinishReason.ABORT, [])


def test_a_cancelled_request_fails_as_cancelled(words: Tokenizer) -> None:
    """The core says CANCELLED where somebody else aborted a request that is still read."""
    processor = processor_of(words)
    finish = Finish(FinishReason.ABORT, error_code=ErrorCode.CANCELLED)
    (_, error), *_ = processor.process([SequenceEvent("r", 0, (), None, finish)]).failures
    assert isinstance(error, RequestError)
    assert error.code is ErrorCode.CANCELLED


def test_events_of_removed_and_unknown_requests_are_dropped(words: Tokenizer) -> None:
    """A client that has gone leaves events on their way."""
    processor = processor_of(words)
    processor.remove("r")
    processor.remove("r")
    assert processor.process([SequenceEvent("r", 0, (70,), None, LENGTH), SequenceEvent("?", 0)]) == StepOutputs()
    assert len(processor) == 0


def test_state_ends_with_the_last_continuation(words: Tokenizer) -> None:
    """C18."""
    processor = processor_of(words, n=2)
    processor.process([SequenceEvent("r", 0, (70,), None, LENGTH)])
    assert len(processor) == 1
    processor.process([SequenceEvent("r", 1, (70,), None, LENGTH)])
    assert len(processor) == 0


# Stream and non-stream


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_spread_over_events_gives_the_same_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """A stream and its non-stream twin must agree on text, tokens and reason, whatever the events."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=25))
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=25))
    text = tokenizer.decode(ids).replace("\ufffd", "?")
    pieces = st.integers(0, max(0, len(text) - 1)).flatmap(lambda at: st.just(text[at : at + 3] or "x"))
    stops = tuple(data.draw(st.lists(pieces, max_size=3, unique=True)))
    params = {"stop": stops, "min_tokens": data.draw(st.integers(0, 5))}
    finish = data.draw(st.sampled_from([LENGTH, Finish(FinishReason.STOP, stop_token_id=ids[-1] if ids else None)]))
    at_once, _ = play(processor_of(tokenizer, **params), ids, finish=finish)
    streamed, _ = play(processor_of(tokenizer, **params), ids, cuts, finish)
    assert whole(streamed) == whole(at_once)
    if isinstance(whole(streamed)[3], str):
        assert whole(streamed)[3] not in whole(streamed)[0] or params["min_tokens"] > 0
