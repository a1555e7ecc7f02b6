"""A TensorRT plan deserialised, with castline's attention plugin in it: `PlanEngine` over either flavour."""

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from castline.engines.errors import EngineError
from castline.plugins.tensorrt.engine import MIXED, PlanTensor
from castline.plugins.tensorrt.flavour import TensorRT
from castline.plugins.tensorrt.plugin import PluginHost, register_plugin
from castline.plugins.tensorrt.runtime_cache import RuntimeCache

_SHOWN_ERRORS = 3


class TensorRtPlan:
    """Implements `castline.plugins.tensorrt.engine.PlanEngine`. The driver's context is current in this thread."""

    def __init__(self, tensorrt: TensorRT, path: Path, host: PluginHost, compiled: Path | None = None) -> None:
        """Deserialises *path*; *host* has the launcher of its kernels, and what TensorRT compiles for contexts is kept
        in *compiled*. Raises EngineError in TensorRT's words."""
        self._tensorrt, self._host = tensorrt, host
        self._log = make_log(tensorrt.api)
        self._creator = register_plugin(tensorrt, host)
        self._runtime = tensorrt.api.Runtime(self._log)
        self._engine = self._deserialize(path)
        self._cache = RuntimeCache(tensorrt, self._engine, compiled)
        self._contexts: list[_Context] = []
        self.tensors: Mapping[str, PlanTensor] = dict(self._describe(i) for i in range(self._engine.num_io_tensors))
        self.scratch_bytes = int(self._engine.device_memory_size_v2)

    def create_context(self, profile: int, scratch: int, stream: int, *, fixed_shapes: bool) -> "_Context":
        made = self._tensorrt.create_context(self._engine, fixed_shapes, self._cache.handle)
        if made is None:
            raise EngineError(self._log.explain("an execution context cannot be made"))
        made.set_device_memory(scratch, self.scratch_bytes)
        if not made.set_optimization_profile_async(profile, stream):
            raise EngineError(self._log.explain(f"the plan has no profile {profile}; rebuild the engine"))
        context = _Context(made, self._log, self._host)
        self._contexts.append(context)
        return context

    def keep_compiled(self) -> None:
        """Once every context has run: the next start compiles nothing again."""
        self._cache.save()

    def close(self) -> None:
        """TensorRT releases an object with its last reference: contexts before the engine, and that before its
        runtime."""
        for context in self._contexts:
            context.release()
        self._contexts.clear()
        self._cache.handle = None
        self._engine = None
        self._runtime = None

    def _deserialize(self, path: Path) -> Any:
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as plan:
                engine = self._runtime.deserialize_cuda_engine(plan)
        except (OSError, ValueError) as error:  # mmap's for an empty file
            raise EngineError(f"cannot read {path} ({error}); rebuild the engine") from None
        if engine is None:
            raise EngineError(self._log.explain(f"{self._tensorrt.flavour} cannot deserialise {path}"))
        return engine

    def _describe(self, index: int) -> tuple[str, PlanTensor]:
        engine, api = self._engine, self._tensorrt.api
        name = engine.get_tensor_name(index)
        is_input = engine.get_tensor_mode(name) == api.TensorIOMode.INPUT
        shape = engine.get_tensor_profile_shape(name, MIXED)[2] if is_input else engine.get_tensor_shape(name)
        return name, PlanTensor(is_input, engine.get_tensor_dtype(name).name.lower(), tuple(int(n) for n in shape))


class _Context:
    def __init__(self, context: Any, log: Any, host: PluginHost) -> None:
        self._context, self._log, self._host = context, log, host

    def bind(self, name: str, address: int, shape: tuple[int, ...] | None = None) -> None:
        if shape is not None and not self._context.set_input_shape(name, shape):
            raise EngineError(self._log.explain(f"the plan does not take {name} of shape {list(shape)}"))
        if not self._context.set_tensor_address(name, address):
            raise EngineError(self._log.explain(f"the plan does not take {name} at {address:#x}"))

    def enqueue(self, stream: int) -> None:
        """An exception of the plugin's does not come through TensorRT: the host keeps it."""
        self._host.failure = None
        queued = self._context.execute_async_v3(stream)
        failure = self._host.failure
        if failure is not None:
            raise EngineError(f"the attention plugin failed: {failure}") from failure
        if not queued:
            raise EngineError(self._log.explain("TensorRT could not queue a step"))

    def release(self) -> None:
        self._context = None


def make_log(api: Any) -> Any:
    """Keeps the errors that TensorRT reports, for the exception that follows them; prints none."""

    class Log(api.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (api.ILogger.Severity.ERROR, api.ILogger.Severity.INTERNAL_ERROR):
                self.errors.append(message)

        def explain(self, what: str) -> str:
            """*what*, with the errors since the last explanation."""
            said, self.errors = self.errors, []
            return f"{what}: {'; '.join(said[-_SHOWN_ERRORS:]) or 'TensorRT gave no reason'}"

    return Log()
