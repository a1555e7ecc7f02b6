"""The one module that knows how TensorRT and TensorRT for RTX differ: names, what each can build for, and where.

Which of the two builds an engine is `castline.engines.flavour.choose_flavour`'s to say. Their Python modules have one
API, so that everything else takes a `TensorRT` and asks it.
"""

import os
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from castline.engines.check import TOOL_DISTRIBUTIONS
from castline.engines.errors import EngineError
from castline.engines.flavour import INSTALL
from castline.engines.sku import Flavour

MODULES: Final[dict[Flavour, str]] = {"tensorrt": "tensorrt", "tensorrt_rtx": "tensorrt_rtx_bindings"}
LIBRARIES: Final[dict[Flavour, tuple[str, str]]] = {
    "tensorrt": ("tensorrt_libs", "libnvinfer.so"),
    "tensorrt_rtx": ("tensorrt_rtx_libs", "libtensorrt_rtx.so"),
}
"""Package that holds the library, and the library's name without a version."""


@dataclass(frozen=True, slots=True)
class TensorRT:
    """One of the two, imported."""

    flavour: Flavour
    api: Any
    """Its Python module."""
    version: str
    """Of the distribution that is installed: what a manifest records."""

    @property
    def builds_without_gpu(self) -> bool:
        return self.flavour == "tensorrt_rtx"

    @property
    def has_timing_cache(self) -> bool:
        """TensorRT for RTX chooses kernels on the user's machine; its calls for a timing cache do nothing."""
        return self.flavour == "tensorrt"

    def create_network(self, builder: Any) -> Any:
        """A strongly typed network: the types of the graph are the types that run."""
        flag = getattr(self.api.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
        return builder.create_network(0 if flag is None else 1 << int(flag))

    def target(self, config: Any, compute_capability: str) -> None:
        """Makes *config* build for a GPU that need not be here. Raises EngineError where this flavour cannot.

        TensorRT itself builds for the GPU in this machine and has nothing to set.
        """
        if not self.builds_without_gpu:
            return
        capability = getattr(self.api.ComputeCapability, f"SM{compute_capability.replace('.', '')}", None)
        config.num_compute_capabilities = 1
        if capability is None or not config.set_compute_capability(capability, 0):
            raise EngineError(
                f"TensorRT for RTX {self.version} does not build for compute capability {compute_capability}; it does "
                f"for {', '.join(self.compute_capabilities())}"
            )

    def require_user_memory(self, config: Any) -> None:
        """Makes a plan take all of its memory from who runs it, where the flavour asks: only then can a stream be
        captured."""
        flag = getattr(self.api.BuilderFlag, "REQUIRE_USER_ALLOCATION", None)
        if flag is not None:
            config.set_flag(flag)

    def create_runtime_cache(self, engine: Any) -> Any:
        """Of what is compiled for contexts; None for TensorRT itself, which compiles nothing then."""
        config = engine.create_runtime_config() if hasattr(self.api, "IRuntimeCache") else None
        return None if config is None else config.create_runtime_cache()

    def create_context(self, engine: Any, fixed_shapes: bool, cache: Any = None) -> Any:
        """An execution context with no memory of its own, whose kernels are looked for in *cache* and put there; None
        where TensorRT refuses.

        TensorRT for RTX compiles kernels for the shapes that it meets, by default in the background: then steps would
        compete with its compiler, and a graph would hold the kernels that were to be replaced. So it does that at once
        where shapes are fixed, and never where they vary.
        """
        user_managed = self.api.ExecutionContextAllocationStrategy.USER_MANAGED
        strategies = getattr(self.api, "DynamicShapesKernelSpecializationStrategy", None)
        if strategies is None:
            return engine.create_execution_context(user_managed)
        config = engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(user_managed)
        config.dynamic_shapes_kernel_specialization_strategy = strategies.EAGER if fixed_shapes else strategies.NONE
        if cache is not None:
            config.set_runtime_cache(cache)
        return engine.create_execution_context(config)

    def compute_capabilities(self) -> list[str]:
        """What the flavour names as targets of a build."""
        members = getattr(self.api, "ComputeCapability", None)
        names = [name for name in getattr(members, "__members__", {}) if name.startswith("SM")]
        return [f"{name[2:-1]}.{name[-1]}" for name in names]


def installed_flavours() -> tuple[Flavour, ...]:
    """Those whose module and library are both there, without importing them."""
    return tuple(flavour for flavour in MODULES if _module(flavour) is not None and flavour_version(flavour))


def flavour_version(flavour: Flavour) -> str | None:
    """Version of the installed distribution, under any of the names it is published by."""
    for distribution in TOOL_DISTRIBUTIONS[flavour]:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


@cache
def load_flavour(flavour: Flavour) -> TensorRT:
    """Imports it. Raises EngineError with the command that installs it."""
    found = flavour_version(flavour)
    try:
        return TensorRT(flavour, import_module(MODULES[flavour]), found or "")
    except (ImportError, OSError) as error:
        raise EngineError(f"{MODULES[flavour]} cannot be imported ({error}): {INSTALL[flavour]}") from None


def link_libraries(flavour: Flavour, directory: Path) -> None:
    """Makes the flavour's library known in *directory* by its name without a version.

    The ONNX parser loads it by that name when it meets the first plugin, and the wheels have only the versioned name:
    without the link on the loader's path the process dies.
    """
    package, name = LIBRARIES[flavour]
    spec = find_spec(package)
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        versioned = sorted(Path(place).glob(f"{name}.*"), key=lambda path: len(path.name))
        if versioned:
            os.symlink(versioned[0], directory / name)
            return


def _module(flavour: Flavour) -> Any:
    try:
        return find_spec(MODULES[flavour])
    except (ImportError, ValueError):
        return None
