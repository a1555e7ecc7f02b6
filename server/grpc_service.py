"""castline.v1.Inference over the engine, with the standard health and reflection services."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, NoReturn, TypeVar, cast

import grpc
from grpc.aio import ServicerContext
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from castline.runtime.client import Output
from castline.runtime.encoding import encode_text
from castline.server.errors import to_wire
from castline.server.grpc_convert import (
    ResponseWriter,
    has_many_messages,
    model_info,
    prompt_of,
    sampling_params,
    text_of,
)
from castline.server.grpc_stream import MessageStream
from castline.server.large_requests import large_requests
from castline.server.proto import castline_pb2 as pb
from castline.server.proto import castline_pb2_grpc
from castline.server.request_ids import new_id
from castline.server.serving import MAX_MESSAGE_BYTES, Serving

SERVICE = pb.DESCRIPTOR.services_by_name["Inference"].full_name

OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Two servers on one port would each get half of the requests: refuse to start instead.
    ("grpc.so_reuseport", 0),
)

FLUSH_S = 0.2
"""Time for a finished call's status to leave the process."""

T = TypeVar("T")


class InferenceServicer(castline_pb2_grpc.InferenceServicer):
    """Cancelling the call's task, by its client or its deadline, aborts the request."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._num_generating = 0
        self.idle = asyncio.Event()
        """Set while no Generate call runs."""
        self.idle.set()

    async def Generate(self, request: pb.GenerateRequest, context: ServicerContext) -> None:
        self._num_generating += 1
        self.idle.clear()
        try:
            await self._generate(request, context)
        except Exception as error:
            await _abort(context, error)
        finally:
            self._num_generating -= 1
            if self._num_generating == 0:
                self.idle.set()

    async def _generate(self, request: pb.GenerateRequest, context: ServicerContext) -> None:
        model = self._serving.model
        engine = model.engine
        with model.metrics.counting_refusals:
            model.check_name(request.model or None)
            params = sampling_params(request.params)
            limit = engine.limits.max_model_len
            if has_many_messages(request):
                make = partial(prompt_of, request, engine.tokenizer, limit)
                prompt, add_special_tokens = await large_requests.begin(make, request.ByteSize())
            else:
                prompt, add_special_tokens = prompt_of(request, engine.tokenizer, limit)
        request_id = new_id("gen")
        writer = ResponseWriter(request_id, params.n, engine.tokenizer)
        stream = MessageStream(context)

        def send_now(output: Output) -> bool:
            if not stream.can_send:
                return False
            stream.send_now(writer.message(output))
            return True

        outputs = engine.generate(
            prompt,
            params,
            request_id=request_id,
            add_special_tokens=add_special_tokens,
            timeout_s=context.time_remaining(),
            cache_salt=request.cache_salt or None,
            express=send_now,
        )
        try:
            async with aclosing(cast(Any, outputs)):
                async for output in outputs:
                    await stream.send(writer.message(output))
        except Exception:
            await stream.flush()  # the status goes behind the last message
            raise
        await stream.flush()

    async def Tokenize(self, request: pb.TokenizeRequest, context: ServicerContext) -> pb.TokenizeResponse:
        async def tokenize() -> pb.TokenizeResponse:
            engine = self._serving.model.engine
            tokenizer, limit = engine.tokenizer, engine.limits.max_model_len
            if has_many_messages(request):
                make = partial(text_of, request, tokenizer, limit)
                text, add_special_tokens = await large_requests.begin(make, request.ByteSize())
            else:
                text, add_special_tokens = text_of(request, tokenizer, limit)
            ids = await encode_text(tokenizer, text, add_special_tokens=add_special_tokens, max_tokens=limit)
            return pb.TokenizeResponse(token_ids=ids, count=len(ids))

        return await _or_abort(tokenize, context)

    async def ModelInfo(self, request: pb.ModelInfoRequest, context: ServicerContext) -> pb.ModelInfoResponse:
        async def info() -> pb.ModelInfoResponse:
            return model_info(self._serving.model)

        return await _or_abort(info, context)


async def _or_abort(answer: Callable[[], Awaitable[T]], context: ServicerContext) -> T:
    try:
        return await answer()
    except Exception as error:
        await _abort(context, error)


async def _abort(context: ServicerContext, error: Exception) -> NoReturn:
    fault = to_wire(error)
    trailers = [("castline-error-code", str(fault.code))]
    if fault.field is not None:
        # Metadata is ASCII; a field may name a user's own key.
        trailers.append(("castline-error-field", fault.field.encode("ascii", "backslashreplace").decode()))
    await context.abort(fault.row.grpc_code, fault.message, tuple(trailers))
    raise AssertionError("abort returned")


class _Unregistered:
    """Passes a service's handlers to a server, but registers no method with it.

    For every registered method `grpc.aio` keeps a task that waits for its next call, and goes through all of these
    tasks with every call of any.
    """

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler]) -> None:
        """They are among the generic ones."""


class GrpcServer:
    """One gRPC server, not yet started. ``port`` is the one it listens on."""

    def __init__(self, serving: Serving, host: str, port: int) -> None:
        self._serving = serving
        self._server = grpc.aio.server(options=OPTIONS)
        handlers = _Unregistered(self._server)
        add_servicer: Callable[[InferenceServicer, Any], None] = castline_pb2_grpc.add_InferenceServicer_to_server
        self._servicer = InferenceServicer(serving)
        add_servicer(self._servicer, handlers)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, handlers)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflection.aio.ReflectionServicer(names), handlers)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.port: int = self._server.add_insecure_port(address)

    async def start(self) -> None:
        await self.publish_health()
        await self._server.start()

    async def publish_health(self) -> None:
        """Tells the health service, and those who watch it, what the readiness is now."""
        status = health_pb2.HealthCheckResponse
        now = status.SERVING if self._serving.ready().ready else status.NOT_SERVING
        for service in ("", SERVICE):
            await self._health.set(service, now)

    async def stop(self, grace_s: float) -> None:
        """Waits *grace_s* for Generate calls to send what they have; calls that never end by themselves are cut."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._servicer.idle.wait(), grace_s)
        await self._server.stop(FLUSH_S)
