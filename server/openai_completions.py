"""``POST /v1/completions``: the body into a job, outputs into one answer or into chunks.

Choice ``p * n + i`` is continuation i of prompt p.
"""

import time
from dataclasses import dataclass, field

from msgspec import UNSET

from castline.runtime.admission import validate_places
from castline.runtime.client import Output, PromptInfo
from castline.runtime.sampling_params import SamplingParams
from castline.server.job import AnswerWriter, Job, StreamWriter
from castline.server.openai_logprobs import CompletionLogprobWriter, LogprobAligner
from castline.server.openai_params import Prompt, check_echo, completion_params, prompts_of
from castline.server.openai_requests import decode_completion
from castline.server.openai_responses import (
    AnswerHead,
    ChunkEncoder,
    CompletionChoice,
    CompletionLogprobs,
    UsageCounter,
    encode_answer,
    sse,
)
from castline.server.request_ids import new_id
from castline.server.serving import ServedModel


def completion_job(model: ServedModel, body: bytes) -> Job:
    """Raises RequestError where the body refuses."""
    request = decode_completion(body)
    model.check_name(request.model)
    params = completion_params(request)
    limits = model.engine.limits
    prompts = prompts_of(request.prompt, max_prompts=limits.num_places, max_tokens=limits.max_model_len)
    validate_places(len(prompts), params.n, limits)
    request_id = new_id("cmpl")
    head = AnswerHead(request_id, "text_completion", int(time.time()), model.name, model.fingerprint)
    include_usage = request.stream_options is not None and bool(request.stream_options.include_usage)
    choices = _Choices(model, prompts, params, echo=bool(request.echo))
    return Job(
        request_id=request_id,
        prompts=prompts,
        params=params,
        add_special_tokens=request.add_special_tokens is not False,
        cache_salt=request.cache_salt,
        writer=CompletionStream(head, choices, include_usage) if request.stream else CompletionAnswer(head, choices),
    )


@dataclass(frozen=True)
class _Echo:
    """A prompt as each of its choices begins with it."""

    text: str
    logprobs: CompletionLogprobs | None
    writer: CompletionLogprobWriter
    """Has written them; each choice goes on with a copy."""


class _Choice:
    """One choice: turns its outputs into text and log-probabilities, the echoed prompt first."""

    def __init__(self, model: ServedModel, logprobs: bool) -> None:
        texts = model.token_texts
        self._aligner = LogprobAligner(texts, model.engine.tokenizer.eos_token_ids) if logprobs else None
        self._writer = CompletionLogprobWriter(texts)

    def echo(self, index: int, echo: _Echo) -> CompletionChoice:
        self._writer = echo.writer.copy()
        return CompletionChoice(index, echo.text, echo.logprobs, None, None)

    def generated(self, output: Output) -> CompletionChoice:
        logprobs = None if self._aligner is None else self._writer.generated(self._aligner.push(output))
        return CompletionChoice(output.index, output.text, logprobs, output.finish_reason, output.stop_reason)


def _plain_choice(output: Output) -> CompletionChoice:
    return CompletionChoice(output.index, output.text, None, output.finish_reason, output.stop_reason)


