"""A deterministic engine in memory, and servers over it on free loopback ports with real sockets.

The engine answers every prompt with the same scripted text, one byte a token, and obeys limits, stops, deadlines,
cancels and drains as the EngineClient contract says. Tests hold it, fail it and count what is alive in it.
"""

import asyncio
import codecs
import contextlib
import math
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import openai
import pytest

from castline.engines.errors import ErrorCode, RequestError
from castline.engines.manifest import Host, Limits, Manifest, ModelFacts, Plugin, Precision, Tuning
from castline.runtime.client import EffectiveLimits, Express, Health, Output, Phase, PromptInfo, Stats
from castline.runtime.events import FinishReason, TokenLogprobs
from castline.runtime.sampling_params import SamplingParams
from castline.server.app import Server
from castline.server.options import ServerOptions
from castline.server.proto import castline_pb2_grpc

BOS, EOS, SPECIAL = 256, 257, 258
VOCAB_SIZE = 259
MODEL = "tiny"


class ByteTokenizer:
    """Token i is byte i; three special tokens follow. Templates print BOS themselves."""

    vocab_size = VOCAB_SIZE
    bos_token_id: int | None = BOS
    eos_token_ids = (EOS,)
    has_chat_template = True
    adds_bos = True

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = []
        if text.startswith("<s>"):
            ids, text = [BOS], text[3:]
        if add_special_tokens and self.adds_bos:
            ids.insert(0, BOS)
        return ids + list(text.encode())

    def has_more(self, text: str, num_tokens: int) -> bool:
        return len(text.encode()) > num_tokens * len("<s>")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if skip_special_tokens:
            return bytes(i for i in token_ids if i < 256).decode(errors="replace")
        return b"".join(map(self.token_bytes, token_ids)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return {BOS: b"<s>", EOS: b"</s>", SPECIAL: b"<|x|>"}.get(token_id) or bytes([token_id])

    def is_special(self, token_id: int) -> bool:
        return token_id >= BOS

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        if not self.has_chat_template:
            raise RequestError("the model has no chat template; use /v1/completions", field="messages")
        if any(m["content"] == "raise" for m in messages):
            raise RequestError("the chat template refuses: raise", field="messages")
        return "<s>" + "".join(f"[{m['role']}]{m['content']}\n" for m in messages) + "[assistant]"


def manifest() -> Manifest:
    return Manifest(
        schema_version=1,
        castline_version="0.1.0",
        created="2025-01-01T00:00:00Z",
        rebuild_command="castline build tiny",
        model=ModelFacts(MODEL, "TinyForCausalLM", "tests/tiny", 1, 8, 1, 1, 8, VOCAB_SIZE, 4096, 1000, (EOS,), BOS),
        precision=Precision("int8", "int8"),
        limits=Limits(4096, 16),
        host=Host("cpu", "x86_64", "any", (), 2),
        tuning=Tuning(False, 2),
        parity=None,
        plugin=Plugin("castline_cpu", "1", "0" * 64),
        graph_file="model.onnx",
        tool_versions={"onnx": "1.19"},
        files={"model.onnx": "1" * 64},
    )


def detokenized(ids: Sequence[int], params: SamplingParams) -> Iterator[tuple[str, str | None]]:
    """For each token: the text it releases, and the stop string that it completes."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    held = ""
    for i, token_id in enumerate(ids):
        held += decoder.decode(bytes([token_id])) if token_id < 256 else ""
        last = i + 1 == len(ids)
        if last:
            held += decoder.decode(b"", final=True)
        found = min(((held.find(s), s) for s in params.stop if s in held), default=None)
        if found is not None:
            yield held[: found[0]], found[1]
            return
        keep = 0 if last else max((k for s in params.stop for k in range(1, len(s)) if held.endswith(s[:k])), default=0)
        yield held[: len(held) - keep], None
        held = held[len(held) - keep :]


class FakeEngine:
    """An EngineClient. ``hold_after`` k: every continuation waits after k tokens until ``release``."""

    def __init__(self, reply: str = "Paris, naïve 🙂.", max_model_len: int = 4096, max_waiting: int = 64) -> None:
        self.manifest = manifest()
        self.limits = EffectiveLimits(max_model_len, 4, 512, 16, 256, 16.0, max_waiting)
        self.tokenizer = ByteTokenizer()
        self.reply_ids: list[int] = [*reply.encode(), EOS]
        self.hold_after: int | None = None
        self.fail_after: int | None = None
        self.failure: Exception = RequestError("the step failed", code=ErrorCode.ENGINE_FAILED)
        self._phase = Phase.READY
        self._health_changed: Callable[[], object] = lambda: None
        self.hangs_in_drain = False
        self.uses_express = True
        self.num_express = 0
        """Outputs that express took."""
        self.requests: list[dict[str, Any]] = []
        self.live: set[str] = set()
        self.num_steps = 0
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.changed = threading.Condition()
        self.gate = asyncio.Event()
        self.ended = False

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
        ids = (
            self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens) if isinstance(prompt, str) else prompt
        )
        self.requests.append({"ids": list(ids), "params": params, "timeout_s": timeout_s, "cache_salt": cache_salt})
        return self._generate(tuple(ids), params, request_id, timeout_s, express)

    async def _generate(
        self,
        ids: tuple[int, ...],
        params: SamplingParams,
        request_id: str,
        timeout_s: float | None,
        express: Express | None,
    ) -> AsyncIterator[Output]:
        self._validate(ids, params)
        self._note(self.live.add, request_id)
        try:
            async with asyncio.timeout(timeout_s):
                async for output in self._outputs(ids, params):
                    if output.finish_reason is None and self.uses_express and express is not None and express(output):
                        self.num_express += 1
                    else:
                        yield output
        except TimeoutError:
            raise RequestError("the deadline has passed", code=ErrorCode.DEADLINE_EXCEEDED) from None
        finally:
            self._note(self.live.discard, request_id)

    def _note(self, change: Callable[[str], None], request_id: str) -> None:
        with self.changed:
            change(request_id)
            self.changed.notify_all()

    def _validate(self, ids: tuple[int, ...], params: SamplingParams) -> None:
        if self.phase is Phase.DRAINING:
            raise RequestError("shutting down", code=ErrorCode.SHUTTING_DOWN)
        if len(self.live) >= self.limits.max_waiting:
            raise RequestError("too many requests wait", code=ErrorCode.OVERLOADED)
        if not ids:
            raise RequestError("prompt is empty", field="prompt")
        if len(ids) >= self.limits.max_model_len:
            raise RequestError(
                f"prompt has {len(ids)} tokens, max_model_len is {self.limits.max_model_len}",
                field="prompt",
                code=ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            )
        if not 1 <= params.n <= 16:
            raise RequestError(f"n is {params.n}", field="n")
        for token_id in params.logit_bias:
            if not 0 <= token_id < VOCAB_SIZE:
                raise RequestError(f"logit_bias[{token_id}] is no token", field=f"logit_bias[{token_id}]")

    async def _outputs(self, ids: tuple[int, ...], params: SamplingParams) -> AsyncIterator[Output]:
        """The n continuations take turns, as they do in a batch."""
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            entries = (self._entry(i, params.prompt_logprobs) for i in ids[1:])
            prompt_logprobs = (None, *entries)
        info = PromptInfo(ids, 0, prompt_logprobs)
        self.num_prompt_tokens += len(ids)
        running = {i: self._continuation(ids, params, i) for i in range(params.n)}
        while running:
            for index in list(running):
                output = await anext(running[index])
                if output.finish_reason is not None:
                    del running[index]
                if info is not None and index == 0:
                    output, info = _with_prompt(output, info), None
                yield output

    async def _continuation(self, ids: tuple[int, ...], params: SamplingParams, index: int) -> AsyncIterator[Output]:
        limit = self.limits.max_model_len - len(ids)
        limit = limit if params.max_tokens is None else min(limit, params.max_tokens)
        script = list(self.reply_ids)
        if index:
            script[-1:-1] = [*str(index).encode()]
        if params.ignore_eos:
            script = (script * (limit // len(script) + 1))[: max(limit, 1)]
        generated = script[:limit]
        if not generated:
            await self._pause(0)
            yield Output(index, "", (), finish_reason=FinishReason.LENGTH)
            return
        ended_by_token = not params.ignore_eos and generated[-1] == EOS
        texts = detokenized(generated, params)
        for position, token_id in enumerate(generated):
            await self._pause(position)
            text, stop = next(texts)
            self.num_steps += 1
            self.num_generation_tokens += 1
            last = stop is not None or position + 1 == len(generated)
            reason = None
            if last:
                reason = FinishReason.STOP if stop is not None or ended_by_token else FinishReason.LENGTH
            logprobs = None if params.logprobs is None else (self._entry(token_id, params.logprobs),)
            yield Output(index, text, (token_id,), logprobs, reason, stop)
            if last:
                return

    async def _pause(self, position: int) -> None:
        if position == self.fail_after:
            raise self.failure
        if position == self.hold_after:
            await self.gate.wait()
        if self.ended:
            raise RequestError("shutting down", code=ErrorCode.SHUTTING_DOWN)
        await asyncio.sleep(0)

    def _entry(self, token_id: int, top: int) -> TokenLogprobs:
        others = ((token_id + 1) % VOCAB_SIZE, (token_id + 2) % VOCAB_SIZE)
        ranked = ((token_id, -0.5), (others[0], -1.5), (others[1], -math.inf))
        return TokenLogprobs(token_id, -0.5, 1, ranked[:top])

    @property
    def phase(self) -> Phase:
        return self._phase

    @phase.setter
    def phase(self, phase: Phase) -> None:
        self._phase = phase
        self._health_changed()

    def watch_health(self, changed: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        self._health_changed = lambda: loop.call_soon_threadsafe(changed)  # tests change the phase from theirs

    def health(self) -> Health:
        return Health(self.phase, str(self.phase))

    def stats(self) -> Stats:
        return Stats(
            num_running=len(self.live),
            kv_blocks_total=256,
            kv_blocks_used=len(self.live),
            prompt_tokens=self.num_prompt_tokens,
            generation_tokens=self.num_generation_tokens,
            steps=self.num_steps,
        )

    def stream_interval(self) -> int:
        return 3

    async def drain(self, timeout_s: float) -> None:
        self.phase = Phase.DRAINING
        if self.hangs_in_drain:
            await asyncio.Event().wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.live:
                    await asyncio.sleep(0.002)
        self.ended = True
        self.gate.set()
        while self.live:
            await asyncio.sleep(0.002)

    def wait_for_live(self, count: int) -> None:
        """Blocks the calling thread until exactly *count* requests are alive."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.live) == count, 60), f"{len(self.live)} alive, not {count}"


def _with_prompt(output: Output, info: PromptInfo) -> Output:
    return Output(
        output.index, output.text, output.token_ids, output.logprobs, output.finish_reason, output.stop_reason, info
    )


@dataclass
class Running:
    """A server on a loop in a thread of its own, and clients for it."""

    server: Server
    engine: FakeEngine
    loop: asyncio.AbstractEventLoop
    http: httpx.Client
    openai: openai.OpenAI
    grpc: grpc.Channel
    inference: castline_pb2_grpc.InferenceStub

    @property
    def url(self) -> str:
        return self.server.endpoints.http

    def call(self, coroutine: Any) -> Future[Any]:
        """Runs *coroutine* on the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def release(self) -> None:
        """Lets held continuations go on."""
        self.loop.call_soon_threadsafe(self.engine.gate.set)


@contextlib.contextmanager
def running_server(engine: FakeEngine, *, opened: bool = True, **options: Any) -> Iterator[Running]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> Server:
        server = Server(ServerOptions(http_port=0, grpc_port=0, **{"drain_timeout_s": 5.0, **options}))
        await server.listen()
        if opened:
            await server.open(engine)
        return server

    async def stop(server: Server) -> None:
        engine.ended = True
        engine.hangs_in_drain = False
        engine.gate.set()
        await server.drain()
        await server.close()

    server: Server = asyncio.run_coroutine_threadsafe(start(), loop).result(20)
    http = httpx.Client(base_url=server.endpoints.http, timeout=60)
    client = openai.OpenAI(base_url=f"{server.endpoints.http}/v1", api_key="-", max_retries=0, timeout=60)
    channel = grpc.insecure_channel(server.endpoints.grpc.removeprefix("grpc://"))
    stub = castline_pb2_grpc.InferenceStub(channel)
    try:
        yield Running(server, engine, loop, http, client, channel, stub)
    finally:
        http.close()
        client.close()
        channel.close()
        asyncio.run_coroutine_threadsafe(stop(server), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def app(engine: FakeEngine) -> Iterator[Running]:
    """A ready server over ``engine``."""
    with running_server(engine) as running:
        yield running


@pytest.fixture
def start() -> Callable[..., contextlib.AbstractContextManager[Running]]:
    """``start(engine, **options)``: a server with other options."""
    return running_server


@pytest.fixture
def make_engine() -> Callable[..., FakeEngine]:
    return FakeEngine
