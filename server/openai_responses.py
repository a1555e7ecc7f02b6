"""Bodies of the OpenAI-compatible answers, whole and in chunks. Encoding them is castline's only per-token JSON."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import UNSET, UnsetType

from castline.runtime.client import Output, PromptInfo


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    """None for a special token, which is no part of the text."""
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """Where each token starts in the choice's text, in characters."""


class Message(msgspec.Struct):
    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None


class Delta(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | UnsetType | None = UNSET


class Answer(msgspec.Struct):
    """Every answer and every chunk of both endpoints; ``object`` says which."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: Sequence[ChatChoice | CompletionChoice | ChunkChoice]
    usage: Usage | UnsetType | None = UNSET


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What the answer and all chunks of one request have in common."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str

    def answer(
        self,
        choices: Sequence[ChatChoice | CompletionChoice | ChunkChoice],
        usage: Usage | UnsetType | None = UNSET,
    ) -> Answer:
        return Answer(self.id, self.object, self.created, self.model, self.system_fingerprint, choices, usage)


class ChunkEncoder:
    """Server-sent events of one choice each: what is the same in all of a request's is encoded once."""

    def __init__(self, head: AnswerHead, usage: UnsetType | None) -> None:
        empty = sse(head.answer((), usage))
        cut = empty.rindex(b"]")  # only the usage, which is null or left out, comes after the choices
        self._before, self._after = empty[:cut], empty[cut:]

    def event(self, choice: CompletionChoice | ChunkChoice) -> bytes:
        return self._before + _encoder.encode(choice) + self._after


class UsageCounter:
    """Adds up the tokens of all of a request's prompts and continuations."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0

    def add(self, output: Output) -> None:
        if output.prompt is not None:
            self._add_prompt(output.prompt)
        self.completion_tokens += len(output.token_ids)

    def _add_prompt(self, prompt: PromptInfo) -> None:
        self.prompt_tokens += len(prompt.prompt_token_ids)
        self.cached_tokens += prompt.cached_tokens

    def usage(self) -> Usage:
        total = self.prompt_tokens + self.completion_tokens
        return Usage(self.prompt_tokens, self.completion_tokens, total, PromptTokensDetails(self.cached_tokens))


_encoder = msgspec.json.Encoder()

DONE = b"data: [DONE]\n\n"


def encode_answer(head: AnswerHead, choices: Iterable[ChatChoice | CompletionChoice], usage: Usage) -> bytes:
    """One whole answer, a choice at a time: between two, other threads have their turn."""
    empty = _encoder.encode(head.answer((), usage))
    cut = empty.rindex(b"]")  # only the usage comes after the choices
    encoded = [_encoder.encode(choice) for choice in choices]
    return b"".join([empty[:cut], b",".join(encoded), empty[cut:]])


def sse(body: msgspec.Struct) -> bytes:
    """One server-sent event."""
    return b"data: " + _encoder.encode(body) + b"\n\n"
