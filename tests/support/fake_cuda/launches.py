"""What a launch must be: the kernel's own arguments, threads and shared memory, on a grid that there can be."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from castline.plugins.tensorrt.driver import LaunchValue
from castline.plugins.tensorrt.kernel_set import KernelSpec
from fake_cuda.hazards import DriverMisuse
from fake_cuda.kernels import Call, Reaches
from fake_cuda.work import Touch

MOST_THREADS = 1024
GRID_LIMITS = (2**31 - 1, 65535, 65535)
MOST_SHARED_BYTES = 227 << 10
UNKNOWN_BYTES = 1
"""What a kernel of which nothing is known is taken to touch at a pointer."""
INTEGERS = {"pointer": (0, 2**64 - 1), "i32": (-(2**31), 2**31 - 1), "i64": (-(2**63), 2**63 - 1)}

Arguments = Sequence[tuple[str, LaunchValue]]


@dataclass(frozen=True, slots=True)
class Function:
    module: int
    kernel: KernelSpec | None
    """None for a cubin of which nothing is known."""
    entry: str
    shared_bytes: int

    @property
    def name(self) -> str:
        return self.kernel.name if self.kernel else self.entry


def check_launch(
    known: Function, grid: tuple[int, int, int], threads: int, shared_bytes: int, arguments: Arguments
) -> Call | None:
    """The launch, where something is known of the kernel. Raises DriverMisuse."""
    what, kernel = f"launch of {known.name}", known.kernel
    if len(grid) != 3 or any(not 1 <= n <= most for n, most in zip(grid, GRID_LIMITS, strict=True)):
        raise DriverMisuse(f"{what}: grid {grid}")
    if threads % 32 or not 32 <= threads <= MOST_THREADS:
        raise DriverMisuse(f"{what}: {threads} threads")
    if not 0 <= shared_bytes <= known.shared_bytes:
        raise DriverMisuse(f"{what}: {shared_bytes} bytes of shared memory, and {known.shared_bytes} were allowed")
    for kind, value in arguments:
        _check_argument(what, kind, value)
    if kernel is None:
        return None
    if [kind for kind, _ in arguments] != [argument.type for argument in kernel.arguments]:
        raise DriverMisuse(f"{what}: arguments {arguments} for {kernel.arguments}")
    if (threads, shared_bytes) != (kernel.threads, kernel.shared_bytes):
        raise DriverMisuse(f"{what}: {threads} threads, {shared_bytes} bytes of shared memory; it has {kernel}")
    names = [argument.name for argument in kernel.arguments]
    return Call(kernel, grid, dict(zip(names, (value for _, value in arguments), strict=True)))


def touches(call: Call, reaches: Mapping[str, Callable[[Call], Reaches]]) -> tuple[Touch, ...]:
    """The bytes that the kernel reads and writes. Raises DriverMisuse for a launch that makes no sense."""
    found = reaches[call.kernel.name](call)
    pointers = {argument.name for argument in call.kernel.arguments if argument.type == "pointer"}
    call.expect(pointers == set(found), f"it is known of {sorted(found)} alone")
    return tuple(Touch(call.values[name], one.num_bytes, one.writes) for name, one in found.items() if one.num_bytes)


def unknown_touches(arguments: Arguments) -> tuple[Touch, ...]:
    """Every pointer leads to something."""
    return tuple(Touch(int(value), UNKNOWN_BYTES, False) for kind, value in arguments if kind == "pointer" and value)


def _check_argument(what: str, kind: str, value: Any) -> None:
    if kind == "f32" and isinstance(value, float):
        return
    if kind not in INTEGERS or not isinstance(value, int) or isinstance(value, bool):
        raise DriverMisuse(f"{what}: {value!r} as {kind}")
    low, high = INTEGERS[kind]
    if not low <= value <= high:
        raise DriverMisuse(f"{what}: {value} does not fit {kind}")
