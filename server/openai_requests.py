"""Bodies of the OpenAI-compatible requests, and what of them cannot be honoured.

A field is honoured, or refused by name with the reason, or one of ``user``, ``metadata`` and ``safety_identifier``:
notes of the caller's, which change no answer. Nothing else is accepted: an unknown field is an error.
"""

import threading
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from castline.engines.errors import ErrorCode, RequestError
from castline.server.errors import too_many_messages

_NO_TOOLS = "tool calling is not supported"
_TEXT_ONLY = "this server produces text only"

UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "tools": (([],), _NO_TOOLS),
    "tool_choice": (("none", "auto"), _NO_TOOLS),
    "parallel_tool_calls": ((True, False), _NO_TOOLS),
    "functions": (([],), _NO_TOOLS),
    "function_call": (("none", "auto"), _NO_TOOLS),
    "response_format": (({"type": "text"},), "structured output is not supported; only {'type': 'text'} is"),
    "audio": ((), _TEXT_ONLY),
    "modalities": ((["text"],), _TEXT_ONLY),
    "prediction": ((), "predicted outputs are not supported"),
    "reasoning_effort": ((), "reasoning effort cannot be set; the chat template decides"),
    "verbosity": ((), "verbosity cannot be set"),
    "web_search_options": ((), "web search is not supported"),
    "store": ((False,), "responses are not stored"),
    "service_tier": (("auto", "default"), "there is one service tier"),
    "suffix": (("",), "insertion before a suffix is not supported"),
}
"""Known fields that cannot be honoured: the values beside null that ask for nothing, and why others are refused."""


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _Common(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What both endpoints take. None is the same as an absent field."""

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    """Values are checked with the others, where a wrong one's key is known."""
    seed: int | None = None
    stop: str | list[str] | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None

    user: Any = None
    metadata: Any = None
    safety_identifier: Any = None
    store: Any = None
    service_tier: Any = None


class CompletionRequest(_Common, kw_only=True):
    """Body of ``POST /v1/completions``."""

    prompt: str | list[Any]
    """A string, a list of strings, a list of token ids, or a list of lists of token ids; see ``prompts_of``."""
    max_tokens: int | None = 16
    """OpenAI's default. null: up to the model's length."""
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: Any = None


class ContentPart(msgspec.Struct):
    """One part of a message's content. Only text is understood; other fields are looked at to say so by name."""

    type: str
    text: str | UnsetType = UNSET

    def __post_init__(self) -> None:
        """Nothing; but in Python, where other threads get their turn while a million parts are decoded."""


class _Room(threading.local):
    """For messages of the conversation that this thread decodes."""

    size = left = 0

    def take(self) -> None:
        if self.left == 0:
            raise too_many_messages(self.size)
        self.left -= 1


_room = _Room()


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    """Made by ``decode_chat``, which has room for so many."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: Any = None
    function_call: Any = None
    tool_call_id: Any = None
    audio: Any = None
    annotations: Any = None

    def __post_init__(self) -> None:
        _room.take()


class ChatRequest(_Common, kw_only=True):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[ChatMessage]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    audio: Any = None
    modalities: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None


T = TypeVar("T")

_completion_decoder = msgspec.json.Decoder(CompletionRequest)
_chat_decoder = msgspec.json.Decoder(ChatRequest)


def decode_completion(body: bytes) -> CompletionRequest:
    """Raises RequestError naming the field that is wrong, unknown, or cannot be honoured."""
    request = _decode(_completion_decoder, body)
    refuse_unsupported(request)
    return request


def decode_chat(body: bytes, max_messages: int) -> ChatRequest:
    """Raises RequestError naming the field that is wrong, unknown, or cannot be honoured; and at once where there are
    more than *max_messages*, which take memory and time.
    """
    _room.size = _room.left = max_messages
    request = _decode(_chat_decoder, body)
    refuse_unsupported(request)
    return request


def _decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        field = path.rstrip("`").removeprefix(".") or None
        if message.startswith(("Object contains unknown field", "Object missing required field")):
            name = message.split("`")[1]
            field = f"{field}.{name}" if field else name
        raise RequestError(f"{field}: {message}" if field else message, field=field) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None


def refuse_unsupported(request: _Common) -> None:
    """Raises RequestError with UNSUPPORTED for the first field of UNSUPPORTED that asks for something."""
    for name, (neutral, reason) in UNSUPPORTED.items():
        value = getattr(request, name, None)
        if value is not None and not any(value == ok and type(value) is type(ok) for ok in neutral):
            raise RequestError(f"{name}: {reason}", field=name, code=ErrorCode.UNSUPPORTED)
    options = request.stream_options
    if options is not None and not request.stream:
        raise RequestError("stream_options is allowed only with stream: true", field="stream_options")
    if options is not None and options.include_obfuscation:
        raise RequestError(
            "stream_options.include_obfuscation: obfuscation is not supported",
            field="stream_options.include_obfuscation",
            code=ErrorCode.UNSUPPORTED,
        )
