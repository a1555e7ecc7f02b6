"""Page-locked memory whose every access through NumPy is seen: reads and writes by the host are checked against copies
that are still queued.

Views, slices and reshapes stay what they are; what is computed from them is ordinary. `np.asarray` leaves the sight of
this module; the driver then still finds a source that has changed before its copy, and a target reads as garbage.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fake_cuda.hazards import Touched


@dataclass(eq=False, slots=True)
class PinnedBuffer:
    data: NDArray[np.uint8]
    check: Callable[["PinnedBuffer", int, int, bool], None]
    """Called with a range of bytes that the host is about to read, or to write."""
    alive: bool = True
    touched: Touched = field(default_factory=Touched)
    address: int = field(init=False)

    def __post_init__(self) -> None:
        self.address = address_of(self.data)


class PinnedArray(np.ndarray):
    buffer: PinnedBuffer | None

    def __array_finalize__(self, made_from: Any) -> None:
        self.buffer = getattr(made_from, "buffer", None)

    def byte_range(self) -> tuple[int, int]:
        """In its buffer."""
        if not self.size:
            return 0, 0
        assert self.buffer is not None
        start = address_of(self) - self.buffer.address  # strides are positive: no view runs backwards here
        span = sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        return start, start + span + self.itemsize

    def plain(self) -> NDArray[Any]:
        return super().view(np.ndarray)

    def touch(self, writes: bool) -> None:
        if self.buffer is not None and self.size:
            self.buffer.check(self.buffer, *self.byte_range(), writes)

    def __getitem__(self, key: Any) -> Any:
        part = super().__getitem__(key)
        if _is_basic(key) and isinstance(part, PinnedArray):  # a view
            return part
        self.touch(writes=False)
        return part.plain() if isinstance(part, PinnedArray) else part

    def __setitem__(self, key: Any, value: Any) -> None:
        part = super().__getitem__(key) if _is_basic(key) else self
        (part if isinstance(part, PinnedArray) else self).touch(writes=True)
        self.plain()[key] = _read(value)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = (), **kwargs: Any) -> Any:
        for target in out:
            if isinstance(target, PinnedArray):
                target.touch(writes=True)
        plain_out = tuple(t.plain() if isinstance(t, PinnedArray) else t for t in out)
        extra = {"out": plain_out} if out else {}
        return getattr(ufunc, method)(*map(_read, inputs), **extra, **kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func is np.copyto and isinstance(args[0], PinnedArray):
            args[0].touch(writes=True)
            args = (args[0].plain(), *args[1:])
        return func(*_read(args), **_read(kwargs))


def _is_basic(key: Any) -> bool:
    """Basic indexing: it copies nothing."""
    parts = key if isinstance(key, tuple) else (key,)
    return all(part is None or part is Ellipsis or isinstance(part, int | np.integer | slice) for part in parts)


def _reading(name: str) -> Any:
    def method(self: PinnedArray, *args: Any, **kwargs: Any) -> Any:
        self.touch(writes=False)
        return getattr(self.plain(), name)(*args, **kwargs)

    return method


for _name in ("all", "any", "argmax", "astype", "copy", "item", "max", "min", "sum", "take", "tobytes", "tolist"):
    setattr(PinnedArray, _name, _reading(_name))


def _read(value: Any) -> Any:
    """*value* with every pinned array in it read."""
    if isinstance(value, PinnedArray):
        value.touch(writes=False)
        return value.plain()
    if isinstance(value, list | tuple):
        return type(value)(_read(one) for one in value)
    if isinstance(value, dict):
        return {key: _read(one) for key, one in value.items()}
    return value


def pinned_array(buffer: PinnedBuffer) -> PinnedArray:
    array = buffer.data.view(PinnedArray)
    array.buffer = buffer
    return array


def address_of(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
