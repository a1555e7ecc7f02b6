"""Weight recipes on GPUs: what each allows itself to cost. What it weighs is `castline.engines.precision`'s to say."""

from typing import Final

from castline.builder.recipes import MatmulKernel, Recipe, Tolerance
from castline.builder.tensorrt.lower import Activations
from castline.engines.errors import BuildError
from castline.engines.precision import GPU_WEIGHTS, INT4_BLOCK

_HALF = MatmulKernel("half", 16)

# SmolLM2-135M over the 1,212 tokens of data/verify.txt, mean KL and top-1 agreement. fp16 0.00002, 99.8 % (with fp8 KV
# blocks 0.0061, 95.1 %); bf16 0.0010, 98.3 %; int4 0.458, 65.0 % (with fp8 KV blocks 0.470, 64.6 %).
# fp8, with fp8 KV blocks, 0.0289, 90.5 %; with the last layer's matmuls in e4m3 too 0.0343, 89.0 %. That is the type's
# three bits of mantissa, and no outlier's doing: weights alone cost 0.013 and activations alone 0.014, over all kinds
# of matmuls and all layers, and no scale gives a float more bits. Small models feel it most.
_WEIGHTS: Final = {
    "fp16": (_HALF, Tolerance(0.002, 0.98)),
    "bf16": (_HALF, Tolerance(0.01, 0.95)),
    "fp8": (MatmulKernel("e4m3", 8), Tolerance(0.05, 0.88)),
    "int4": (MatmulKernel("int4", 4, INT4_BLOCK), Tolerance(0.5, 0.6)),
}

GPU_RECIPES: Final = {
    name: Recipe(name, GPU_WEIGHTS[name].summary, (kernel,), (_HALF,), tolerance)
    for name, (kernel, tolerance) in _WEIGHTS.items()
}


def gpu_recipe(name: str) -> Recipe:
    """The recipe of that name. Raises BuildError listing the names there are."""
    try:
        return GPU_RECIPES[name]
    except KeyError:
        raise BuildError(f"--recipe {name!r} is not for GPUs; choose one of {', '.join(GPU_RECIPES)}") from None


def activations_of(recipe: str) -> Activations:
    """Type of the activations between matmuls."""
    return "bf16" if recipe == "bf16" else "fp16"
