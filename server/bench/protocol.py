"""The OpenAI bodies a benchmark sends and reads. Only the fields that it needs are decoded."""

from dataclasses import dataclass
from typing import Any

import msgspec

from castline.server.bench.settings import Endpoint

PATHS: dict[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One request to send: a prompt (text, or token ids) or a conversation, and how many tokens to ask for."""

    max_tokens: int
    prompt: str | tuple[int, ...] = ""
    messages: tuple[dict[str, Any], ...] = ()
    """Of a conversation; empty where ``prompt`` is meant."""


@dataclass(frozen=True, slots=True)
class BodyOptions:
    """What every request of a run carries, once the server has shown what it takes."""

    model: str
    endpoint: Endpoint
    temperature: float = 0.0
    top_p: float = 1.0
    ignore_eos: bool = True
    include_usage: bool = True


def encode_body(spec: RequestSpec, options: BodyOptions) -> bytes:
    """The JSON body of one streaming request. A prompt sent to the chat endpoint is one user message."""
    body: dict[str, Any] = {"model": options.model}
    if options.endpoint == "chat":
        body["messages"] = spec.messages or [{"role": "user", "content": spec.prompt}]
    else:
        body["prompt"] = spec.prompt
    body |= {"max_tokens": spec.max_tokens, "temperature": options.temperature, "stream": True}
    if options.top_p != 1:
        body["top_p"] = options.top_p
    if options.ignore_eos:
        body["ignore_eos"] = True
    if options.include_usage:
        body["stream_options"] = {"include_usage": True}
    return msgspec.json.encode(body)


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None


class Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Choice(msgspec.Struct):
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def has_text(self) -> bool:
        delta = self.delta
        return bool(self.text or (delta and (delta.content or delta.reasoning_content or delta.reasoning)))


class Chunk(msgspec.Struct):
    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None
    object: str | None = None

    @property
    def is_error(self) -> bool:
        """An error in the place of a chunk: OpenAI's shape, or the bare one of some servers."""
        return self.error is not None or self.object == "error"


class ModelCard(msgspec.Struct):
    id: str


class ModelList(msgspec.Struct):
    data: list[ModelCard]


def error_text(body: bytes, limit: int = 300) -> str:
    """What an error body says, in one line: its message where it is JSON that has one, else the body."""
    try:
        return error_message(msgspec.json.decode(body))[:limit]
    except msgspec.DecodeError:
        return " ".join(body.decode("utf-8", "replace").split())[:limit] or "no explanation"


def error_message(decoded: Any) -> str:
    """The message inside a decoded error: OpenAI's, FastAPI's ``detail``, or a bare string."""
    while isinstance(decoded, dict):
        inner = next((decoded[key] for key in ("error", "message", "detail") if decoded.get(key)), None)
        if inner is None:
            break
        decoded = inner
    text = decoded if isinstance(decoded, str) else msgspec.json.encode(decoded).decode()
    return " ".join(text.split())
