"""The engine as servers and the front door see it: text in, text out, over an engine loop that runs elsewhere."""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

import msgspec

from castline.engines.manifest import Manifest
from castline.runtime.events import FinishReason, TokenLogprobs
from castline.runtime.sampling_params import SamplingParams

if TYPE_CHECKING:  # the engine process has Stats and limits of this module, and needs no tokenizer
    from castline.runtime.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class EffectiveLimits:
    """The limits in force after the command line, the manifest and the host's memory have been reconciled."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    max_concurrency: float
    """Sequences of max_model_len that fit the pool at once."""
    max_waiting: int = 4096
    """Continuations that may wait, n of each request; one more is refused with OVERLOADED."""
    max_drafts: int = 0
    """Tokens guessed ahead for one sequence in a step (prompt lookup); 0 is no speculation."""

    @property
    def num_places(self) -> int:
        """Continuations that may run and wait."""
        return self.max_num_seqs + self.max_waiting


class Phase(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STALLED = "stalled"
    """Requests are live and no step completes; the next step ends it."""
    FAILED = "failed"
    """For good: only a restart helps."""


@dataclass(frozen=True, slots=True)
class Health:
    phase: Phase
    reason: str
    """In words, for the body of a health response."""

    @property
    def ready(self) -> bool:
        return self.phase is Phase.READY


@dataclass(frozen=True, slots=True)
class Stats:
    """Counters since start, and gauges now."""

    num_running: int = 0
    num_waiting: int = 0
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0
    """Blocks held by live sequences; blocks kept only for the prefix cache count as free."""
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    """Prompt tokens looked up."""
    prefix_cache_hits: int = 0
    """Prompt tokens found."""
    preemptions: int = 0
    steps: int = 0
    spec_drafted_tokens: int = 0
    """Tokens guessed ahead and put to the model."""
    spec_accepted_tokens: int = 0
    """Those of them that the model chose too."""
    busy_s: float = 0.0
    """Seconds in which an engine loop had work."""
    executor_s: float = 0.0
    """Seconds of forward passes that succeeded; where the device samples, of waiting for them."""


@dataclass(frozen=True, slots=True)
class PromptInfo:
    """Known once the prompt has been computed."""

    prompt_token_ids: tuple[int, ...]
    cached_tokens: int
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None
    queue_s: float = 0.0
    """Seconds from the request's arrival to the first step that computed some of it."""


class Output(msgspec.Struct, frozen=True, gc=False):
    """New text of one continuation. The text of all outputs of an index, joined, is the full text.

    A non-final text never ends inside a character. ``token_ids`` are the tokens generated since the last output; their
    text may still be held back (an unfinished character, a possible stop string).
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended the text; None for the model's EOS."""
    prompt: PromptInfo | None = None
    """On the first output of index 0."""


Express = Callable[[Output], bool]
"""Takes an output at once and returns True, or returns False and leaves it to the reader. Does not wait."""


class EngineClient(Protocol):
    """Shared by every transport of a process. All methods are called from one event loop."""

    manifest: Manifest
    limits: EffectiveLimits
    tokenizer: "Tokenizer"

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        add_special_tokens: bool = True,
        timeout_s: float | None = None,
        cache_salt: str | None = None,
        express: Express | None = None,
        streams: bool = True,
    ) -> AsyncIterator[Output]:
        """Outputs of all n continuations, interleaved, until each has a finish_reason.

        While the reader waits for the next output, one that ends no continuation may be offered to *express* first;
        what that takes does not come out of the iterator. So no task is woken for what can be written at once.
        Where the reader only wants the whole (*streams* false), outputs may come all at the end.

        Raises RequestError before the first output where the request cannot be served (the prompt does not fit, a
        value is out of range, draining, overloaded); raises RequestError with DEADLINE_EXCEEDED or EngineError where
        it ends early. Closing the iterator, or cancelling the task that awaits it, aborts the request and frees its
        blocks.
        """
        ...

    def health(self) -> Health: ...

    def watch_health(self, changed: Callable[[], None]) -> None:
        """Has *changed* called, from the event loop, whenever ``health`` may answer otherwise than before."""
        ...

    def stats(self) -> Stats: ...

    def stream_interval(self) -> int:
        """Tokens of an output at present; the first of a continuation and the last may have fewer."""
        ...

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests at once, lets running ones finish for *timeout_s*, ends the rest with SHUTTING_DOWN."""
        ...
