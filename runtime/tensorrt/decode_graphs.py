"""Decode steps as CUDA graphs: one for each of a few batch sizes, the next larger one serving those between.

A graph holds the shapes and the addresses that it was captured with, so a step's table of blocks has the width of the
longest sequence allowed. What is past a sequence's length is never read, nor copied to the device but between its rows;
the width only bounds into how many parts a long context may be cut (`castline.plugins.tensorrt.launcher.split_count`).

Each size has a context of its own: TensorRT lets a graph be launched only while the context that it was captured from
is left as it was. They share one scratch memory, for their passes follow each other on one stream.
"""

from bisect import bisect_left
from contextlib import suppress
from dataclasses import dataclass

from castline.engines.errors import EngineError
from castline.plugins.tensorrt.driver import Driver
from castline.plugins.tensorrt.engine import DECODE, PlanContext, PlanEngine
from castline.runtime.tensorrt.bindings import Bindings
from castline.runtime.tensorrt.step_inputs import InputLayout, StepSizes


def decode_sizes(most: int) -> list[int]:
    """1, 2, 4, 8, … and *most*."""
    sizes = []
    size = 1
    while size < most:
        sizes.append(size)
        size *= 2
    return [*sizes, most]


def decode_layout(size: int, table_width: int) -> InputLayout:
    return InputLayout.of(StepSizes(size, size, table_width, rows=size, drawn=size, gathered=size))


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    layout: InputLayout
    graph: int


class DecodeGraphs:
    def __init__(self, driver: Driver, stream: int) -> None:
        self._driver, self._stream = driver, stream
        self._graphs: list[DecodeGraph] = []

    def capture(self, engine: PlanEngine, bindings: Bindings, layout: InputLayout, scratch: int) -> None:
        """A graph for steps of *layout*, the largest so far; a step of that layout is on the device, and is executed.

        Raises EngineError.
        """
        context = engine.create_context(DECODE, scratch, self._stream, fixed_shapes=True)
        bindings.bind_fixed(context)
        bindings.bind_step(context, layout)
        self._graphs.append(DecodeGraph(layout, self._capture(context, layout.sizes.sequences)))

    def fitting(self, sequences: int) -> DecodeGraph:
        """The smallest for that many."""
        at = bisect_left(self._graphs, sequences, key=lambda one: one.layout.sizes.sequences)
        assert at < len(self._graphs), f"a decode of {sequences} sequences is over max_num_seqs"
        return self._graphs[at]

    def launch(self, graph: DecodeGraph) -> None:
        self._driver.launch_graph(graph.graph, self._stream)

    def close(self) -> None:
        """Nothing may be queued. A second call does nothing."""
        while self._graphs:
            self._driver.destroy_graph(self._graphs.pop().graph)

    def _capture(self, context: PlanContext, size: int) -> int:
        """A pass that is executed first does what TensorRT puts off until a shape is used."""
        try:
            context.enqueue(self._stream)
            self._driver.synchronize(self._stream)
            self._driver.begin_capture(self._stream)
            try:
                context.enqueue(self._stream)
            except BaseException:
                with suppress(EngineError):  # the stream must leave the capture, whatever became of it
                    self._driver.destroy_graph(self._driver.end_capture(self._stream))
                raise
            return self._driver.end_capture(self._stream)
        except EngineError as error:
            raise EngineError(f"a decode of {size} sequences cannot be captured as a CUDA graph: {error}") from error
