"""The native library of the cpu target: where it is, whether it is the right one, and whether it works.

The environment variable ``CASTLINE_ISA`` (portable, avx2, avxvnni, avx512, avx512fp16 or amx) chooses the kernels of
nodes that are created afterwards.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Final

from castline.engines.errors import EngineError
from castline.engines.hashing import sha256_file
from castline.engines.manifest import Plugin

PLUGIN_NAME: Final = "castline_cpu"
PLUGIN_VERSION: Final = "4"
"""Version of the node's contract and of the block layout; the pair of castline_plugin_version() in plugin.cpp."""
MIN_ONNXRUNTIME: Final = (1, 23)

_LIBRARY_PATH: Final = Path(__file__).with_name("libcastline_cpu.so")
_REBUILD: Final = "reinstall castline, or run `python setup.py build_ext --inplace` in its source tree"


def library_path() -> Path:
    """Path of the native library, checked to exist and to be of this castline's version. Raises EngineError."""
    _load()
    return _LIBRARY_PATH


def library() -> ctypes.CDLL:
    """The native library, checked as `library_path` does, for those who call its functions. Raises EngineError."""
    return _load()


def describe() -> Plugin:
    """What a manifest records of the plugin."""
    return Plugin(PLUGIN_NAME, PLUGIN_VERSION, library_sha256())


@cache
def library_sha256() -> str:
    """Of the file as it lies there: nothing is loaded. Raises EngineError."""
    try:
        return sha256_file(_LIBRARY_PATH)
    except OSError:
        raise _missing(_LIBRARY_PATH) from None


def available_isas() -> tuple[str, ...]:
    """Instruction sets whose kernels this host can run, widest first."""
    return tuple(_load().castline_available_isas().decode().split(","))


def active_isa() -> str:
    """Instruction set whose kernels a session opened now uses. Raises EngineError where CASTLINE_ISA is refused."""
    name = _load().castline_active_isa()
    if name is None:
        raise EngineError(f"CASTLINE_ISA names kernels this host lacks; it has {', '.join(available_isas())}")
    return str(name.decode())


def has_wide_kernels() -> bool:
    """Whether the Linear nodes of a session opened now have wide kernels. Raises EngineError as `active_isa`."""
    return active_isa() == "amx"


@contextmanager
def rehearsal() -> Iterator[None]:
    """Nodes that this thread runs meanwhile take the memory of their step, touch it, and compute and write nothing."""
    _load().castline_set_rehearsing(True)
    try:
        yield
    finally:
        _load().castline_set_rehearsing(False)


@cache
def _load() -> ctypes.CDLL:
    import onnxruntime  # here: checking a manifest needs no runtime, and a server's own process never loads one

    _check_onnxruntime(onnxruntime.__version__)
    return _open_library(_LIBRARY_PATH)


def _missing(path: Path) -> EngineError:
    return EngineError(f"plugin {PLUGIN_NAME}: wanted version {PLUGIN_VERSION}, found no library at {path}; {_REBUILD}")


def _check_onnxruntime(version: str) -> None:
    found = tuple(int(part) for part in version.split(".")[:2])
    if found < MIN_ONNXRUNTIME:
        wanted = ".".join(map(str, MIN_ONNXRUNTIME))
        raise EngineError(f"plugin {PLUGIN_NAME}: wants onnxruntime {wanted} or newer, found {version}; upgrade it")


def _open_library(path: Path) -> ctypes.CDLL:
    """Opens the library at *path* and checks its version. Raises EngineError naming plugin, wanted and found."""
    if not path.exists():
        raise _missing(path)
    try:
        library = ctypes.CDLL(str(path))
        for function in ("castline_plugin_version", "castline_available_isas", "castline_active_isa"):
            getattr(library, function).restype = ctypes.c_char_p
        found = library.castline_plugin_version().decode()
        if found == PLUGIN_VERSION:
            library.castline_begin_watching.restype = ctypes.c_uint64
            library.castline_end_watching.restype = None
            library.castline_set_rehearsing.argtypes = (ctypes.c_bool,)
            library.castline_set_rehearsing.restype = None
            library.castline_move_weights.argtypes = (ctypes.c_uint64, ctypes.c_size_t)
            library.castline_move_weights.restype = ctypes.c_size_t
    except (OSError, AttributeError, UnicodeDecodeError) as error:
        raise EngineError(
            f"plugin {PLUGIN_NAME}: wanted version {PLUGIN_VERSION}, found a file that is not the plugin at {path} "
            f"({error}); {_REBUILD}"
        ) from None
    if found != PLUGIN_VERSION:
        raise EngineError(
            f"plugin {PLUGIN_NAME}: wanted version {PLUGIN_VERSION}, found version {found} at {path}; {_REBUILD}"
        )
    return library
