"""castline.v1.Inference through grpcio: generation, tokenizing, facts, errors, deadlines, health, reflection."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from castline.engines.errors import EngineError, ErrorCode, RequestError
from castline.runtime.client import Phase
from castline.server.proto import castline_pb2 as pb
from castline.server.serving import MAX_MESSAGE_BYTES

REPLY = "Paris, naïve 🙂."
SERVICE = "castline.v1.Inference"


def generate(app: Any, timeout: float | None = None, **fields: Any) -> list[pb.GenerateResponse]:
    return list(app.inference.Generate(pb.GenerateRequest(**fields), timeout=timeout))


def refusal(app: Any, **fields: Any) -> tuple[grpc.StatusCode, str | None, str]:
    """Status, field and details of a refused Generate."""
    with pytest.raises(grpc.RpcError) as refused:
        generate(app, **fields)
    trailers = dict(refused.value.trailing_metadata())
    assert trailers["castline-error-code"]
    return refused.value.code(), trailers.get("castline-error-field"), refused.value.details()


def chat(*contents: str) -> pb.ChatMessages:
    return pb.ChatMessages(messages=[pb.ChatMessage(role="user", content=content) for content in contents])


def text_of(responses: Sequence[pb.GenerateResponse], index: int = 0) -> str:
    return "".join(response.text for response in responses if response.index == index)


def test_a_stream_from_prompt_to_usage(app: Any) -> None:
    """Prevents a stream whose parts do not add up, or that does not say how it began and ended."""
    responses = generate(app, prompt="ab")
    first, last = responses[0], responses[-1]
    assert text_of(responses) == REPLY
    assert list(first.prompt.token_ids) == [256, 97, 98]
    assert not any(response.HasField("prompt") or response.HasField("usage") for response in responses[1:-1])
    assert [response.finish_reason for response in responses[:-1]] == [pb.FINISH_REASON_UNSPECIFIED] * (
        len(responses) - 1
    )
    assert last.finish_reason == pb.FINISH_REASON_STOP
    assert last.WhichOneof("stop_reason") is None, "the model's own end has no stop_reason"
    tokens = sum(len(response.token_ids) for response in responses)
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (3, tokens)
    assert len({response.request_id for response in responses}) == 1


def test_the_three_inputs(app: Any) -> None:
    """Prevents special tokens that are added to ids, or twice to a conversation."""
    generate(app, prompt="ab")
    generate(app, token_ids=pb.TokenIds(ids=[97, 98]))
    generate(app, messages=chat("ab"))
    ids = [request["ids"] for request in app.engine.requests]
    assert ids == [[256, 97, 98], [97, 98], [256, *b"[user]ab\n[assistant]"]]
    generate(app, prompt="ab", add_special_tokens=False)
    assert app.engine.requests[-1]["ids"] == [97, 98]


def test_every_sampling_field_reaches_the_engine(app: Any) -> None:
    """Prevents a field of the proto that is accepted and ignored."""
    given = {
        "n": 2,
        "max_tokens": 3,
        "min_tokens": 1,
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.75,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.25,
        "seed": -(2**63),
        "ignore_eos": True,
        "logprobs": 1,
        "prompt_logprobs": 0,
    }
    params = pb.SamplingParams(logit_bias={5: -100}, stop=["zz"], stop_token_ids=[9], **given)
    assert {field.name for field in params.DESCRIPTOR.fields} == {*given, "logit_bias", "stop", "stop_token_ids"}
    generate(app, prompt="ab", params=params, cache_salt="alice")
    request = app.engine.requests[-1]
    assert {name: getattr(request["params"], name) for name in given} == given
    assert request["params"].logit_bias == {5: -100.0}
    assert request["params"].stop == ("zz",)
    assert request["params"].stop_token_ids == (9,)
    assert request["cache_salt"] == "alice"
    generate(app, prompt="ab")
    assert app.engine.requests[-1]["params"] == type(request["params"])(), "absent fields have the defaults"


def test_continuations_and_stop_strings(app: Any) -> None:
    """Prevents continuations that are mixed up, and usage before all of them have ended."""
    responses = generate(app, prompt="a", params=pb.SamplingParams(n=3, stop=["🙂"]))
    assert [text_of(responses, i) for i in range(3)] == ["Paris, naïve "] * 3
    ends = [response for response in responses if response.finish_reason]
    assert [end.stop_string for end in ends] == ["🙂"] * 3
    assert [response.HasField("usage") for response in responses] == [False] * (len(responses) - 1) + [True]


def test_logprobs(app: Any) -> None:
    """Prevents log-probabilities without the bytes of their tokens, and a prompt that is one entry short."""
    responses = generate(app, prompt="ab", params=pb.SamplingParams(logprobs=2, prompt_logprobs=1))
    entries = [entry for response in responses for entry in response.logprobs]
    assert b"".join(entry.chosen.token for entry in entries) == REPLY.encode() + b"</s>"
    assert [len(entry.top) for entry in entries] == [2] * len(entries)
    assert entries[0].rank == 1
    prompt = responses[0].prompt.logprobs
    assert [entry.HasField("chosen") for entry in prompt] == [False, True, True]


def test_refusals(app: Any) -> None:
    """Prevents errors that a program cannot tell apart. The next request must work."""
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    assert refusal(app)[:2] == (invalid, "input")
    assert refusal(app, token_ids=pb.TokenIds())[:2] == (invalid, "token_ids")
    assert refusal(app, token_ids=pb.TokenIds(ids=[1]), add_special_tokens=True)[:2] == (invalid, "add_special_tokens")
    assert refusal(app, messages=chat())[:2] == (invalid, "messages")
    assert refusal(app, messages=chat("raise"))[:2] == (invalid, "messages")
    assert refusal(app, messages=pb.ChatMessages(messages=[pb.ChatMessage(role="x")]))[:2] == (
        invalid,
        "messages[0].role",
    )
    assert refusal(app, prompt="a", params=pb.SamplingParams(n=0))[:2] == (invalid, "n")
    assert refusal(app, prompt="x" * 5000)[0] == invalid
    assert refusal(app, prompt="a", model="other")[:2] == (grpc.StatusCode.NOT_FOUND, "model")
    assert text_of(generate(app, prompt="a", model="tiny")) == REPLY


def test_a_refusal_of_something_huge_arrives(app: Any) -> None:
    """Prevents a status that is too long to be sent, so that the client reads RESOURCE_EXHAUSTED instead."""
    assert refusal(app, prompt="a", model="😀" * 5000)[:2] == (grpc.StatusCode.NOT_FOUND, "model")
    app.engine.fail_after, app.engine.failure = 0, RequestError("😀" * 5000, field="😀" * 5000)
    assert refusal(app, prompt="a")[0] == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (RequestError("the step failed", code=ErrorCode.ENGINE_FAILED), grpc.StatusCode.INTERNAL),
        (EngineError("the engine is gone"), grpc.StatusCode.INTERNAL),
        (ValueError("a secret"), grpc.StatusCode.INTERNAL),
    ],
)
def test_a_failure_after_the_first_token_ends_the_stream(app: Any, failure: Exception, status: grpc.StatusCode) -> None:
    """Prevents a broken stream that looks complete, and internals that leak to clients."""
    app.engine.fail_after, app.engine.failure = 2, failure
    received = []
    with pytest.raises(grpc.RpcError) as failed:
        received.extend(response.text for response in app.inference.Generate(pb.GenerateRequest(prompt="a")))
    assert failed.value.code() is status
    assert "secret" not in failed.value.details()
    app.engine.wait_for_live(0)


def test_a_full_queue_is_resource_exhausted(start: Any, make_engine: Any) -> None:
    """Prevents overload that a client takes for its own mistake."""
    with start(make_engine(max_waiting=0)) as app:
        assert refusal(app, prompt="a")[0] is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_the_deadline_is_the_requests(app: Any) -> None:
    """Prevents a request that runs on after its caller has stopped waiting."""
    app.engine.hold_after = 1
    with pytest.raises(grpc.RpcError) as late:
        generate(app, timeout=0.5, prompt="a")
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert 0 < app.engine.requests[-1]["timeout_s"] <= 0.5
    app.engine.wait_for_live(0)
    app.engine.hold_after = None
    generate(app, prompt="a")
    assert app.engine.requests[-1]["timeout_s"] is None


@pytest.mark.parametrize("hold_after", [0, 3])
def test_cancel_frees_the_request(app: Any, hold_after: int) -> None:
    """C46: prevents a request that outlives its call, while it waits and while it streams."""
    app.engine.hold_after = hold_after
    call = app.inference.Generate(pb.GenerateRequest(prompt="a"))
    for _ in range(hold_after):
        next(call)
    app.engine.wait_for_live(1)
    call.cancel()
    app.engine.wait_for_live(0)


def test_message_size_limit(app: Any) -> None:
    """C48: prevents a large prompt from being refused below the documented limit, and an error that hides it."""
    assert refusal(app, prompt="x" * (5 * 2**20))[0] is grpc.StatusCode.INVALID_ARGUMENT, "too long, but it arrived"
    with pytest.raises(grpc.RpcError) as refused:
        generate(app, prompt="x" * MAX_MESSAGE_BYTES)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(MAX_MESSAGE_BYTES) in refused.value.details()


def test_tokenize(app: Any) -> None:
    """Prevents counts that differ from what Generate computes."""
    ids = app.inference.Tokenize(pb.TokenizeRequest(text="ab"))
    assert (list(ids.token_ids), ids.count) == ([256, 97, 98], 3)
    assert app.inference.Tokenize(pb.TokenizeRequest(text="ab", add_special_tokens=False)).count == 2
    conversation = app.inference.Tokenize(pb.TokenizeRequest(messages=chat("ab")))
    generate(app, messages=chat("ab"))
    assert list(conversation.token_ids) == app.engine.requests[-1]["ids"]
    with pytest.raises(grpc.RpcError) as refused:
        app.inference.Tokenize(pb.TokenizeRequest())
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_text_too_long_for_any_prompt_is_not_tokenized(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents a call that takes gigabytes and half a minute of a core; one that might fit is answered in full."""
    longest = app.engine.limits.max_model_len * 3
    assert app.inference.Tokenize(pb.TokenizeRequest(text="a" * longest)).count == longest + 1
    monkeypatch.setattr(type(app.engine.tokenizer), "encode", lambda *_, **__: pytest.fail("encoded"))
    with pytest.raises(grpc.RpcError) as refused:
        app.inference.Tokenize(pb.TokenizeRequest(text="a" * (longest + 1)))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(refused.value.trailing_metadata())["castline-error-code"] == "context_length_exceeded"


