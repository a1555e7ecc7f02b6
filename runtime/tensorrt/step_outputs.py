"""What comes back to the host: tokens, and the rows of logits that were asked for, in pinned memory.

The output of a step must last until the second submission after it was collected, and up to `MAX_IN_FLIGHT` steps are
submitted meanwhile: so there is one slot more than steps in flight.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from castline.plugins.cpu.sampling import NO_TOKEN
from castline.plugins.tensorrt.driver import Driver
from castline.runtime.device_executor import MAX_IN_FLIGHT, StepOutput
from castline.runtime.tensorrt.device_memory import DeviceMemory
from castline.runtime.tensorrt.step_inputs import ITEM_BYTES
from castline.runtime.tensorrt.step_rows import StepRows, runs

NUM_SLOTS: Final = MAX_IN_FLIGHT + 1
PINNED_LOGITS_BYTES: Final = 64 << 20
"""Of each slot at least, as far as a step has so many rows; a row for each sequence of a step fits always. Only the
log-probabilities of long prompts want more at once: those are waited for, piece by piece."""
RESULT_BYTES: Final = 2 * ITEM_BYTES
"""Of a drawn row: token and flag."""


@dataclass(frozen=True, slots=True)
class PendingOutput:
    """Of a step that was submitted. What it holds may be read when *event* has happened."""

    event: int
    results: NDArray[np.uint8]
    """Tokens and flags of the rows up to the last drawn."""
    rows: StepRows
    logits: NDArray[np.float32]

    def read(self) -> StepOutput:
        tokens, finite = self.results.view(np.int32).reshape(2, -1)
        drawn = self.rows.drawn
        chosen = np.where(finite[drawn] != 0, tokens[drawn].astype(np.int64), NO_TOKEN)
        return StepOutput(chosen, self.logits)


class StepOutputs:
    def __init__(
        self, driver: Driver, memory: DeviceMemory, max_rows: int, max_sequences: int, vocab_size: int
    ) -> None:
        self.results = memory.allocate("tokens", max_rows * RESULT_BYTES)
        """Device address: tokens of the rows drawn last, and then their flags."""
        self.logits = memory.allocate("logits", max_rows * vocab_size * ITEM_BYTES)
        """Device address, float32 [max_rows, vocab_size]."""
        self._driver, self._vocab_size = driver, vocab_size
        self._row_bytes = vocab_size * ITEM_BYTES
        self._pinned_rows = min(max_rows, max(max_sequences, PINNED_LOGITS_BYTES // self._row_bytes))
        self._events = [memory.create_event() for _ in range(NUM_SLOTS)]
        self._tokens = [memory.allocate_pinned("tokens", max_rows * RESULT_BYTES) for _ in range(NUM_SLOTS)]
        size = self._pinned_rows * self._row_bytes
        self._pinned = [memory.allocate_pinned("logits", size) for _ in range(NUM_SLOTS)]

    def queue(self, ticket: int, rows: StepRows, stream: int) -> PendingOutput:
        """Queues the copies of a step whose kernels are queued; the event happens after them.

        Waits for the device only where more logits are wanted than a slot holds.
        """
        slot = ticket % NUM_SLOTS
        results = self._tokens[slot][: rows.num_drawn * RESULT_BYTES]
        if len(results):
            self._driver.copy_to_host(results, self.results, stream)
        if len(rows.wanted) <= self._pinned_rows:
            logits = self._copy_logits(rows.wanted, self._pinned[slot], stream)
        else:
            logits = self._fetch_logits(rows, self._pinned[slot], stream)
        self._driver.record(self._events[slot], stream)
        return PendingOutput(self._events[slot], results, rows, logits)

    def _copy_logits(self, rows: NDArray[np.int64], into: NDArray[np.uint8], stream: int) -> NDArray[np.float32]:
        end = 0
        for first, count in runs(rows):
            target = into[end : end + count * self._row_bytes]
            self._driver.copy_to_host(target, self.logits + first * self._row_bytes, stream)
            end += count * self._row_bytes
        return into[:end].view(np.float32).reshape(len(rows), self._vocab_size)

    def _fetch_logits(self, rows: StepRows, through: NDArray[np.uint8], stream: int) -> NDArray[np.float32]:
        logits = np.empty((len(rows.wanted), self._vocab_size), np.float32)
        for start in range(0, len(logits), self._pinned_rows):
            part = rows.wanted[start : start + self._pinned_rows]
            piece = self._copy_logits(part, through, stream)
            self._driver.synchronize(stream)
            logits[start : start + len(part)] = piece
        return logits
