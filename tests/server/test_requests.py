"""Bodies in: what is taken, what is refused, and by which name."""

import json
from typing import Any

import pytest

from castline.engines.errors import ErrorCode, RequestError
from castline.runtime.client import EffectiveLimits
from castline.runtime.validation import validate_params
from castline.server.openai_params import chat_params, completion_params, messages_of, prompts_of
from castline.server.openai_requests import UNSUPPORTED, ChatRequest, CompletionRequest, decode_chat, decode_completion

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> ChatRequest:
    return decode_chat(json.dumps({"messages": MESSAGES, **fields}).encode(), max_messages=8)


def completion(**fields: Any) -> CompletionRequest:
    return decode_completion(json.dumps({"prompt": "hi", **fields}).encode())


ASKS_FOR_SOMETHING = {
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "required",
    "parallel_tool_calls": "yes",
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "response_format": {"type": "json_object"},
    "audio": {"voice": "x"},
    "modalities": ["text", "audio"],
    "prediction": {"type": "content"},
    "reasoning_effort": "high",
    "verbosity": "low",
    "web_search_options": {},
    "store": True,
    "service_tier": "priority",
    "suffix": "end",
}


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_a_field_that_cannot_be_honoured_is_refused_by_name(name: str) -> None:
    """Prevents a field that is accepted and ignored."""
    decode = completion if name == "suffix" else chat
    with pytest.raises(RequestError) as refused:
        decode(**{name: ASKS_FOR_SOMETHING[name]})
    assert refused.value.field == name
    assert refused.value.code is ErrorCode.UNSUPPORTED


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_its_neutral_values_are_taken(name: str) -> None:
    """Prevents refusing clients that always send a field, with the value that asks for nothing."""
    decode = completion if name == "suffix" else chat
    for value in (None, *UNSUPPORTED[name][0]):
        decode(**{name: value})


def test_notes_of_the_caller_are_taken() -> None:
    """Prevents refusing fields that change no answer."""
    chat(user="me", metadata={"a": "b"}, safety_identifier="x", store=False)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"messages": [], "foo": 1}', "foo"),
        (b'{"messages": [{"role": "user", "content": "x", "foo": 1}]}', "messages[0].foo"),
        (b'{"messages": [], "max_tokens": "many"}', "max_tokens"),
        (b'{"messages": [], "n": true}', "n"),
        (b'{"messages": [], "temperature": 1e999}', "temperature"),
        (b'{"messages": [{"role": "user", "content": 5}]}', "messages[0].content"),
        (b'{"messages": [], "stream": true, "stream_options": {"foo": 1}}', "stream_options.foo"),
        (b"{}", "messages"),
        (b"[]", None),
        (b"", None),
        (b'{"messages": [], "temperature": NaN}', None),
        (b'{"messages": [], "user": "\xff"}', None),
        (b'{"messages": [], "user": ' + b"[" * 100_000, None),
    ],
)
def test_a_malformed_body_is_the_clients_error(body: bytes, field: str | None) -> None:
    """Prevents a 500, or a message that does not say which field is wrong."""
    with pytest.raises(RequestError) as refused:
        decode_chat(body, max_messages=8)
    assert refused.value.field == field
    assert refused.value.code is ErrorCode.INVALID_VALUE


def test_stream_options_need_a_stream() -> None:
    """Prevents an option that is accepted and ignored."""
    with pytest.raises(RequestError, match="stream_options"):
        chat(stream_options={"include_usage": True})


def test_every_sampling_field_reaches_the_engine() -> None:
    """Prevents a field that is decoded and then forgotten."""
    fields: dict[str, Any] = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "seed": 7,
        "top_k": 5,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "min_tokens": 3,
        "ignore_eos": True,
    }
    more = {"stop": ["a", "b"], "stop_token_ids": [1, 2], "logit_bias": {"5": -100}, "max_tokens": 9}
    for params in (chat_params(chat(**fields, **more)), completion_params(completion(**fields, **more))):
        assert {name: getattr(params, name) for name in fields} == fields
        assert params.stop == ("a", "b")
        assert params.stop_token_ids == (1, 2)
        assert params.logit_bias == {5: -100.0}
        assert params.max_tokens == 9


def test_defaults_are_openais() -> None:
    """Prevents a completion that runs to the end of the context because its client relied on the default of 16."""
    assert completion_params(completion()).max_tokens == 16
    assert completion_params(completion(max_tokens=None)).max_tokens is None
    params = chat_params(chat())
    assert (params.max_tokens, params.n, params.temperature, params.top_p) == (None, 1, 1.0, 1.0)


def test_a_stop_string_alone_is_a_list_of_one() -> None:
    """Prevents taking a string apart into one-character stops."""
    assert chat_params(chat(stop="END")).stop == ("END",)


