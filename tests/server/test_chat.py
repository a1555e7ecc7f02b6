"""Chat completions through the openai client and as raw JSON."""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

MESSAGES: Any = [{"role": "user", "content": "hi"}]
REPLY = "Paris, naïve 🙂."


def post(app: Any, **fields: Any) -> httpx.Response:
    reply: httpx.Response = app.http.post("/v1/chat/completions", json={"messages": MESSAGES, **fields})
    return reply


def chunks_of(app: Any, **fields: Any) -> list[Any]:
    """The JSON of a stream's events, after checking their framing byte for byte."""
    body = post(app, stream=True, **fields)
    assert body.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = body.text.split("\n\n")
    assert events.pop() == ""
    assert events.pop() == "data: [DONE]"
    assert all(event.startswith("data: {") and "\n" not in event for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_whole_answer(app: Any) -> None:
    """Prevents a body that clients of OpenAI cannot read."""
    body = post(app, model="tiny").json()
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert isinstance(body["created"], int)
    assert body["model"] == "tiny"
    assert body["system_fingerprint"].startswith("fp_")
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": REPLY, "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None
    prompt = len("<s>[user]hi\n[assistant]") - 2
    tokens = len(REPLY.encode()) + 1
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": tokens,
        "total_tokens": prompt + tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_stream_says_what_the_whole_answer_says(app: Any) -> None:
    """Prevents a stream and an answer that differ in text, ends, or the role that comes first."""
    whole = app.openai.chat.completions.create(model="tiny", messages=MESSAGES, n=3)
    texts, ends, ids = ["", "", ""], ["", "", ""], set()
    for chunk in app.openai.chat.completions.create(model="tiny", messages=MESSAGES, n=3, stream=True):
        (choice,) = chunk.choices
        ids.add((chunk.id, chunk.created, chunk.model, chunk.system_fingerprint))
        assert chunk.object == "chat.completion.chunk"
        if not texts[choice.index] and choice.delta.role:
            texts[choice.index] = "|"
        texts[choice.index] += choice.delta.content or ""
        ends[choice.index] = choice.finish_reason or ends[choice.index]
    assert [text.removeprefix("|") for text in texts] == [choice.message.content for choice in whole.choices]
    assert texts == [f"|{REPLY}", f"|{REPLY}1", f"|{REPLY}2"]
    assert ends == ["stop"] * 3
    assert len(ids) == 1


def test_the_async_client_streams(app: Any) -> None:
    """Prevents a stream that only one kind of client can read."""

    async def read() -> str:
        async with openai.AsyncOpenAI(base_url=f"{app.url}/v1", api_key="-", max_retries=0) as client:
            stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(read()) == REPLY


def test_first_chunk_has_the_role_and_the_last_the_end(app: Any) -> None:
    """Prevents clients from missing who speaks, or that the speech is over."""
    first, *middle, last = chunks_of(app)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in middle)
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in middle)
    assert all(chunk["choices"][0]["delta"]["content"] for chunk in middle)
    assert last["choices"][0]["finish_reason"] == "stop"


def test_usage_comes_when_asked_for(app: Any) -> None:
    """C37: prevents usage nobody asked for, and usage in a chunk that has choices."""
    for options in (None, {}, {"include_usage": False}):
        assert not any("usage" in chunk for chunk in chunks_of(app, stream_options=options))
    *chunks, last = chunks_of(app, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == post(app).json()["usage"]


def test_no_delta_ends_inside_a_character(app: Any) -> None:
    """C21: prevents U+FFFD in a stream whose text has none."""
    assert not any("\ufffd" in json.dumps(chunk, ensure_ascii=False) for chunk in chunks_of(app))
    cut = post(app, max_tokens=len("Paris, naïve ".encode()) + 2).json()["choices"][0]
    assert cut["message"]["content"] == "Paris, naïve \ufffd"
    assert cut["finish_reason"] == "length"


def test_stop_strings_end_the_text(app: Any) -> None:
    """Prevents a finish_reason without the reason, and text of the stop string in a stream."""
    choice = post(app, stop=[", n", "zzz"]).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("Paris", "stop", ", n")
    deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks_of(app, stop=[", n", "zzz"])]
    assert "".join(deltas) == "Paris"


def test_logprobs_without_top_logprobs(app: Any) -> None:
    """C38: prevents a missing list where an empty one is meant, and bytes that do not join to the text."""
    choice = post(app, logprobs=True).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in content)
    joined = b"".join(bytes(entry["bytes"] or ()) for entry in content)
    assert joined.decode() == choice["message"]["content"] == REPLY


