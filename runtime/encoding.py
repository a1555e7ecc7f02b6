"""Text to token ids in the serving process, beside everything else that it does.

A megabyte takes about two seconds of a core. So a long text is encoded in a thread, and the longest ones in threads
that the others do not wait for. They are few: more would take the cores from the engine, and encode no sooner.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, Final

from castline.engines.errors import ErrorCode, RequestError
from castline.engines.host import usable_cores
from castline.runtime.serving_time import standing_apart
from castline.runtime.tokenizer import Tokenizer

LONG_CHARS: Final = 4096
LONGEST_CHARS: Final = 65536

TokenIds = list[int]
_Job = tuple[asyncio.AbstractEventLoop, "asyncio.Future[TokenIds]", Callable[[], TokenIds]]


class EncodingThreads:
    """Jobs in order of arrival, on *num_threads* threads, which the first job starts. Thread-safe.

    The threads are daemons: a process that is to end does not wait for a text that nobody wants any more.
    """

    def __init__(self, name: str, num_threads: int) -> None:
        self._name = name
        self._num_threads = num_threads
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._started = False
        self._starting = Lock()

    def begin(self, job: Callable[[], TokenIds]) -> "asyncio.Future[TokenIds]":
        """A future of the running loop, for what *job* returns or raises; done before its turn, the job is not run."""
        with self._starting:
            if not self._started:
                self._started = True
                for _ in range(self._num_threads):
                    Thread(target=self._work, name=self._name, daemon=True).start()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[TokenIds] = loop.create_future()
        self._jobs.put((loop, future, job))
        return future

    def _work(self) -> None:
        with standing_apart():
            while True:
                self._do(*self._jobs.get())

    def _do(
        self, loop: asyncio.AbstractEventLoop, future: "asyncio.Future[TokenIds]", job: Callable[[], TokenIds]
    ) -> None:
        if future.done():  # nobody waits any more
            return
        settle: Callable[[Any], None]
        try:
            outcome: Any = job()
            settle = future.set_result
        except Exception as error:
            outcome, settle = error, future.set_exception
        with suppress(RuntimeError):  # the loop has closed meanwhile
            loop.call_soon_threadsafe(_settle, future, settle, outcome)


def _settle(future: "asyncio.Future[TokenIds]", settle: Callable[[Any], None], outcome: Any) -> None:
    if not future.done():
        settle(outcome)


_long = EncodingThreads("encode", 2)
_longest = EncodingThreads("encode-longest", 1 if usable_cores() < 4 else 2)


async def encode_text(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool, max_tokens: int) -> TokenIds:
    """Raises RequestError for a text that is known to have more than *max_tokens*, and for what is no text."""
    if len(text) <= LONG_CHARS:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await begin_encoding(tokenizer, text, add_special_tokens=add_special_tokens, max_tokens=max_tokens)


def begin_encoding(
    tokenizer: Tokenizer, text: str, *, add_special_tokens: bool, max_tokens: int
) -> "asyncio.Future[TokenIds]":
    """As `encode_text`, of a long text. Whoever ends the future early is waited for no longer."""
    if tokenizer.has_more(text, max_tokens):
        raise RequestError(
            f"the prompt has {len(text)} characters, which are more than {max_tokens} tokens whatever they are, and "
            f"this engine holds {max_tokens} tokens of prompt and text together: shorten the prompt",
            field="prompt",
            code=ErrorCode.CONTEXT_LENGTH_EXCEEDED,
        )
    threads = _long if len(text) <= LONGEST_CHARS else _longest
    return threads.begin(lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens))
