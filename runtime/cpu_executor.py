"""The cpu target's executor: an ONNX Runtime session with its KV pool."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from castline.engines.capacity import kv_block_bytes
from castline.engines.errors import ProfileRefused
from castline.engines.manifest import Manifest
from castline.plugins.contract import StepTensors
from castline.plugins.cpu.operator_profile import OperatorRun
from castline.plugins.cpu.session import CpuSession, SessionOptions
from castline.runtime.client import EffectiveLimits
from castline.runtime.huge_pages import WEIGHTS_AT_ONCE, Settling
from castline.runtime.pool_growth import GrowthPolicy, PoolGrowth


class CpuExecutor:
    """Implements `castline.runtime.executor.Executor`. Owned by one thread."""

    def __init__(self, bundle: Path, manifest: Manifest, limits: EffectiveLimits, num_threads: int) -> None:
        """Loads the graph and reserves the pool, whose memory comes ahead of use. Raises EngineError."""
        model, block_size = manifest.model, limits.block_size
        block_bytes = kv_block_bytes(model.num_kv_heads, model.head_dim, block_size, manifest.precision.kv_dtype)
        policy = GrowthPolicy.of(limits, model.num_layers * block_bytes)
        self._session = CpuSession(
            bundle / manifest.graph_file,
            num_blocks=limits.num_blocks,
            block_size=block_size,
            block_bytes=block_bytes,
            num_provided=policy.growth,
            options=SessionOptions(num_threads=num_threads),
        )
        self._files = {path: _stamp(path) for path in (bundle / name for name in manifest.files)}
        self._settling: Settling | None = None
        self._growth = PoolGrowth(self._session.provide, limits.num_blocks, policy)
        self.vocab_size = self._session.vocab_size

    def on_first_use(self, block: int) -> None:
        """A step will write *block*, which none has before; blocks come in ascending order. Returns at once."""
        self._growth.on_first_use(block)

    @property
    def maxima(self) -> NDArray[np.float32] | None:
        return self._session.maxima

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        self._session.copy_blocks(copies)

    def execute(self, step: StepTensors) -> NDArray[np.float32]:
        return self._session.step(step)

    def rehearse(self, step: StepTensors) -> None:
        self._session.rehearse(step)

    def settle(self) -> None:
        """Puts huge pages under what steps read, in a thread of its own, from now on. Steps may run meanwhile."""
        self._settling = Settling(self._session.move_weights)

    def start_profile(self, prefix: str) -> None:
        """See CpuSession.start_profile. Weights that moved, or were to, move first; the heap then, as at a start.

        Raises ProfileRefused, and nothing has changed, where the engine could not be opened anew as it is.
        """
        for path, stamp in self._files.items():
            if _stamp(path) != stamp:
                raise ProfileRefused(
                    f"no profile begins, for {path} is not what was loaded: start the server again to record one"
                )
        self._stop_settling()
        self._session.start_profile(prefix)
        if self._settling is not None:
            while self._session.move_weights(WEIGHTS_AT_ONCE):
                pass
            self.settle()

    def end_profile(self) -> list[OperatorRun]:
        return self._session.end_profile()

    def close(self) -> None:
        self._stop_settling()  # first, both: they work on the session's memory
        self._growth.close()
        self._session.close()

    def _stop_settling(self) -> None:
        if self._settling is not None:
            self._settling.stop()
            self._settling.join()


def _stamp(path: Path) -> tuple[int, ...] | None:
    """Another one where the file was replaced or changed; None where there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