class _Choices:
    """All choices of a request. With echo, outputs that overtake their prompt's information wait for it."""

    def __init__(self, model: ServedModel, prompts: list[Prompt], params: SamplingParams, *, echo: bool) -> None:
        self._model = model
        self._prompts = prompts
        self._n = params.n
        self._echo = echo
        self._logprobs = params.logprobs
        self.are_plain = not echo and self._logprobs is None
        """An output is one choice's, and all of it is its text."""
        self.take_long = echo and self._logprobs is not None
        """Tens of microseconds for each token of a prompt, and a body of megabytes."""
        self._choices: dict[int, _Choice] = {}
        self._echoes: dict[int, _Echo] = {}
        self._num_echoed = 0
        """Log-probabilities of prompts, over all choices."""
        self._infos: dict[int, PromptInfo] = {}
        self._early: dict[int, list[Output]] = {}

    def push(self, output: Output) -> list[CompletionChoice]:
        """What *output* adds, possibly to several choices."""
        if not self._echo:
            return [self._choice(output.index).generated(output)]
        prompt_index = output.index // self._n
        if output.prompt is not None:
            self._infos[prompt_index] = output.prompt
            ready = [output, *self._early.pop(prompt_index, [])]
            return [part for one in ready for part in self._echoed(prompt_index, one)]
        if prompt_index not in self._infos:
            self._early.setdefault(prompt_index, []).append(output)
            return []
        return self._echoed(prompt_index, output)

    def _choice(self, index: int) -> _Choice:
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = _Choice(self._model, self._logprobs is not None)
        return choice

    def _echoed(self, prompt_index: int, output: Output) -> list[CompletionChoice]:
        is_first = output.index not in self._choices
        choice = self._choice(output.index)
        parts: list[CompletionChoice] = []
        if is_first:
            parts.append(choice.echo(output.index, self._echo_of(prompt_index)))
        parts.append(choice.generated(output))
        return parts

    def _echo_of(self, prompt_index: int) -> _Echo:
        """Made once, for the first of the prompt's choices. Raises RequestError where all of them would be absurd."""
        echo = self._echoes.get(prompt_index)
        if echo is None:
            prompt, info = self._prompts[prompt_index], self._infos[prompt_index]
            text = prompt if isinstance(prompt, str) else self._model.engine.tokenizer.decode(prompt)
            writer, logprobs = CompletionLogprobWriter(self._model.token_texts), None
            if self._logprobs is not None:
                self._num_echoed += len(info.prompt_token_ids) * self._n * (self._logprobs + 1)
                if len(self._prompts) * self._n > 1:  # a single one has no other way
                    check_echo(self._num_echoed)
                entries = info.prompt_logprobs or (None,) * len(info.prompt_token_ids)
                logprobs = writer.prompt(info.prompt_token_ids, entries, text)
            echo = self._echoes[prompt_index] = _Echo(text, logprobs, writer)
        return echo


class CompletionStream(StreamWriter):
    """Chunks of new text, the last of each choice with the finish_reason."""

    def __init__(self, head: AnswerHead, choices: _Choices, include_usage: bool) -> None:
        self._head = head
        self.takes_long = choices.take_long
        self._choices = choices
        self._usage = UsageCounter()
        self._include_usage = include_usage
        self._chunks = ChunkEncoder(head, None if include_usage else UNSET)

    def events(self, output: Output) -> bytes:
        self._usage.add(output)
        if self._choices.are_plain:
            return self._chunks.event(_plain_choice(output)) if output.text or output.finish_reason else b""
        return b"".join(
            self._chunks.event(choice)
            for choice in self._choices.push(output)
            if choice.text or choice.finish_reason or (choice.logprobs and choice.logprobs.tokens)
        )

    def last_events(self) -> bytes:
        return sse(self._head.answer((), self._usage.usage())) if self._include_usage else b""


@dataclass
class _Parts:
    """A choice as it grows."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[CompletionLogprobs] = field(default_factory=list)
    end: CompletionChoice | None = None


class CompletionAnswer(AnswerWriter):
    """One body when every continuation has ended."""

    def __init__(self, head: AnswerHead, choices: _Choices) -> None:
        self._head = head
        self.takes_long = choices.take_long
        self._choices = choices
        self._usage = UsageCounter()
        self._parts: dict[int, _Parts] = {}

    def add(self, output: Output) -> None:
        self._usage.add(output)
        for choice in self._choices.push(output):
            parts = self._parts.setdefault(choice.index, _Parts())
            parts.texts.append(choice.text)
            if choice.logprobs is not None:
                parts.logprobs.append(choice.logprobs)
            if choice.finish_reason is not None:
                parts.end = choice

    def body(self) -> bytes:
        choices = (_joined(parts) for _, parts in sorted(self._parts.items()))
        return encode_answer(self._head, choices, self._usage.usage())


def _joined(parts: _Parts) -> CompletionChoice:
    end = parts.end
    assert end is not None
    logprobs = None
    if parts.logprobs:
        logprobs = CompletionLogprobs([], [], [], [])
        for part in parts.logprobs:
            logprobs.tokens += part.tokens
            logprobs.token_logprobs += part.token_logprobs
            logprobs.top_logprobs += part.top_logprobs
            logprobs.text_offset += part.text_offset
    return CompletionChoice(end.index, "".join(parts.texts), logprobs, end.finish_reason, end.stop_reason)
