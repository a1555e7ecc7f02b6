"""The two generating endpoints: read, run, answer. They differ only in how a body becomes a job."""

from collections.abc import Callable
from contextlib import aclosing

import msgspec
from starlette.types import Receive, Scope, Send

from castline.runtime.client import EngineClient, Output
from castline.server.errors import to_wire
from castline.server.http_protocol import Connection, connection_of
from castline.server.http_wire import (
    ClientGone,
    cancelled_by_disconnect,
    fault_body,
    read_json_body,
    send_events,
    send_fault,
    send_json,
    start_events,
)
from castline.server.job import AnswerWriter, Job, StreamWriter, run
from castline.server.openai_responses import DONE
from castline.server.serving import MAX_MESSAGE_BYTES, ServedModel, Serving


class GenerateEndpoint:
    """An ASGI application. The request is aborted when its client goes away, whether it waits, streams or collects."""

    def __init__(self, serving: Serving, to_job: Callable[[ServedModel, bytes], Job]) -> None:
        self._serving = serving
        self._to_job = to_job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            model = self._serving.model
            with model.metrics.counting_refusals():
                body = await read_json_body(scope, receive, MAX_MESSAGE_BYTES)
                job = self._to_job(model, body)
            async with cancelled_by_disconnect(receive):
                if isinstance(job.writer, StreamWriter):
                    await _stream(model.engine, job, job.writer, send, connection_of(scope))
                else:
                    await _answer(model.engine, job, job.writer, send)
        except ClientGone:
            return
        except Exception as error:
            await send_fault(send, to_wire(error))


async def _answer(engine: EngineClient, job: Job, writer: AnswerWriter, send: Send) -> None:
    """Tokens that end nothing wake no task."""

    def add(output: Output) -> bool:
        writer.add(output)
        return True

    async with aclosing(run(engine, job, add)) as outputs:
        async for output in outputs:
            writer.add(output)
    await send_json(send, writer.body())


async def _stream(
    engine: EngineClient, job: Job, writer: StreamWriter, send: Send, connection: Connection | None
) -> None:
    """An error before the first output has its own status, and is raised; one after it ends the stream as an event.

    What *connection* can take at once is written there, and wakes no task.
    """
    has_started = False

    def write(output: Output) -> bool:
        if not has_started or connection is None or not connection.can_write:
            return False
        if events := writer.events(output):
            connection.write_chunk(events)
        return True

    async with aclosing(run(engine, job, write)) as outputs:
        first = await anext(outputs)
        await start_events(send)
        has_started = True
        try:
            await send_events(send, writer.events(first))
            async for output in outputs:
                if events := writer.events(output):
                    await send_events(send, events)
        except Exception as error:
            event = b"data: " + msgspec.json.encode(fault_body(to_wire(error))) + b"\n\n"
            await send_events(send, event, last=True)
        else:
            await send_events(send, writer.last_events() + DONE, last=True)