def test_model_info(app: Any) -> None:
    """Prevents facts that are not those of the engine that runs."""
    info = app.inference.ModelInfo(pb.ModelInfoRequest())
    assert (info.name, info.architecture, info.num_parameters) == ("tiny", "TinyForCausalLM", 1000)
    assert (info.recipe, info.kv_dtype, info.target) == ("int8", "int8", "cpu")
    assert info.limits.max_model_len == app.engine.limits.max_model_len
    assert info.limits.num_kv_blocks == app.engine.limits.num_blocks
    assert info.limits.max_message_bytes == MAX_MESSAGE_BYTES
    assert dict(info.tool_versions) == {"onnx": "1.19"}
    assert info.has_chat_template


def test_health_service_follows_readiness(start: Any, make_engine: Any) -> None:
    """C51: prevents a load balancer from sending requests before the engine has loaded."""
    status = health_pb2.HealthCheckResponse
    with start(make_engine(), opened=False) as app:
        stub = health_pb2_grpc.HealthStub(app.grpc)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert next(watch).status == status.NOT_SERVING
        for service in ("", SERVICE):
            assert stub.Check(health_pb2.HealthCheckRequest(service=service)).status == status.NOT_SERVING
        assert refusal(app, prompt="a")[0] is grpc.StatusCode.UNAVAILABLE
        app.call(app.server.open(app.engine)).result(10)
        assert next(watch).status == status.SERVING
        app.engine.phase = Phase.STALLED
        assert next(watch).status == status.NOT_SERVING
        app.engine.phase = Phase.READY
        assert next(watch).status == status.SERVING
        for service in ("", SERVICE):
            assert stub.Check(health_pb2.HealthCheckRequest(service=service)).status == status.SERVING
        with pytest.raises(grpc.RpcError) as unknown:
            stub.Check(health_pb2.HealthCheckRequest(service="no.such.Service"))
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


