"""Which of the two TensorRTs builds an engine: decided by the SKU, by what is installed, and by the GPU here."""

from collections.abc import Collection

from castline.engines.errors import EngineError
from castline.engines.manifest import Gpu, Target
from castline.engines.sku import Flavour, Sku, check_flavour

INSTALL = {
    "tensorrt": "pip install tensorrt",
    "tensorrt_rtx": "pip install --no-deps tensorrt_rtx_cu13_libs tensorrt_rtx_cu13_bindings",
}


def choose_flavour(sku: Sku, target: Target, installed: Collection[Flavour], gpu: Gpu | None) -> Flavour:
    """The flavour to build *sku*'s plan with. *target* ``tensorrt`` takes either, ``tensorrt_rtx`` only itself.

    TensorRT itself builds only on a machine with the GPU; TensorRT for RTX builds anywhere. Raises EngineError, in one
    line with the cure, where neither can.
    """
    check_flavour(sku, target)
    is_here = gpu is not None and gpu.sku == sku.name
    if target == "tensorrt" and is_here and "tensorrt" in installed:
        return "tensorrt"
    if "tensorrt_rtx" not in sku.flavours:
        found = "no GPU" if gpu is None else gpu.device_name
        lacking = [] if "tensorrt" in installed else [INSTALL["tensorrt"]]
        cure = [*lacking, *([] if is_here else [f"build on a machine with one (found {found})"])]
        raise EngineError(
            f"the plan for {sku.name} (compute capability {sku.compute_capability}) needs TensorRT and that GPU: "
            f"{', and '.join(cure)}; --kernels-only builds everything else here"
        )
    if "tensorrt_rtx" not in installed:
        raise EngineError(f"the plan for {sku.name} needs TensorRT for RTX: {INSTALL['tensorrt_rtx']}")
    return "tensorrt_rtx"
