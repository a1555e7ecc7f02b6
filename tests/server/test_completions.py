"""Text completions: prompts in all forms, echo, log-probabilities, several prompts at once."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import pytest
from msgspec import UNSET

from castline.server import openai_params
from castline.server.openai_responses import (
    AnswerHead,
    ChunkChoice,
    ChunkEncoder,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
    PromptTokensDetails,
    Usage,
    encode_answer,
    sse,
)

REPLY = "Paris, naïve 🙂."


def post(app: Any, **fields: Any) -> httpx.Response:
    reply: httpx.Response = app.http.post("/v1/completions", json={"prompt": "ab", "max_tokens": None, **fields})
    return reply


def streamed(app: Any, **fields: Any) -> dict[int, dict[str, Any]]:
    """Chunks of each choice put together as one choice."""
    choices: dict[int, dict[str, Any]] = {}
    lines = post(app, stream=True, **fields).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    for line in lines[:-2]:
        for part in json.loads(line.removeprefix("data: "))["choices"]:
            whole = choices.setdefault(part["index"], {"text": "", "tokens": [], "offsets": [], "end": None})
            whole["text"] += part["text"]
            whole["end"] = part["finish_reason"] or whole["end"]
            if part["logprobs"]:
                whole["tokens"] += part["logprobs"]["tokens"]
                whole["offsets"] += part["logprobs"]["text_offset"]
    return choices


def test_whole_answer(app: Any) -> None:
    """Prevents a body that clients of OpenAI cannot read."""
    answer = app.openai.completions.create(model="tiny", prompt="ab", max_tokens=5)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].text == "Paris"
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 5, 8)


def test_default_is_16_tokens(app: Any) -> None:
    """Prevents an endless text for a client that relies on OpenAI's default."""
    body = app.http.post("/v1/completions", json={"prompt": "ab"}).json()
    assert body["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_and_continuations(app: Any, stream: bool) -> None:
    """Prevents choices that are lost or numbered by arrival: choice p * n + i is continuation i of prompt p."""
    prompts = ["a", "bb", "ccc"]
    expected = {p * 2 + i: prompts[p] + REPLY + ("1" if i else "") for p in range(3) for i in range(2)}
    if stream:
        texts = {i: choice["text"] for i, choice in streamed(app, prompt=prompts, n=2, echo=True).items()}
    else:
        body = post(app, prompt=prompts, n=2, echo=True).json()
        texts = {choice["index"]: choice["text"] for choice in body["choices"]}
        assert [choice["index"] for choice in body["choices"]] == list(range(6))
        assert body["usage"]["prompt_tokens"] == 2 + 3 + 4
    assert texts == expected


def test_token_ids_are_prompts(app: Any) -> None:
    """Prevents a tokenizer's special tokens from being added to ids, and ids from being read as several prompts."""
    post(app, prompt=[97, 98])
    assert app.engine.requests[-1]["ids"] == [97, 98]
    body = post(app, prompt=[[97], [98]], echo=True).json()
    assert [choice["text"] for choice in body["choices"]] == ["a" + REPLY, "b" + REPLY]


def test_empty_prompts(app: Any) -> None:
    """C33: prevents a crash on nothing. A tokenizer that adds BOS makes one token of it, another nothing."""
    for prompt in ("", [""]):
        assert post(app, prompt=prompt).json()["usage"]["prompt_tokens"] == 1
    for prompt in ([], [[]]):
        assert post(app, prompt=prompt).status_code == 400
    app.engine.tokenizer.adds_bos = False
    for prompt in ("", [""]):
        assert post(app, prompt=prompt).status_code == 400
    assert post(app).status_code == 200


def test_add_special_tokens(app: Any) -> None:
    """Prevents an option that is accepted and ignored."""
    post(app, add_special_tokens=False)
    assert app.engine.requests[-1]["ids"] == [97, 98]
    post(app)
    assert app.engine.requests[-1]["ids"] == [256, 97, 98]


def test_no_tokens_with_echo_is_the_prompt_only(app: Any) -> None:
    """C34: prevents a generated token where only the prompt's log-probabilities are wanted."""
    body = post(app, max_tokens=0, echo=True, logprobs=1).json()
    (choice,) = body["choices"]
    assert choice["text"] == "ab"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["<s>", "a", "b"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert body["usage"]["completion_tokens"] == 0


def test_logprobs_zero_has_the_sampled_token(app: Any) -> None:
    """C38: prevents 0 from meaning none; the sampled token is reported."""
    logprobs = post(app, logprobs=0, max_tokens=2).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["P", "a"]
    assert logprobs["top_logprobs"] == [{"P": -0.5}, {"a": -0.5}]
    assert post(app, max_tokens=2).json()["choices"][0]["logprobs"] is None
    assert post(app, logprobs=21).status_code == 400


def test_offsets_point_into_the_text(app: Any) -> None:
    """Prevents offsets that are off after an echoed prompt or a long character, streaming or not."""
    choice = post(app, echo=True, logprobs=0).json()["choices"][0]
    pairs = list(zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True))
    assert all(choice["text"].startswith(t, o) for t, o in pairs if not t.startswith(("bytes:", "<s>")))
    parts = streamed(app, echo=True, logprobs=0)[0]
    assert parts == {
        "text": choice["text"],
        "tokens": choice["logprobs"]["tokens"],
        "offsets": choice["logprobs"]["text_offset"],
        "end": "stop",
    }


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_made_an_echo_once_and_beside_the_streams(
    app: Any, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Prevents n choices from costing the event loop n times the work of a prompt's log-probabilities, in one go."""
    real, prompt = app.engine.tokenizer.decode, [97, 98, 0xC3]
    began, go_on, num_made = threading.Event(), threading.Event(), 0

    def decode(ids: Any, **options: Any) -> str:
        nonlocal num_made
        if ids == prompt:
            num_made += 1
            began.set()
            assert go_on.wait(10), "nothing was answered meanwhile"
        return str(real(ids, **options))

    def choices(n: int) -> list[tuple[Any, ...]]:
        fields = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 3, "n": n}
        if stream:
            return [(choice["tokens"], choice["offsets"]) for choice in streamed(app, **fields).values()]
        logprobs = [choice["logprobs"] for choice in post(app, **fields).json()["choices"]]
        return [(one["tokens"], one["text_offset"]) for one in logprobs]

    expected = choices(1)
    monkeypatch.setattr(app.engine.tokenizer, "decode", decode)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(choices, 4)
        assert began.wait(60)
        assert app.http.get("/health/live").status_code == 200
        go_on.set()
        assert found.result() == expected * 4
    assert num_made == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("limit", "fields", "status"),
    [
        (12, {"n": 2}, 200),
        (11, {"n": 2}, 400),
        (8, {"prompt": ["a", "b"]}, 200),
        (7, {"prompt": ["a", "b"]}, 400),
        (1, {"n": 1}, 200),
        (1, {"n": 2, "logprobs": None}, 200),
    ],
)
def test_an_absurd_echo_is_refused(
    app: Any, monkeypatch: pytest.MonkeyPatch, limit: int, fields: dict[str, Any], status: int, stream: bool
) -> None:
    """Prevents a small request whose answer is gigabytes of the same log-probabilities."""
    monkeypatch.setattr(openai_params, "MAX_ECHOED_LOGPROBS", limit)
    reply = post(app, **{"echo": True, "logprobs": 1, "stream": stream, **fields})  # three tokens, of two each
    if stream and "prompt" in fields:  # a stream has begun with the first prompt when the second is too much
        assert ('"param":"echo"' in reply.text) == (status == 400)
        return
    assert reply.status_code == status
    if status == 400:
        assert reply.json()["error"]["param"] == "echo"
    app.engine.wait_for_live(0)


