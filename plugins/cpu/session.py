"""An ONNX Runtime session over a cpu engine's graph, with its KV pool: the builder verifies, the runtime serves."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter_ns, time_ns
from typing import Any, Final

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from castline.engines.errors import EngineError
from castline.plugins.contract import LOGITS, LOGITS_MAXIMA, StepTensors, kv_pool_name
from castline.plugins.cpu.kv_memory import KvMemory
from castline.plugins.cpu.library import active_isa, library, library_path, rehearsal
from castline.plugins.cpu.operator_profile import OperatorRun, read_profile
from castline.plugins.cpu.step_binding import StepBinding

_ERROR_LEVEL: Final = 3
_NUM_THREADS: Final = "castline.num_threads"
"""What the plugin reads of a session's configuration (native/plugin.cpp)."""


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """How a session runs."""

    num_threads: int = 0
    """Threads of a step, the caller's included, for which nodes cut their work; 0 takes one a physical core, and nodes
    cut their work as for one a hardware thread."""
    spinning: bool = True
    """Threads wait for the next node of a running step by spinning (1.6 times faster at batch 1). Between steps they
    always sleep, so that an idle engine uses no CPU and the server's own threads have the cores."""
    config: Mapping[str, str] = field(default_factory=dict)
    """Further session configuration entries of ONNX Runtime."""
    profile_prefix: str | None = None
    """Write ONNX Runtime's profile, a JSON file whose name begins so, when the session is closed. A profile keeps
    every run in memory: `CpuSession.start_profile` is for sessions that live long."""


class CpuSession:
    """An engine graph and a zeroed pool of *num_blocks* KV blocks, of *block_size* tokens and *block_bytes* a layer.

    Not thread-safe: one step at a time. Raises EngineError where the graph, the library or the memory is not as needed.
    """

    num_layers: int
    vocab_size: int
    maxima: NDArray[np.float32] | None = None
    """The last step's `LOGITS_MAXIMA` [R, blocks], valid as long as its logits; None where the graph has none."""

    def __init__(
        self,
        graph: Path | bytes,
        *,
        num_blocks: int,
        block_size: int,
        block_bytes: int,
        num_provided: int | None = None,
        options: SessionOptions | None = None,
    ) -> None:
        """The first *num_provided* blocks are given memory at once, None all; the others by `provide`."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.block_bytes = block_bytes
        self._graph = graph
        self._options = options or SessionOptions()
        self._open_or_closed = threading.Lock()
        """Held while weights move: ONNX Runtime unmaps their file first of all when a session closes."""
        self._session: Any
        self._session, self._weights = _open(graph, self._options)
        self._profiling = self._options.profile_prefix is not None
        inputs = {i.name: i.shape for i in self._session.get_inputs()}
        self.num_layers = _check_pool_inputs(inputs, block_bytes)
        self.vocab_size = _vocab_size(self._session)
        self._inputs = frozenset(inputs)
        self._num_maxima = _last_size(self._session, LOGITS_MAXIMA)
        _check_slots(num_blocks, self.num_layers, block_size)
        self._memory: KvMemory | None = KvMemory(num_blocks, self.num_layers, block_bytes)
        self.provide(0, num_blocks if num_provided is None else num_provided)
        self._binding: StepBinding | None = self._bind()

    @property
    def pool(self) -> NDArray[np.uint8]:
        """[num_blocks, num_layers, block_bytes]; empty once the session is closed."""
        return np.empty((0, 0, 0), np.uint8) if self._memory is None else self._memory.pool

    def provide(self, begin: int, end: int) -> bool:
        """See `KvMemory.provide`; the session must stay open meanwhile."""
        return self._memory is not None and self._memory.provide(begin, end)

    def move_weights(self, enough: int) -> int:
        """Copies weights that lie in mapped files into huge pages, until *enough* bytes are copied; how many were.

        0: none are left, or the session is closed. Any thread may call it while steps run, which compute the same; the
        interpreter is free meanwhile. What the process holds stays the same: the files' pages go back to the system.
        """
        with self._open_or_closed:
            return 0 if self._session is None else int(library().castline_move_weights(self._weights, enough))

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies whole KV blocks (source, destination) in every layer, in order."""
        pool = self.pool
        for source, destination in copies:
            if not (0 <= source < self.num_blocks and 0 <= destination < self.num_blocks):
                raise EngineError(f"block copy {source} -> {destination}: the pool has {self.num_blocks} blocks")
            pool[destination] = pool[source]

    def step(self, tensors: StepTensors) -> NDArray[np.float32]:
        """Runs one forward pass; logits [R, vocab_size], valid until the next call. Raises EngineError.

        A step that fails may have written its own slots of the pool, and nothing else.
        """
        binding = self._binding
        if binding is None:
            raise EngineError("the session is closed")
        binding.feed(tensors)
        logits, self.maxima = binding.outputs(len(tensors.logits_indices))
        try:
            self._session.run_with_iobinding(binding.native)
        except Exception as error:  # onnxruntime's own types share no base but Exception
            raise EngineError(f"the step failed: {error}") from error
        return logits

    def rehearse(self, tensors: StepTensors) -> None:
        """Takes the memory of such a step from the system, so that the first one does not, in a fraction of its time.

        Nodes of castline's compute nothing meanwhile, and nothing is written to the pool. Raises EngineError.
        """
        with rehearsal():
            self.step(tensors)

    def start_profile(self, prefix: str) -> None:
        """From the next step on, ONNX Runtime notes the time of every node; `end_profile` gives the notes.

        It can be told so only when it opens a graph, so the graph is opened anew: the next step meets a cold session.
        The pool and what is in it stay.
        """
        if self._session is None:
            raise EngineError("the session is closed")
        with self._open_or_closed:
            self._session = self._binding = None  # first: two sessions would be in memory at once
            self._session, self._weights = _open(self._graph, replace(self._options, profile_prefix=prefix))
        self._profiling = True
        self._binding = self._bind()

    def end_profile(self) -> list[OperatorRun]:
        """The steps since `start_profile`, in order. Steps after it run at full speed again."""
        clocks = perf_counter_ns() - time_ns()  # ONNX Runtime's clock is the system's
        start_ns = self._session.get_profiling_start_time_ns() + clocks
        path = Path(self._session.end_profiling())
        self._profiling = False
        try:
            return read_profile(path, start_ns, self.vocab_size)
        finally:
            path.unlink(missing_ok=True)  # gone with its directory: reading it says so

    def close(self) -> None:
        """Releases the session, its threads and the pool, and writes the profile if one was asked for."""
        if self._session is None:
            return
        if self._profiling:
            self._session.end_profiling()
        with self._open_or_closed:
            self._binding = self._session = None
        self.maxima = self._memory = None

    def __enter__(self) -> "CpuSession":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _bind(self) -> StepBinding:
        return StepBinding(self._session, self._inputs, self.pool, self.block_size, self.vocab_size, self._num_maxima)


