"""One OpenAI-compatible request, ready to run: its prompts, and the writer that turns outputs into bytes."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import cast

from msgspec import structs

from castline.engines.errors import RequestError
from castline.runtime.client import EngineClient, Express, Output
from castline.runtime.sampling_params import SamplingParams


class StreamWriter(ABC):
    """Outputs to server-sent events, one call an output."""

    takes_long = False
    """An output may take milliseconds, and one with a prompt many: they are no work for the event loop in one go."""

    @abstractmethod
    def events(self, output: Output) -> bytes:
        """The events of one output; empty when none of it can be shown yet."""

    @abstractmethod
    def last_events(self) -> bytes:
        """What follows the last output, before the end marker."""


class AnswerWriter(ABC):
    """Outputs to one body."""

    takes_long = False
    """As StreamWriter's; the body too."""

    @abstractmethod
    def add(self, output: Output) -> None: ...

    @abstractmethod
    def body(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Job:
    request_id: str
    prompts: Sequence[str | list[int]]
    params: SamplingParams
    add_special_tokens: bool
    cache_salt: str | None
    writer: StreamWriter | AnswerWriter


def run(engine: EngineClient, job: Job, express: Express | None = None) -> AsyncGenerator[Output, None]:
    """Outputs of all of the job's prompts; continuation i of prompt p has index ``p * n + i``.

    Those of a single prompt may go to *express*; see EngineClient.generate.

    Raises what the engine raises for any of them, and then aborts the others; closing it aborts all.
    """
    if len(job.prompts) == 1:
        return _generate(engine, job, 0, express)
    return _merged(engine, job)


def _generate(
    engine: EngineClient, job: Job, prompt_index: int, express: Express | None = None
) -> AsyncGenerator[Output, None]:
    suffix = f"-{prompt_index}" if len(job.prompts) > 1 else ""
    outputs = engine.generate(
        job.prompts[prompt_index],
        job.params,
        request_id=job.request_id + suffix,
        add_special_tokens=job.add_special_tokens,
        cache_salt=job.cache_salt,
        express=express,
        streams=isinstance(job.writer, StreamWriter),
    )
    return cast(AsyncGenerator[Output, None], outputs)


async def _merged(engine: EngineClient, job: Job) -> AsyncGenerator[Output, None]:
    """One task a prompt, and a queue between them and the writer. A slow writer is waited for where the queue has an
    output for each prompt: what comes meanwhile is merged by the engine client, and never a queue.
    """
    queue: asyncio.Queue[Output | Exception | None] = asyncio.Queue(maxsize=len(job.prompts))

    async def pump(prompt_index: int) -> None:
        first_index = prompt_index * job.params.n
        try:
            async with aclosing(_generate(engine, job, prompt_index)) as outputs:
                async for output in outputs:
                    await queue.put(structs.replace(output, index=first_index + output.index))
        except RequestError as error:
            await queue.put(_in_list(error, prompt_index))
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    pumps: list[asyncio.Task[None]] = []

    async def start() -> None:
        for i in range(len(job.prompts)):
            pumps.append(asyncio.create_task(pump(i)))
            await asyncio.sleep(0)  # each encodes its prompt at once: other requests have their turn in between

    starter = asyncio.create_task(start())
    try:
        num_running = len(job.prompts)
        while num_running:
            item = await queue.get()
            if item is None:
                num_running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        starter.cancel()
        await asyncio.gather(starter, return_exceptions=True)  # first: then no pump is added
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


def _in_list(error: RequestError, prompt_index: int) -> RequestError:
    """*error* of one prompt, naming which of the list it is."""
    name, bracket, place = (error.field or "").partition("[")
    if name != "prompt":
        return error
    field = f"prompt[{prompt_index}]{bracket}{place}"
    return RequestError(f"{field}: {error.message}", field=field, code=error.code)
