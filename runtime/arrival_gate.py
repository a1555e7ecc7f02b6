"""Requests that reach an idle engine together are sent to it together.

An engine that starts on the first of thirty requests computes it alone, with threads that take the cores from whoever
reads the others; those join one or two steps later. So the first request waits for as long as more keep coming, which
is a fraction of a millisecond for one that comes alone.
"""

import asyncio
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Final

from castline.runtime.wire import Add, Command

QUIET_S: Final = 0.0003
QUIET_TURNS: Final = 8
"""A request passes through a few turns of the event loop (connection, bytes, task), long ones if there are many."""

LONGEST_S: Final = 0.02


class ArrivalGate:
    """In front of the link to the engine, in its event loop. Commands keep their order."""

    def __init__(
        self,
        send: Callable[[Sequence[Command]], None],
        step_tokens: int,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """Prompts that fill a step of *step_tokens* wait for no more. *clock* is in seconds."""
        self._send = send
        self._step_tokens = step_tokens
        self._clock = clock
        self._held: list[Command] = []
        self._num_tokens = 0
        self._began = self._latest = 0.0
        self._turns = 0
        """Of the event loop, since the latest arrival."""
        self._next_look: asyncio.Handle | None = None

    def add(self, command: Add, *, engine_idle: bool) -> None:
        """Sent at once to an engine that has work: it reads between its steps."""
        if not (self._held or engine_idle):
            self._send((command,))
            return
        self._latest, self._turns = self._clock(), 0
        if not self._held:
            self._began, self._num_tokens = self._latest, 0
            self._next_look = asyncio.get_running_loop().call_soon(self._look)
        self._held.append(command)
        self._num_tokens += len(command.request.prompt_token_ids)
        if self._num_tokens >= self._step_tokens:
            self._release()

    def send(self, command: Command) -> None:
        """Anything but a request: at once, behind what is held."""
        self._held.append(command)
        self._release()

    def _look(self) -> None:
        self._turns += 1
        now = self._clock()
        quiet = self._turns > QUIET_TURNS and now - self._latest >= QUIET_S
        if quiet or now - self._began >= LONGEST_S:
            self._release()
        else:
            self._next_look = asyncio.get_running_loop().call_soon(self._look)

    def _release(self) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None
        held, self._held = self._held, []
        self._send(held)
