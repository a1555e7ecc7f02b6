"""Tokens chosen on the device, and given to the next step there.

The kernels go over rows 0 .. n of the logits, where n is past the last row that is drawn: a row between that is not
drawn costs one pass over its logits, and its token is ignored.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from castline.plugins.contract import BLOCK_TABLE, INPUT_IDS, KV_LENS, POSITIONS, SLOT_MAPPING
from castline.plugins.tensorrt.launcher import Launch, Launcher
from castline.runtime.tensorrt.kernel_launch import constant, named_launch
from castline.runtime.tensorrt.step_inputs import (
    DRAW_OPTIONS,
    GIVEN,
    ITEM_BYTES,
    SOURCE,
    InputLayout,
    Packed,
)

_BELOW_ONE: Final = np.nextafter(np.float32(1), np.float32(0))
_LOWEST_TEMPERATURE: Final = 2.0**-100
"""Below it, one over the temperature is no float32: such a draw takes the best token, as it would anyway."""


def pack_draws(into: Packed, draws: NDArray[Any], rows: NDArray[np.int64], vocab_size: int) -> None:
    """The options of each of *draws*, in its row of *rows*; rows that are not drawn take the best token.

    Draws that have one row, because their rows of logits are those of one token, have the same options.
    """
    temperature = draws["temperature"]
    options = {
        "temperature": np.where(temperature < _LOWEST_TEMPERATURE, 0.0, temperature).astype(np.float32),
        "top_k": np.minimum(draws["top_k"], vocab_size),
        "top_p": draws["top_p"].astype(np.float32),
        "min_p": draws["min_p"].astype(np.float32),
        "uniform": np.minimum(draws["uniform"].astype(np.float32), _BELOW_ONE),
    }
    for name, values in options.items():
        into[name][:] = 0
        into[name][rows] = values
        assert (into[name][rows] == values).all(), "a token's row of logits is drawn from in two ways"


class DeviceSampler:
    """The kernels ``greedy``, ``sample`` and ``gather_inputs`` on one engine's buffers.

    *results* holds, after a step that draws from n rows, int32 tokens [n] and then int32 flags [n], 0 for a row with no
    token.
    """

    def __init__(self, launcher: Launcher, logits: int, results: int, inputs: int) -> None:
        """Device addresses; *inputs* is where a step's `InputLayout` begins. Raises EngineError for other kernels."""
        self._launcher = launcher
        self._logits, self._results, self._inputs = logits, results, inputs
        self._greedy = launcher.kernels.find("greedy")
        self._sample = launcher.kernels.find("sample")
        self._gather = launcher.kernels.find("gather_inputs")
        self._gather_width = constant(self._gather, "width")

    def gather(self, layout: InputLayout, stream: int) -> None:
        """Completes a packed step with the tokens that the step before drew."""
        sizes, at = layout.sizes, self._inputs
        self._launcher.launch(
            named_launch(
                self._gather,
                -(-sizes.sequences // self._gather_width),
                sampled=self._results,
                source=at + layout.offsets[SOURCE],
                given=at + layout.offsets[GIVEN],
                table=at + layout.offsets[BLOCK_TABLE],
                kv_lens=at + layout.offsets[KV_LENS],
                input_ids=at + layout.offsets[INPUT_IDS],
                positions=at + layout.offsets[POSITIONS],
                slots=at + layout.offsets[SLOT_MAPPING],
                batch=sizes.sequences,
                table_width=sizes.table_width,
            ),
            stream,
        )

    def draw(self, layout: InputLayout, rows: int, greedy: bool, stream: int) -> None:
        """Draws from rows 0 .. *rows* by the options in the layout, or takes the best token of each."""
        self._launcher.launch(self._draw_launch(layout, rows, greedy), stream)

    def _draw_launch(self, layout: InputLayout, rows: int, greedy: bool) -> Launch:
        common = {
            "logits": self._logits,
            "tokens": self._results,
            "finite": self._results + rows * ITEM_BYTES,
        }
        if greedy:
            return named_launch(self._greedy, rows, **common)
        options = {name: self._inputs + layout.offsets[name] for name in DRAW_OPTIONS}
        return named_launch(self._sample, rows, **common, **options)