def test_reflection(app: Any) -> None:
    """Prevents tools such as grpcurl from needing the proto file."""
    database = ProtoReflectionDescriptorDatabase(app.grpc)
    assert {SERVICE, "grpc.health.v1.Health"} <= set(database.get_services())
    file = database.FindFileContainingSymbol(SERVICE)
    assert [method.name for method in file.service[0].method] == ["Generate", "Tokenize", "ModelInfo"]


def test_what_cannot_fit_is_refused_before_it_is_looked_at(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents a message of megabytes from holding up every stream for seconds before it is refused."""
    monkeypatch.setattr(app.engine.tokenizer, "render_chat", lambda messages: pytest.fail("rendered"))
    limit = app.engine.limits.max_model_len
    for name, value in (("token_ids", pb.TokenIds(ids=[1] * (limit + 1))), ("messages", chat(*[""] * (limit + 1)))):
        status, field, details = refusal(app, **{name: value})
        assert (status, field) == (grpc.StatusCode.INVALID_ARGUMENT, name)
        assert str(limit) in details
    assert not app.engine.requests


@pytest.mark.parametrize("method", ["Generate", "Tokenize"])
def test_a_large_conversation_is_rendered_beside_the_streams(
    app: Any, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Prevents one call from holding up every stream, and the probes of its health."""
    began, go_on = threading.Event(), threading.Event()

    def render(messages: Any) -> str:
        began.set()
        assert go_on.wait(10), "nothing was answered meanwhile"
        return "ab"

    monkeypatch.setattr(app.engine.tokenizer, "render_chat", render)
    with ThreadPoolExecutor(1) as pool:
        if method == "Generate":
            called = pool.submit(generate, app, messages=chat(*["hi"] * 3000))
        else:
            called = pool.submit(app.inference.Tokenize, pb.TokenizeRequest(messages=chat(*["hi"] * 3000)))
        assert began.wait(60)
        assert app.http.get("/health/live").status_code == 200
        go_on.set()
        assert called.result()
