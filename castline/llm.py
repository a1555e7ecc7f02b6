"""The engine as a Python object, without asyncio and without a server: one process, batches in and texts out.

with LLM("models") as llm:
    for result in llm.generate(["The capital of France is", "1, 2, 3,"], SamplingParams(max_tokens=16)):
        print(result.outputs[0].text)
"""

import itertools
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from threading import Event, current_thread, main_thread
from types import TracebackType
from typing import Any, Self, cast

from castline.engines.errors import RequestError
from castline.runtime.client import Output, PromptInfo, Stats
from castline.runtime.events import FinishReason, TokenLogprobs
from castline.runtime.load_options import LoadOptions
from castline.runtime.loader import plan_engine
from castline.runtime.output_processor import OutputProcessor
from castline.runtime.request import Request
from castline.runtime.resolve import resolve_params
from castline.runtime.sampling_params import SamplingParams
from castline.runtime.startup import load_core
from castline.runtime.tokenizer import load_tokenizer
from castline.runtime.validation import validate_prompt

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


@dataclass(slots=True)
class CompletionOutput:
    """One continuation."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    """One for each of token_ids, where asked for."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended the text; None for the model's EOS."""

    @property
    def cumulative_logprob(self) -> float | None:
        """Log-probability of the whole continuation, where logprobs were asked for."""
        return None if self.logprobs is None else sum(entry.logprob for entry in self.logprobs)


@dataclass(slots=True)
class RequestOutput:
    """What came of one prompt."""

    prompt: str | None
    """None where the prompt was given as token ids."""
    prompt_token_ids: tuple[int, ...]
    outputs: list[CompletionOutput]
    """The n continuations, by index."""
    cached_tokens: int = 0
    """Prompt tokens read from the prefix cache."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


class LLM:
    """An engine loaded from a repository or a bundle. Not thread-safe. Options are those of `LoadOptions`.

    Raises EngineError where the engine does not fit this host, and where a step fails; RequestError for prompts or
    parameters that cannot be served, and then nothing of the call has run.
    """

    def __init__(self, path: str | PathLike[str], **options: Any) -> None:
        plan = plan_engine(Path(path), LoadOptions(**options))
        self.manifest = plan.manifest
        self.limits = plan.limits
        self.tokenizer = load_tokenizer(plan.bundle)
        self._core, self._executor = load_core(plan.bundle, plan.limits, plan.num_threads, huge_pages=plan.huge_pages)
        self._processor = OutputProcessor(self.tokenizer)
        self._ids = itertools.count()
        self._closed = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continues each prompt, all of them batched together; results in the order of the prompts.

        A prompt is a text or a list of token ids; a single one may be given bare. *sampling_params* is one for all or
        one for each; None takes the defaults, with which a text runs until the model ends it.
        """
        batch = _as_batch(prompts)
        return self._run([(prompt, self._encode(prompt)) for prompt in batch], sampling_params)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answers each conversation, a list of ``{"role": …, "content": …}``; a single one may be given bare."""
        conversations: list[Any] = [messages] if not messages or isinstance(messages[0], Mapping) else list(messages)
        texts = [self.tokenizer.render_chat(conversation) for conversation in conversations]
        return self._run([(t, self.tokenizer.encode(t, add_special_tokens=False)) for t in texts], sampling_params)

    def stats(self) -> Stats:
        """Counters since start, and gauges now."""
        return self._core.stats()

    def close(self) -> None:
        """Frees the engine. May be called again."""
        if not self._closed:
            self._closed = True
            self._core.close()
            self._executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    def _run(
        self,
        prompts: Sequence[tuple[Prompt, Sequence[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[RequestOutput]:
        """Every request is checked before the first is queued; after an error or Ctrl-C the engine is empty again."""
        if self._closed:
            raise RequestError("this LLM is closed")
        requests = [
            self._request(token_ids, params)
            for (_, token_ids), params in zip(prompts, _one_each(sampling_params, len(prompts)), strict=True)
        ]
        results = {
            request.request_id: _empty_result(prompt, request)
            for (prompt, _), request in zip(prompts, requests, strict=True)
        }
        try:
            for request in requests:
                self._processor.add(request)
                self._core.add_request(request)
            with _interrupts_held() as interrupted:
                while self._core.has_work and not interrupted.is_set():
                    self._step(results)
        finally:
            for request in requests:
                self._processor.remove(request.request_id)
                self._core.abort(request.request_id)
            while self._core.has_work:
                self._core.step()
        return list(results.values())

    def _step(self, results: Mapping[str, RequestOutput]) -> None:
        step = self._processor.process(self._core.step())
        for _, error in step.failures:
            raise error
        for request_id, output in step.outputs:
            _extend(results[request_id], output)
        for request_id, index in step.aborts:
            self._core.abort(request_id, index)

    def _request(self, token_ids: Sequence[int], params: SamplingParams) -> Request:
        vocab_size = self.manifest.model.vocab_size
        prompt = validate_prompt(token_ids, vocab_size)
        resolved = resolve_params(params, len(prompt), vocab_size, self.limits)
        return Request(str(next(self._ids)), prompt, resolved, streams=False)


@contextmanager
def _interrupts_held() -> Iterator[Event]:
    """Holds back Ctrl-C, which would cut a step in two: it sets the event, and is raised when the block is left."""
    interrupted = Event()
    if current_thread() is not main_thread():
        yield interrupted
        return
    previous = signal.signal(signal.SIGINT, lambda number, frame: interrupted.set())
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous or signal.SIG_DFL)
    if interrupted.is_set():
        signal.raise_signal(signal.SIGINT)


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One text, or one list of token ids, is a batch of one. Raises RequestError for a prompt that is neither."""
    if isinstance(prompts, str):
        return [prompts]
    _check_list(prompts, "prompts")
    if prompts and isinstance(prompts[0], int):
        return [cast(Sequence[int], prompts)]
    batch = list(cast(Sequence[Prompt], prompts))
    for place, prompt in enumerate(batch):
        if not isinstance(prompt, str):
            _check_list(prompt, f"prompts[{place}]")
    return batch


def _check_list(value: Any, name: str) -> None:
    """Bytes are a sequence of integers, yet no token ids."""
    if not isinstance(value, Sequence) or isinstance(value, bytes | bytearray | memoryview):
        kind = type(value).__name__
        raise RequestError(
            f"{name} must be text or a list of token ids, not {kind}; try .tolist() or .decode()", field=name
        )


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(
            f"there are {count} prompts and {len(params)} sampling_params: give one for all, or one for each",
            field="sampling_params",
        )
    return list(params)


def _empty_result(prompt: Prompt, request: Request) -> RequestOutput:
    wanted = request.params.logprobs is not None
    outputs = [CompletionOutput(index, logprobs=[] if wanted else None) for index in range(request.params.n)]
    return RequestOutput(prompt if isinstance(prompt, str) else None, request.prompt_token_ids, outputs)


def _extend(result: RequestOutput, output: Output) -> None:
    completion = result.outputs[output.index]
    completion.text += output.text
    completion.token_ids += output.token_ids
    if completion.logprobs is not None:
        completion.logprobs += output.logprobs or ()
    completion.finish_reason = output.finish_reason
    completion.stop_reason = output.stop_reason
    if output.prompt is not None:
        _add_prompt_info(result, output.prompt)


def _add_prompt_info(result: RequestOutput, info: PromptInfo) -> None:
    result.cached_tokens = info.cached_tokens
    result.prompt_logprobs = info.prompt_logprobs
