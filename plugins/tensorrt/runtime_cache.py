"""Kernels that TensorRT for RTX compiled when contexts were made, kept for the next start.

It checks a file against its own version, the GPU and the driver, and takes nothing of one that is not its own. A file
that cannot be read or written only makes a start slower.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from castline.plugins.tensorrt.flavour import TensorRT


class RuntimeCache:
    def __init__(self, tensorrt: TensorRT, engine: Any, path: Path | None) -> None:
        """Reads *path*, if it is there. None keeps nothing; nor does TensorRT itself, which compiles at the build."""
        self._path = path
        self.handle = tensorrt.create_runtime_cache(engine) if path is not None else None
        """To be given to every context; None where nothing is kept."""
        self._read = b""
        if self.handle is not None and path is not None:
            with suppress(OSError):
                self._read = path.read_bytes()
            if self._read:
                self.handle.deserialize(self._read)

    def save(self) -> None:
        """Once the contexts have been made; a process that reads meanwhile sees the old file or the new one."""
        if self.handle is None or self._path is None:
            return
        found = bytes(memoryview(self.handle.serialize()))
        if found == self._read:
            return
        draft = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(found)
            draft.replace(self._path)
