"""The header of a GGUF file: what a plan needs of it, in milliseconds and without a library.

Format: the GGUF specification of the ggml project, versions 2 and 3, little-endian. Arrays, which are the tokenizer's
and most of a header, are passed over.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from castline.engines.errors import BuildError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
MAX_DIMENSIONS = 4

Value = str | int | float | bool


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """``values`` are the scalars and strings, ``shapes`` the tensors' with the fastest dimension first."""

    values: dict[str, Value]
    arrays: frozenset[str]
    """Keys of what was passed over."""
    shapes: dict[str, tuple[int, ...]]


def read_gguf_header(path: Path) -> GgufHeader:
    """Raises BuildError for a file that is no GGUF file, or is cut short."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).header()
    except OSError as error:
        raise BuildError(f"load: {path} cannot be read: {error.strerror}") from None
    except (ValueError, struct.error, UnicodeDecodeError) as error:
        raise BuildError(f"load: {path} is not a GGUF file, or is cut short ({error}); fetch it again") from None


class _Reader:
    """A position in the file; every read is bounded by it."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def header(self) -> GgufHeader:
        if self._data[: len(MAGIC)] != MAGIC:
            raise ValueError("it does not begin with GGUF")
        self._at = len(MAGIC)
        version = self._scalar("I")
        if version not in VERSIONS:
            raise ValueError(f"version {version}, and castline reads {VERSIONS[0]} and {VERSIONS[1]}")
        num_tensors, num_values = self._scalar("Q"), self._scalar("Q")
        found = {self._string(): self._value(self._scalar("I")) for _ in range(num_values)}
        values = {key: value for key, value in found.items() if value is not None}
        shapes = dict(self._tensor() for _ in range(num_tensors))
        return GgufHeader(values, frozenset(found) - frozenset(values), shapes)

    def _tensor(self) -> tuple[str, tuple[int, ...]]:
        name, dimensions = self._string(), self._scalar("I")
        if dimensions > MAX_DIMENSIONS:
            raise ValueError(f"tensor {name} has {dimensions} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(dimensions))
        self._skip(4 + 8)  # type, offset
        return name, shape

    def _value(self, kind: int) -> Value | None:
        """A scalar or string; None for an array, which is passed over."""
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            return self._scalar(self._code(kind))
        element, count = self._scalar("I"), self._scalar("Q")
        if element in (STRING, ARRAY):
            for _ in range(count):
                self._skip(self._scalar("Q")) if element == STRING else self._value(ARRAY)
        else:
            self._skip(count * struct.calcsize(f"<{self._code(element)}"))
        return None

    def _code(self, kind: int) -> str:
        if kind not in SCALARS:
            raise ValueError(f"value type {kind} is unknown")
        return SCALARS[kind]

    def _scalar(self, code: str) -> int:
        (value,) = struct.unpack_from(f"<{code}", self._data, self._at)
        self._at += struct.calcsize(f"<{code}")
        return value  # type: ignore[no-any-return]

    def _string(self) -> str:
        start, size = self._at + 8, self._scalar("Q")
        self._skip(size)
        return self._data[start : self._at].decode()

    def _skip(self, size: int) -> None:
        if size > len(self._data) - self._at:
            raise ValueError(f"{size} bytes wanted at byte {self._at:,} of {len(self._data):,}")
        self._at += size
