"""Weight recipes on GPUs: what each allows itself to cost. What it weighs is `castline.engines.precision`'s to say."""

from typing import Final

from castline.builder.recipes import MatmulKernel, Recipe, Tolerance
from castline.builder.tensorrt.lower import Activations
from castline.engines.errors import BuildError
from castline.engines.precision import GPU_WEIGHTS, INT4_BLOCK

_HALF = MatmulKernel("half", 16)
_WEIGHTS: Final = {
    "fp16": (_HALF, Tolerance(0.002, 0.98)),
    "bf16": (_HALF, Tolerance(0.01, 0.95)),
    "fp8": (MatmulKernel("e4m3", 8), Tolerance(0.05, 0.90)),
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
