"""What a build for a GPU aims at: SKU, flavour, whether a plan can be had, and the GPU that is here."""

from dataclasses import dataclass, replace

from castline.builder.options import BuildOptions
from castline.engines.errors import EngineError
from castline.engines.flavour import choose_flavour
from castline.engines.gpu import detect_gpu
from castline.engines.host import detect_host
from castline.engines.manifest import Gpu, Host
from castline.engines.sku import Flavour, Sku, load_sku
from castline.plugins.tensorrt.flavour import installed_flavours


@dataclass(frozen=True, slots=True)
class GpuTarget:
    sku: Sku
    flavour: Flavour
    """Of the plan; without one, of that which will be built."""
    has_plan: bool
    gpu: Gpu | None = None
    """In this machine, where it is of the SKU."""
    lacking: str = ""
    """Why no plan could be built here; empty where none was asked for."""

    def host(self) -> Host:
        """As a manifest records it. An engine for a GPU runs on any processor."""
        name = self.gpu.device_name if self.gpu is not None else ""
        return replace(detect_host(self.flavour), isa=(), gpu=Gpu(self.sku.name, name, self.sku.compute_capability))


def choose_target(options: BuildOptions) -> GpuTarget:
    """Decides before anything long. Raises EngineError in one line where the plan cannot be built here."""
    assert options.sku is not None
    sku = load_sku(options.sku)
    found = detect_gpu()
    gpu = found.manifest() if found is not None else None
    here = gpu if gpu is not None and gpu.sku == sku.name else None
    try:
        flavour = choose_flavour(sku, options.target, installed_flavours(), gpu)
    except EngineError as error:
        if not options.kernels_only:
            raise
        return GpuTarget(sku, sku.flavours[0], has_plan=False, gpu=here, lacking=str(error))
    return GpuTarget(sku, flavour, has_plan=not options.kernels_only, gpu=here)
