"""Which rows of logits the device computes for a step, and which of them each wanted one is."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from castline.runtime.device_executor import DeviceStep

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepRows:
    tokens: Rows
    """[R'] packed tokens whose logits are computed: at least one."""
    drawn: Rows
    """[D] for each draw, its row of `tokens`; no part of the step's own arrays."""
    wanted: Rows
    """[W] for each row that the host gets, its row of `tokens`."""

    @property
    def num_drawn(self) -> int:
        """Rows up to the last that is drawn."""
        return int(self.drawn.max()) + 1 if len(self.drawn) else 0


def mixed_rows(step: DeviceStep, most: int) -> StepRows:
    """*most* is what the plan takes, a row a token. A token that is wanted twice, as the last of a prompt may be, is
    computed twice where that fits."""
    indices = step.tensors.logits_indices
    draws = step.draws["row"].copy()  # read when the step is collected
    if not len(indices):
        return StepRows(np.zeros(1, np.int64), draws, step.wanted)
    if len(indices) <= most:
        return StepRows(indices, draws, step.wanted)
    tokens, row = np.unique(indices, return_inverse=True)
    return StepRows(tokens, row[draws], row[step.wanted])


def decode_rows(step: DeviceStep) -> StepRows:
    """Every token has its row."""
    indices = step.tensors.logits_indices
    return StepRows(np.arange(len(step.tensors.input_ids)), indices[step.draws["row"]], indices[step.wanted])


def runs(rows: Rows) -> Iterator[tuple[int, int]]:
    """*rows* as (first, count) of consecutive ones, in order: each is one copy."""
    if len(rows):  # most steps want none
        for part in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1):
            yield int(part[0]), len(part)
