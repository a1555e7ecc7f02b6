"""Events of the engine core to outputs of requests: text, stop strings, finish reasons.

One continuation's outputs, joined, do not depend on how its tokens were spread over events. Where a stop string ends a
text, the core does not know yet: the caller is told to abort that continuation, and its later events are dropped.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec import structs

from castline.engines.errors import CastlineError, EngineError, ErrorCode, RequestError
from castline.runtime.client import Output, PromptInfo
from castline.runtime.detokenizer import Detokenizer
from castline.runtime.events import Finish, FinishReason, SequenceEvent, TokenLogprobs
from castline.runtime.request import Request
from castline.runtime.stop_strings import StopStrings
from castline.runtime.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """What a batch of events means for the requests. All three name requests by id."""

    outputs: list[tuple[str, Output]] = field(default_factory=list)
    failures: list[tuple[str, CastlineError]] = field(default_factory=list)
    """Requests that ended early; nothing more comes of them."""
    aborts: list[tuple[str, int | None]] = field(default_factory=list)
    """What the core must abort: a continuation that a stop string ended, or all of a failed request (None)."""


class _Continuation:
    """One text of a request."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self._params = request.params
        self._detokenizer = Detokenizer(tokenizer, request.prompt_token_ids)
        self._stops = StopStrings(request.params.stop)
        self._tokens: list[tuple[int, TokenLogprobs | None]] = []
        """Generated, not yet in an output."""
        self._num_tokens = 0
        self._num_shown = 0
        self._plain = not request.params.stop and request.params.logprobs is None
        """Nothing is held back but unfinished characters."""

    def advance(self, index: int, event: SequenceEvent, prompt: PromptInfo | None) -> Output:
        """Takes the event's tokens up to a stop string; the output says whether the text has ended."""
        if self._plain and event.finish is None:
            return Output(index, "".join(map(self._detokenizer.push, event.token_ids)), event.token_ids, prompt=prompt)
        text = self._read(event)
        reason, stop_reason = self._end(event.finish)
        shown = self._take_tokens()
        return Output(
            index=index,
            text=text,
            token_ids=tuple(token for token, _ in shown),
            logprobs=tuple(entry for _, entry in shown if entry) if self._params.logprobs is not None else None,
            finish_reason=reason,
            stop_reason=stop_reason,
            prompt=prompt,
        )

    def _read(self, event: SequenceEvent) -> str:
        """The text that the event lets out. One piece a token, so that pieces count tokens."""
        hidden = event.finish is not None and event.finish.stop_token_id is not None
        last = len(event.token_ids) - 1
        text = ""
        for place, token in enumerate(event.token_ids):
            self._tokens.append((token, None if event.logprobs is None else event.logprobs[place]))
            self._num_tokens += 1
            text += self._feed("" if hidden and place == last else self._detokenizer.push(token))
            if self._stops.match is not None:
                return text
        if event.finish is not None:
            text += self._feed(self._detokenizer.finish())
            text += self._stops.finish()
        return text

    def _feed(self, text: str) -> str:
        if self._stops.match is not None:
            return ""
        return self._stops.push(text, may_stop=self._num_tokens >= self._params.min_tokens)

    def _end(self, finish: Finish | None) -> tuple[FinishReason | None, str | int | None]:
        if self._stops.match is not None:
            return FinishReason.STOP, self._stops.match.stop
        if finish is None:
            return None, None
        stop_token = finish.stop_token_id
        return finish.reason, stop_token if stop_token in self._params.stop_token_ids else None

    def _take_tokens(self) -> list[tuple[int, TokenLogprobs | None]]:
        """Tokens to report now: none after the one that completed a stop string, even while that is not decided yet."""
        end = self._stops.end_piece
        limit = self._num_tokens if end is None else min(end + 1, self._num_tokens)
        count = limit - self._num_shown
        shown, self._tokens = self._tokens[:count], self._tokens[count:]
        self._num_shown = limit
        return shown