@pytest.mark.parametrize("stop", [None, [", n"], ["ïv"], ["🙂"]])
def test_streamed_logprobs_are_those_of_the_answer(app: Any, stop: Any) -> None:
    """C38: prevents entries of text that a stop string took back, and duplicates or losses between chunks."""
    fields = {"logprobs": True, "top_logprobs": 3, "stop": stop}
    whole = post(app, **fields).json()["choices"][0]
    streamed: list[Any] = []
    for chunk in chunks_of(app, **fields):
        logprobs = chunk["choices"][0]["logprobs"]
        streamed += logprobs["content"] if logprobs else []
    assert streamed == whole["logprobs"]["content"]
    joined = b"".join(bytes(entry["bytes"] or ()) for entry in streamed)
    assert joined.decode() == whole["message"]["content"]
    assert all(len(entry["top_logprobs"]) == 3 for entry in streamed)


def test_json_has_finite_numbers_only(app: Any) -> None:
    """C38: prevents NaN and Infinity, which no JSON parser must take, and null for a number."""

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    text = post(app, logprobs=True, top_logprobs=3).text
    content = json.loads(text, parse_constant=refuse)["choices"][0]["logprobs"]["content"]
    assert content[0]["top_logprobs"][2]["logprob"] == -9999.0


def test_refusals_reach_the_openai_client(app: Any) -> None:
    """C33, C34, C38: prevents errors that the client cannot tell apart. The next request must work."""
    for fields, param in (
        ({"messages": []}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"n": 0}, "n"),
        ({"logit_bias": {"259": 1}}, "logit_bias[259]"),
        ({"logit_bias": {"-1": 1}}, "logit_bias[-1]"),
        ({"logit_bias": {"abc": 1}}, "logit_bias[abc]"),
        ({"tools": [{"type": "function"}]}, "tools"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            app.openai.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, **fields})
        assert refused.value.param == param
        assert refused.value.type == "invalid_request_error"
    assert post(app).status_code == 200


def test_another_model_is_not_found(app: Any) -> None:
    """Prevents answering in the name of a model that is not served."""
    with pytest.raises(openai.NotFoundError) as refused:
        app.openai.chat.completions.create(model="gpt-4", messages=MESSAGES)
    assert refused.value.code == "model_not_found"
    assert post(app).status_code == 200, "no name means whatever is served"


def test_too_long_a_prompt_has_its_own_code(app: Any) -> None:
    """Prevents clients that shorten their prompt on this code from not seeing it, streaming or not."""
    for stream in (False, True):
        reply = post(app, messages=[{"role": "user", "content": "x" * 5000}], stream=stream)
        assert reply.status_code == 400
        assert reply.json()["error"]["code"] == "context_length_exceeded"


def test_no_template_is_the_clients_error(app: Any) -> None:
    """C44: prevents a 500 where a template is missing or raises; completions go on working."""
    refused = post(app, messages=[{"role": "user", "content": "raise"}])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
    app.engine.tokenizer.has_chat_template = False
    refused = post(app)
    assert refused.status_code == 400
    assert "/v1/completions" in refused.json()["error"]["message"]
    assert app.http.post("/v1/completions", json={"prompt": "a"}).status_code == 200


def test_a_template_prints_its_own_bos(app: Any) -> None:
    """C43: prevents two BOS tokens, one of the template and one of the tokenizer."""
    post(app)
    assert app.engine.requests[-1]["ids"].count(256) == 1
    post(app, add_special_tokens=True)
    assert app.engine.requests[-1]["ids"].count(256) == 2


def test_cache_salt_reaches_the_engine(app: Any) -> None:
    """Prevents sharing prefixes between those who asked not to."""
    post(app, cache_salt="alice")
    assert app.engine.requests[-1]["cache_salt"] == "alice"


def test_an_unknown_role_is_refused_with_those_there_are(app: Any) -> None:
    """Prevents a client from having to guess what the value may be."""
    reply = post(app, messages=[{"role": "robot", "content": "hi"}])
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "messages[0].role")
    assert error["message"] == "messages[0].role is 'robot', and must be one of system, developer, user, assistant"


def test_a_large_conversation_is_rendered_beside_the_streams(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents one large body from holding up every stream, and the probes of its health. Small ones need no thread."""
    real = app.engine.tokenizer.render_chat
    began, go_on, threads = threading.Event(), threading.Event(), []

    def render(messages: Any) -> str:
        threads.append(threading.current_thread())
        began.set()
        assert go_on.wait(10), "nothing was answered meanwhile"
        return str(real(messages))

    monkeypatch.setattr(app.engine.tokenizer, "render_chat", render)
    with ThreadPoolExecutor(1) as pool:
        large = pool.submit(post, app, messages=[{"role": "user", "content": "hi"}] * 3000)
        assert began.wait(60)
        assert app.http.get("/health/live").status_code == 200
        go_on.set()
        assert large.result().status_code == 400, "the engine refuses it: a byte is a token"
    assert post(app).status_code == 200
    assert len({*threads}) == 2
