"""The two generating endpoints: read, run, answer. They differ only in how a body becomes a job."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from typing import TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from castline.runtime.client import EngineClient, Output
from castline.server.errors import to_wire
from castline.server.http_exchange import ClientGone, Exchange, exchange_of
from castline.server.http_wire import fault_body, read_json_body, send_fault, send_json
from castline.server.job import AnswerWriter, Job, StreamWriter, run
from castline.server.large_requests import large_requests
from castline.server.openai_responses import DONE
from castline.server.serving import MAX_MESSAGE_BYTES, ServedModel, Serving

T = TypeVar("T")

LARGE_BODY_BYTES = 64 * 1024
"""Larger bodies become jobs in a thread: a thousand messages take tens of milliseconds, in which no stream moves. For
smaller ones the thread would cost more than it saves."""


class GenerateEndpoint:
    """An ASGI application. The request is aborted when its client goes away, whether it waits, streams or collects."""

    def __init__(self, serving: Serving, to_job: Callable[[ServedModel, bytes], Job]) -> None:
        self._serving = serving
        self._to_job = to_job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        try:
            model = self._serving.model
            with model.metrics.counting_refusals:
                body = await read_json_body(scope, receive, MAX_MESSAGE_BYTES)
                if len(body) <= LARGE_BODY_BYTES:
                    job = self._to_job(model, body)
                else:
                    job = await large_requests.begin(partial(self._large_job, model, body), len(body))
            if isinstance(job.writer, StreamWriter):
                answer = _stream(model.engine, job, job.writer, exchange)
            else:
                answer = _answer(model.engine, job, job.writer, send)
            await exchange.run(answer)
        except ClientGone:
            return
        except Exception as error:
            await send_fault(send, to_wire(error))

    def _large_job(self, model: ServedModel, body: bytes) -> Job:
        """On any thread. An error comes without its frames: what they hold is let go of here, which takes long too."""
        try:
            return self._to_job(model, body)
        except Exception as error:
            raise error.with_traceback(None)  # noqa: B904


async def _answer(engine: EngineClient, job: Job, writer: AnswerWriter, send: Send) -> None:
    """Tokens that end nothing wake no task."""

    def add(output: Output) -> bool:
        writer.add(output)
        return True

    express = None if writer.takes_long else add
    async with aclosing(run(engine, job, express)) as outputs:
        async for output in outputs:
            if writer.takes_long:
                await _beside_others(writer.add, output)
            else:
                writer.add(output)
    await send_json(send, await large_requests.begin(writer.body, 0) if writer.takes_long else writer.body())


async def _beside_others(take: Callable[[Output], T], output: Output) -> T:
    """What a writer that takes long makes of *output*."""
    if output.prompt is not None:
        return await large_requests.begin(partial(take, output), len(output.prompt.prompt_token_ids))
    await asyncio.sleep(0)
    return take(output)


async def _stream(engine: EngineClient, job: Job, writer: StreamWriter, exchange: Exchange) -> None:
    """An error before the first event has its own status, and is raised; one after it ends the stream as an event.

    What can be written at once wakes no task.
    """

    def write(output: Output) -> bool:
        if not exchange.can_write:
            return False
        if events := writer.events(output):
            exchange.write_events(events)
        return True

    num_running = len(job.prompts) * job.params.n
    end = b""
    try:
        async with aclosing(run(engine, job, None if writer.takes_long else write)) as outputs:
            async for output in outputs:
                events = await _beside_others(writer.events, output) if writer.takes_long else writer.events(output)
                num_running -= output.finish_reason is not None
                if num_running == 0:
                    end = events  # goes with what ends the stream
                elif events:
                    await exchange.send_events(events)
    except Exception as error:
        if not exchange.has_begun:
            raise
        await exchange.send_last_events(b"data: " + msgspec.json.encode(fault_body(to_wire(error))) + b"\n\n")
    else:
        await exchange.send_last_events(end + writer.last_events() + DONE)
