"""A launch of a kernel whose arguments are given by name."""

from castline.engines.errors import EngineError
from castline.plugins.tensorrt.driver import LaunchValue
from castline.plugins.tensorrt.kernel_set import KernelSpec
from castline.plugins.tensorrt.launcher import Launch


def named_launch(kernel: KernelSpec, programs: int, **values: LaunchValue) -> Launch:
    """On a grid of one dimension. Raises EngineError where the kernel takes other arguments."""
    names = [argument.name for argument in kernel.arguments]
    if set(names) != set(values):
        raise EngineError(
            f"kernel {kernel.name} takes {', '.join(names)}, and this castline gives it {', '.join(values)}; "
            "rebuild the engine"
        )
    return Launch(kernel, (programs, 1, 1), tuple(values[name] for name in names))


def constant(kernel: KernelSpec, name: str) -> int:
    """What the kernel was compiled with. Raises EngineError where that is not known."""
    value = kernel.constants.get(name)
    if not isinstance(value, int):
        raise EngineError(f"kernel {kernel.name} has no constant {name}; rebuild the engine")
    return value
