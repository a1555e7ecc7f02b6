"""The Python front door: what it accepts, what it returns, and that errors leave it usable."""

import itertools
import math
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import castline
from castline.engines.errors import EngineError, RequestError
from castline.llm import LLM
from castline.runtime.events import FinishReason
from castline.runtime.sampling_params import SamplingParams

SHORT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_repository: Path) -> Any:
    with castline.LLM(tiny_repository) as made:
        yield made


def test_results_look_like_their_prompts(llm: LLM) -> None:
    """Order, prompt text and token ids: a batch that comes back shuffled is worse than an error."""
    results = llm.generate(["one", "two", "three"], SHORT)
    assert [r.prompt for r in results] == ["one", "two", "three"]
    assert [bytes(r.prompt_token_ids) for r in results] == [b"one", b"two", b"three"]
    for result in results:
        (output,) = result.outputs
        assert output.finish_reason is FinishReason.LENGTH
        assert len(output.token_ids) == 6
        assert output.logprobs is output.cumulative_logprob is None


def test_a_prompt_may_be_text_or_token_ids_bare_or_in_a_list(llm: LLM) -> None:
    """A bare list of ids is one prompt, not one prompt a token."""
    ids = list(b"hello")
    (wanted,) = [r.outputs[0].token_ids for r in llm.generate("hello", SHORT)]
    for prompts in (["hello"], ids, [ids], tuple(ids)):
        (result,) = llm.generate(prompts, SHORT)
        assert result.outputs[0].token_ids == wanted
    assert llm.generate([], SHORT) == []
    assert llm.generate(ids, SHORT)[0].prompt is None


def test_parameters_one_for_all_or_one_for_each(llm: LLM) -> None:
    """Zipping lists of different lengths would drop prompts silently."""
    each = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 2, 3)]
    assert [len(r.outputs[0].token_ids) for r in llm.generate(["a", "b", "c"], each)] == [1, 2, 3]
    with pytest.raises(RequestError, match="3 prompts and 2 sampling_params"):
        llm.generate(["a", "b", "c"], each[:2])


def test_log_probabilities_add_up(llm: LLM) -> None:
    """cumulative_logprob is the sum over the tokens returned; a prompt has one log-probability a token."""
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=2, prompt_logprobs=0, n=2)
    (result,) = llm.generate("probably", params)
    for output in result.outputs:
        assert output.logprobs is not None
        assert len(output.logprobs) == 5
        assert [entry.token_id for entry in output.logprobs] == output.token_ids
        assert all(entry.rank == 1 for entry in output.logprobs)
        assert output.cumulative_logprob is not None
        assert math.isclose(output.cumulative_logprob, sum(entry.logprob for entry in output.logprobs))
    assert result.prompt_logprobs is not None
    assert len(result.prompt_logprobs) == len("probably")
    assert result.prompt_logprobs[0] is None


def test_a_stop_string_ends_the_text(llm: LLM) -> None:
    """The text before it, and no work after it."""
    (free,) = llm.generate("stop here", SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    text = free.outputs[0].text
    stop = next(char for char in text if char.isascii() and char.isalnum())
    (result,) = llm.generate("stop here", SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, stop=(stop,)))
    assert result.outputs[0].text == text[: text.index(stop)]
    assert result.outputs[0].finish_reason is FinishReason.STOP
    assert result.outputs[0].stop_reason == stop
    assert llm.stats().kv_blocks_used == 0


def test_chat_renders_the_template(llm: LLM) -> None:
    """One conversation bare, or several; the template's markup is encoded as tokens, not as text."""
    hello = [{"role": "user", "content": "hello"}]
    (one,) = llm.chat(hello, SHORT)
    assert one.prompt == "<user>hello<assistant>"
    assert one.prompt_token_ids == (258, *b"hello", 259)
    assert [r.outputs[0].token_ids for r in llm.chat([hello, hello], SHORT)] == [one.outputs[0].token_ids] * 2


@pytest.mark.parametrize("bad", ["", [[]], [[1, 260]], ["fine", "x" * 256]])
def test_a_bad_prompt_in_a_batch_runs_nothing(llm: LLM, bad: Any) -> None:
    """Half a batch computed before the error is time lost; the next call must work."""
    steps = llm.stats().steps
    with pytest.raises(RequestError):
        llm.generate(bad, SHORT)
    assert llm.stats().steps == steps
    assert len(llm.generate("good", SHORT)[0].outputs[0].token_ids) == 6


@pytest.mark.parametrize("bad", [b"abc", [b"abc"], None, ["fine", None], np.array([1, 2]), [np.array([1, 2])]])
def test_a_prompt_that_is_neither_text_nor_token_ids_is_named(llm: LLM, bad: Any) -> None:
    """Bytes would be taken for token ids, silently; an array or None would fail somewhere inside."""
    with pytest.raises(RequestError, match=r"^prompts(\[\d\])? must be text or a list of token ids, not (bytes|N|nd)"):
        llm.generate(bad, SHORT)


@pytest.mark.parametrize("failure", [KeyboardInterrupt, EngineError])
def test_an_error_in_the_middle_leaves_the_engine_empty(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, failure: type[BaseException]
) -> None:
    """A failed step, or Ctrl-C in a notebook at any point of one, then the next cell: no old sequence may run on, hold
    blocks or answer, and Ctrl-C must work as before."""
    execute, count = llm._executor.execute, itertools.count()

    def interrupted(step: Any) -> Any:
        if next(count) == 3:
            if failure is KeyboardInterrupt:
                signal.raise_signal(signal.SIGINT)
            else:
                raise MemoryError("no room for the step")
        return execute(step)

    handler = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(llm._executor, "execute", interrupted)
        with pytest.raises(failure):
            llm.generate("left over", SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    assert signal.getsignal(signal.SIGINT) is handler
    assert llm.stats().kv_blocks_used == llm.stats().num_running == 0
    assert len(llm._processor) == 0
    assert len(llm.generate("next", SHORT)[0].outputs[0].token_ids) == 6


def test_a_closed_llm_says_so(tiny_repository: Path) -> None:
    """Use after close must not be a crash in the session; close twice is fine."""
    llm = LLM(tiny_repository / "tiny" / "1", kv_blocks=16)
    llm.close()
    llm.close()
    with pytest.raises(RequestError, match="closed"):
        llm.generate("x", SHORT)


def test_options_are_checked(tiny_repository: Path) -> None:
    """An option that does not exist, and one that does not fit."""
    with pytest.raises(TypeError, match="max_model_length"):
        LLM(tiny_repository, max_model_length=5)
    with pytest.raises(EngineError, match="--max-model-len 257 is over the engine's 256"):
        LLM(tiny_repository, max_model_len=257)