class _RequestState:
    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self.request = request
        self.prompt_shown = False
        self.failure: CastlineError | None = None
        """Why it ends, once all of its continuations have."""
        self.running = {index: _Continuation(request, tokenizer) for index in range(request.params.n)}


class OutputProcessor:
    """Not thread-safe. Holds state for live requests only."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[str, _RequestState] = {}

    def __len__(self) -> int:
        """Requests it holds state for."""
        return len(self._requests)

    def add(self, request: Request) -> None:
        """Before the request's first event. Its id must not be in use."""
        assert request.request_id not in self._requests, f"request {request.request_id} was added before"
        self._requests[request.request_id] = _RequestState(request, self._tokenizer)

    def remove(self, request_id: str) -> None:
        """Nobody reads the request any more: its later events are dropped. Unknown ids are ignored."""
        self._requests.pop(request_id, None)

    def process(self, events: Iterable[SequenceEvent]) -> StepOutputs:
        """A fault in making text ends the one request: it is among the failures, with the fault as its cause."""
        step = StepOutputs()
        for event in events:
            state = self._requests.get(event.request_id)
            if state is None or event.index not in state.running:
                continue
            try:
                self._advance(state, event, step)
            except Exception as fault:
                _log.exception("request %s", event.request_id)
                error = EngineError(f"internal error: {fault!r}")
                error.__cause__ = fault
                self._fail(state, event, error, step)
        return step

    def _advance(self, state: _RequestState, event: SequenceEvent, step: StepOutputs) -> None:
        error = None if event.finish is None else _error_of(event.finish)
        if error is None:
            ended = self._show(state, event, step)
        else:  # behind its tokens, and no error at all where a stop string among them ends the text
            ended = bool(event.token_ids) and self._show(state, structs.replace(event, finish=None), step)
            error = None if ended else error
        if ended or error is not None:
            self._end(state, event, error, step)

    def _end(self, state: _RequestState, event: SequenceEvent, error: CastlineError | None, step: StepOutputs) -> None:
        """Of the event's continuation. With the first *error* of a request the core is to end the others too."""
        del state.running[event.index]
        if error is not None and state.failure is None:
            state.failure = error
            if state.running:
                step.aborts.append((event.request_id, None))
        elif event.finish is None:
            step.aborts.append((event.request_id, event.index))
        if not state.running:
            del self._requests[event.request_id]
            if state.failure is not None:
                step.failures.append((event.request_id, state.failure))

    def _show(self, state: _RequestState, event: SequenceEvent, step: StepOutputs) -> bool:
        """Makes the event's output. Returns whether the text has ended."""
        prompt = None if state.prompt_shown else _prompt_info(state, event)
        output = state.running[event.index].advance(event.index, event, prompt)
        if output.text or output.token_ids or output.finish_reason or output.prompt:
            step.outputs.append((event.request_id, output))
        return output.finish_reason is not None

    def _fail(self, state: _RequestState, event: SequenceEvent, error: CastlineError, step: StepOutputs) -> None:
        step.failures.append((event.request_id, error))
        if len(state.running) > 1 or event.finish is None:
            step.aborts.append((event.request_id, None))
        del self._requests[event.request_id]


def _prompt_info(state: _RequestState, event: SequenceEvent) -> PromptInfo | None:
    """With the first event of index 0."""
    if event.index != 0:
        return None
    state.prompt_shown = True
    return PromptInfo(
        state.request.prompt_token_ids, event.cached_tokens or 0, event.prompt_logprobs, event.queue_s or 0.0
    )


def _error_of(finish: Finish) -> CastlineError | None:
    """The error that ended a request early; the engine's own faults are EngineErrors, all others the request's."""
    if finish.reason is not FinishReason.ERROR and finish.error_code is None:
        return None
    message = finish.message or "the request ended early"
    if finish.error_code in (None, ErrorCode.ENGINE_FAILED):
        return EngineError(message)
    return RequestError(message, code=finish.error_code or ErrorCode.INVALID_VALUE)