def test_one_bad_prompt_of_several_refuses_all(app: Any) -> None:
    """Prevents requests of a refused call that go on running."""
    reply = post(app, prompt=["a", "x" * 5000], n=2)
    assert reply.status_code == 400
    app.engine.wait_for_live(0)


def test_tokens_that_end_a_text_count_as_generated(app: Any) -> None:
    """Prevents a usage that says fewer tokens than were computed."""
    assert post(app).json()["usage"]["completion_tokens"] == len(REPLY.encode()) + 1


def test_usage_of_a_stream_covers_every_prompt(app: Any) -> None:
    """C37: prevents usage of the last prompt only."""
    text = post(app, prompt=["a", "bb"], stream=True, stream_options={"include_usage": True}).text
    last = json.loads(text.split("\n\n")[-3].removeprefix("data: "))
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens"] == 5
    assert last["usage"]["completion_tokens"] == 2 * (len(REPLY.encode()) + 1)


@pytest.mark.parametrize("usage", [None, UNSET])
def test_chunks_equal_those_encoded_whole(usage: Any) -> None:
    """What is the same in all chunks is encoded once, and put together with each choice as bytes."""
    head = AnswerHead('cmpl-1"choices":[]', "text_completion", 5, 'a model ]} named "b"', "fp_1")
    choices: list[CompletionChoice | ChunkChoice] = [
        CompletionChoice(0, "a ]} 🙂\n", None, None, None),
        CompletionChoice(3, "", CompletionLogprobs(["a"], [-0.5], [None], [0]), "stop", 7),
        ChunkChoice(0, Delta(content="x"), None, None),
    ]
    for choice in choices:
        assert ChunkEncoder(head, usage).event(choice) == sse(head.answer((choice,), usage))


def test_an_answer_of_parts_equals_one_encoded_whole() -> None:
    """As above, for a body of many choices."""
    head = AnswerHead('cmpl-1"choices":[]', "text_completion", 5, 'a model ]} named "b"', "fp_1")
    usage = Usage(1, 2, 3, PromptTokensDetails(0))
    choices = [CompletionChoice(i, "a ]} 🙂\n", None, "stop", None) for i in range(3)]
    assert encode_answer(head, choices, usage) == msgspec.json.encode(head.answer(choices, usage))
