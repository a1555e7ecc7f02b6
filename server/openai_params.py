"""From the fields of an OpenAI request to what the engine takes. The engine checks ranges, this checks shapes."""

import re
from typing import Any

from msgspec import UNSET

from castline.engines.errors import ErrorCode, RequestError
from castline.runtime.chat_template import template_role
from castline.runtime.sampling_params import SamplingParams
from castline.server.errors import too_many_ids
from castline.server.openai_requests import ChatMessage, ChatRequest, CompletionRequest, ContentPart

MAX_TOP_LOGPROBS = 20
"""Most alternatives a request may ask for at each token."""

MAX_ECHOED_LOGPROBS = 2_000_000
"""Most log-probabilities of prompts, over all continuations that repeat them: about 55 MB of JSON."""

Prompt = str | list[int]

_SAME_NAME = (
    "n",
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
)
_INTEGER = re.compile(r"-?[0-9]{1,18}")


def completion_params(request: CompletionRequest) -> SamplingParams:
    """Raises RequestError for logprobs out of range, and for best_of other than n."""
    if request.best_of is not None and request.best_of != (1 if request.n is None else request.n):
        raise RequestError(
            "best_of: choosing the best of several is not supported; leave it out, or equal to n",
            field="best_of",
            code=ErrorCode.UNSUPPORTED,
        )
    _check_logprobs(request.logprobs, "logprobs")
    prompt_logprobs = request.logprobs if request.echo else None
    return _params(request, request.max_tokens, request.logprobs, prompt_logprobs)


def chat_params(request: ChatRequest) -> SamplingParams:
    """Raises RequestError for a limit of 0 tokens, two different limits, or top_logprobs without logprobs."""
    max_tokens = request.max_completion_tokens
    if max_tokens is None:
        max_tokens = request.max_tokens
    elif request.max_tokens not in (None, max_tokens):
        raise RequestError(
            f"max_tokens ({request.max_tokens}) and max_completion_tokens ({max_tokens}) differ; send one",
            field="max_tokens",
        )
    if max_tokens == 0:
        field = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        raise RequestError(f"{field} is 0, and must be at least 1: a chat answer has a token", field=field)
    _check_logprobs(request.top_logprobs, "top_logprobs")
    if request.top_logprobs and not request.logprobs:
        raise RequestError("top_logprobs is allowed only with logprobs: true", field="top_logprobs")
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return _params(request, max_tokens, logprobs, None)


def _params(
    request: CompletionRequest | ChatRequest,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    given: dict[str, Any] = {name: value for name in _SAME_NAME if (value := getattr(request, name)) is not None}
    if request.logit_bias:
        given["logit_bias"] = {_token_id(key): value for key, value in request.logit_bias.items()}
    if request.stop is not None:
        given["stop"] = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
    if request.stop_token_ids is not None:
        given["stop_token_ids"] = tuple(request.stop_token_ids)
    return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs, **given)


def _token_id(key: str) -> int:
    if not _INTEGER.fullmatch(key):
        field = f"logit_bias[{key}]"
        raise RequestError(f"{field}: the key is not a token id", field=field)
    return int(key)


def _check_logprobs(value: int | None, field: str) -> None:
    if value is not None and not 0 <= value <= MAX_TOP_LOGPROBS:
        raise RequestError(f"{field} is {value}, and must be between 0 and {MAX_TOP_LOGPROBS}", field=field)


def check_echo(num_logprobs: int) -> None:
    """Raises RequestError where choices that each repeat a prompt's log-probabilities repeat too many."""
    if num_logprobs > MAX_ECHOED_LOGPROBS:
        raise RequestError(
            f"echo with logprobs gives more than {MAX_ECHOED_LOGPROBS} log-probabilities of prompts over all choices: "
            "ask for fewer prompts, choices or logprobs, or for one choice with echo and for the others without",
            field="echo",
        )


def prompts_of(prompt: str | list[Any], *, max_prompts: int, max_tokens: int) -> list[Prompt]:
    """The prompts of a completions request: a string, several, token ids, or several lists of them.

    Raises RequestError for what is none of these, and for more than *max_tokens* ids before it looks at them.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt is an empty list; send at least one prompt", field="prompt")
    if type(prompt[0]) is int:
        return [_token_ids(prompt, "prompt", max_tokens)]
    if len(prompt) > max_prompts:
        raise RequestError(f"prompt has {len(prompt)} prompts, and the limit is {max_prompts}", field="prompt")
    if isinstance(prompt[0], str):
        for i, one in enumerate(prompt):
            if not isinstance(one, str):
                raise RequestError(f"prompt[{i}]: the first prompt is a string, this one is not", field=f"prompt[{i}]")
        return list(prompt)
    return [_token_ids(one, f"prompt[{i}]", max_tokens) for i, one in enumerate(prompt)]


def _token_ids(ids: Any, field: str, max_tokens: int) -> list[int]:
    if not isinstance(ids, list):
        raise RequestError(f"{field}: expected a string or a list of token ids", field=field)
    if not ids:
        raise RequestError(f"{field} is an empty list of token ids", field=field)
    if len(ids) > max_tokens:
        raise too_many_ids(len(ids), max_tokens, field)
    if set(map(type, ids)) != {int}:
        i, token_id = next((i, token_id) for i, token_id in enumerate(ids) if type(token_id) is not int)
        raise RequestError(f"{field}[{i}]: {token_id!r} is not a token id", field=f"{field}[{i}]")
    return ids


def messages_of(messages: list[ChatMessage]) -> list[dict[str, str]]:
    """Messages as chat templates take them: role and content, both strings."""
    if not messages:
        raise RequestError("messages is empty; send at least one message", field="messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: ChatMessage, field: str) -> dict[str, str]:
    if message.role in ("tool", "function"):
        raise _unsupported(f"{field}.role", "tool calling is not supported")
    role = template_role(message.role, f"{field}.role")
    for name in ("tool_calls", "function_call", "tool_call_id"):
        if getattr(message, name) not in (None, []):
            raise _unsupported(f"{field}.{name}", "tool calling is not supported")
    for name in ("refusal", "audio", "annotations"):
        if getattr(message, name) not in (None, []):
            raise _unsupported(f"{field}.{name}", "chat templates have no place for it")
    if message.content is None and message.role != "assistant":
        raise RequestError(f"{field}.content is null", field=f"{field}.content")
    rendered = {"role": role, "content": _content(message.content, f"{field}.content")}
    if message.name is not None:
        rendered["name"] = message.name
    return rendered


def _content(content: str | list[ContentPart] | None, field: str) -> str:
    """Text parts are joined by newlines."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for i, part in enumerate(content):
        if part.type != "text":
            raise _unsupported(f"{field}[{i}].type", f"{part.type!r} content is not supported; only 'text' is")
        if part.text is UNSET:
            raise RequestError(f"{field}[{i}].text is missing", field=f"{field}[{i}].text")
        texts.append(part.text)
    return "\n".join(texts)


def _unsupported(field: str, reason: str) -> RequestError:
    return RequestError(f"{field}: {reason}", field=field, code=ErrorCode.UNSUPPORTED)