def native_options(options: SessionOptions) -> Any:
    """ONNX Runtime's own options for *options*, with the plugin registered; what is timed runs as what is served."""
    native = onnxruntime.SessionOptions()
    native.log_severity_level = _ERROR_LEVEL
    native.intra_op_num_threads = options.num_threads
    if options.num_threads > 0:
        native.add_session_config_entry(_NUM_THREADS, str(options.num_threads))
    native.register_custom_ops_library(str(library_path()))  # which reads the number
    native.inter_op_num_threads = 1
    native.add_session_config_entry("session.intra_op.allow_spinning", "1" if options.spinning else "0")
    native.add_session_config_entry("session.force_spinning_stop", "1")
    for key, value in options.config.items():
        native.add_session_config_entry(key, value)
    if options.profile_prefix is not None:
        native.enable_profiling = True
        native.profile_file_prefix = options.profile_prefix
    return native


def _open(graph: Path | bytes, options: SessionOptions) -> tuple[Any, int]:
    """A session, and the number of its weights' group (see native/resident.h)."""
    active_isa()  # refuses a CASTLINE_ISA that the host lacks before a graph is read
    native = native_options(options)
    source = graph if isinstance(graph, bytes) else str(graph)
    weights = int(library().castline_begin_watching())
    try:
        return onnxruntime.InferenceSession(source, native, providers=["CPUExecutionProvider"]), weights
    except Exception as error:  # onnxruntime's own types share no base but Exception
        name = "the graph" if isinstance(graph, bytes) else str(graph)
        raise EngineError(f"onnxruntime cannot load {name}: {error}") from error
    finally:
        library().castline_end_watching()


def _check_pool_inputs(inputs: Mapping[str, list[int | str]], block_bytes: int) -> int:
    """Number of layers, from the pool inputs; raises EngineError where their shape disagrees with *block_bytes*."""
    layers = 0
    while (name := kv_pool_name(layers)) in inputs:
        declared = inputs[name][-1]
        if isinstance(declared, int) and declared != block_bytes:
            raise EngineError(f"graph input {name} has blocks of {declared} bytes, the engine of {block_bytes}")
        layers += 1
    if layers == 0:
        raise EngineError(f"the graph has no input {kv_pool_name(0)}: it is not a castline engine for the cpu target")
    return layers


def _vocab_size(session: Any) -> int:
    size = _last_size(session, LOGITS)
    if size is None:
        raise EngineError(f"the graph has no output {LOGITS} [R, vocab_size] with a fixed vocab_size")
    return size


def _last_size(session: Any, name: str) -> int | None:
    """Fixed size of the last axis of an output, if there is such an output."""
    size = {o.name: o.shape for o in session.get_outputs()}.get(name, [None])[-1]
    return size if isinstance(size, int) else None


def _check_slots(num_blocks: int, num_layers: int, block_size: int) -> None:
    """A graph's slots are int32, and number every layer's (`castline.plugins.cpu.step_binding`)."""
    slots, most = num_blocks * num_layers * block_size, np.iinfo(np.int32).max
    if slots > most:
        raise EngineError(
            f"a KV pool of {num_blocks} blocks of {block_size} tokens in {num_layers} layers has {slots:,} slots, and "
            f"the kernels count up to {most:,}: ask for at most {most // (num_layers * block_size)} blocks"
        )