def test_a_logit_bias_value_of_a_wrong_type_is_left_to_who_names_its_key() -> None:
    """C30: prevents a refusal that names no key, as the JSON decoder's own does."""
    request = decode_chat(b'{"messages": [{"role": "user", "content": "hi"}], "logit_bias": {"7": 1, "5": "x"}}', 8)
    limits = EffectiveLimits(64, 4, 32, 16, 8, 2.0)
    with pytest.raises(RequestError) as refused:
        validate_params(chat_params(request), 100, limits, 10)
    assert refused.value.field == "logit_bias[5]"


@pytest.mark.parametrize("key", ["abc", "1.5", "", " 5", "１", "9" * 30])
def test_a_logit_bias_key_that_is_no_number_is_named(key: str) -> None:
    """C30: prevents int() from taking what only looks like a number, and an error without the key."""
    with pytest.raises(RequestError) as refused:
        chat_params(chat(logit_bias={key: 1}))
    assert refused.value.field == f"logit_bias[{key}]"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 5, "max_tokens": 6}, "max_tokens"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
    ],
)
def test_chat_limits(fields: dict[str, Any], field: str) -> None:
    """C34, C38: prevents a value that the engine would take for something else."""
    with pytest.raises(RequestError) as refused:
        chat_params(chat(**fields))
    assert refused.value.field == field


def test_best_of_is_n_or_nothing() -> None:
    """Prevents best_of that is accepted and ignored."""
    completion_params(completion(n=2, best_of=2))
    completion_params(completion(best_of=1))
    with pytest.raises(RequestError, match="best_of"):
        completion_params(completion(n=2, best_of=3))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        ("", [""]),
        ([""], [""]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_prompt_forms(prompt: Any, expected: Any) -> None:
    """Prevents mixing up a list of ids with a list of prompts."""
    assert prompts_of(prompt, max_prompts=8, max_tokens=20) == expected


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ([], "prompt"),
        ([[]], "prompt[0]"),
        ([[1], []], "prompt[1]"),
        (["a", 1], "prompt[1]"),
        ([1, "a"], "prompt[1]"),
        ([1, True], "prompt[1]"),
        ([1.5], "prompt[0]"),
        ([None], "prompt[0]"),
        ([[1], "a"], "prompt[1]"),
        ([[1, None]], "prompt[0][1]"),
        (["a"] * 9, "prompt"),
    ],
)
def test_prompts_that_are_none(prompt: Any, field: str) -> None:
    """C33: prevents a list of nothing, or of mixed things, from reaching the engine."""
    with pytest.raises(RequestError) as refused:
        prompts_of(prompt, max_prompts=8, max_tokens=20)
    assert refused.value.field == field


@pytest.mark.parametrize(("prompt", "field"), [([1] * 21, "prompt"), ([[1], [1] * 20 + ["a"]], "prompt[1]")])
def test_token_ids_that_cannot_fit_are_not_looked_at(prompt: Any, field: str) -> None:
    """Prevents millions of ids from being checked one by one before they are refused."""
    with pytest.raises(RequestError) as refused:
        prompts_of(prompt, max_prompts=8, max_tokens=20)
    assert (refused.value.field, refused.value.code) == (field, ErrorCode.CONTEXT_LENGTH_EXCEEDED)


def test_messages_that_cannot_fit_are_not_even_read() -> None:
    """Prevents a body of a million messages from taking gigabytes and seconds before it is refused."""
    eight = b'{"messages": [' + b",".join([json.dumps(MESSAGES[0]).encode()] * 8)
    for _ in range(2):  # one conversation takes no room from the next
        assert len(decode_chat(eight + b"]}", max_messages=8).messages) == 8
        with pytest.raises(RequestError) as refused:
            decode_chat(eight + b', {"role": "user"}, and what follows is no JSON', max_messages=8)
        assert (refused.value.field, refused.value.code) == ("messages", ErrorCode.CONTEXT_LENGTH_EXCEEDED)


def messages(*raw: dict[str, Any]) -> list[dict[str, str]]:
    return messages_of(decode_chat(json.dumps({"messages": raw}).encode(), 8).messages)


def test_messages_are_plain_strings() -> None:
    """Prevents templates from seeing parts or roles that they do not know."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert messages(
        {"role": "developer", "content": "d"},
        {"role": "user", "content": parts, "name": "ann"},
        {"role": "assistant", "content": None},
    ) == [
        {"role": "system", "content": "d"},
        {"role": "user", "content": "a\nb", "name": "ann"},
        {"role": "assistant", "content": ""},
    ]


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "tool", "content": "x", "tool_call_id": "1"}, "messages[0].role"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "assistant", "content": "x", "audio": {"id": "1"}}, "messages[0].audio"),
    ],
)
def test_messages_that_cannot_be_rendered(message: dict[str, Any], field: str) -> None:
    """Prevents an image, a tool call or a missing text from being dropped in silence."""
    with pytest.raises(RequestError) as refused:
        messages(message)
    assert refused.value.field == field
