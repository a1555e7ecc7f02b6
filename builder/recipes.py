"""Weight recipes: the kernels a recipe allows for each matmul, and the distance to fp32 it may cost.

The tuner picks among the allowed kernels by time; it never trades accuracy that the recipe does not grant.
"""

from dataclasses import dataclass, field

from castline.engines.errors import BuildError
from castline.engines.manifest import KvDtype
from castline.plugins.linear import MAX_K, LinearFormat


@dataclass(frozen=True, slots=True)
class MatmulKernel:
    """One way to compute ``x [M, K] @ W [K, N]`` with constant W: castline's Linear where it has a format, else ONNX
    Runtime's MatMulNBits, or its MatMul for 32 bits."""

    name: str
    bits: int
    """Of a weight: 32, 8 or 4."""
    block: int = 0
    """Elements along K that share a scale; 0 for fp32, and for one scale a column."""
    accuracy_level: int = 0
    """MatMulNBits: 0 computes in fp32, 4 quantises activations to int8 for each block."""
    symmetric: bool = True
    """False: each block has a zero point, or a minimum, as well."""
    format: LinearFormat | None = None
    wide_rows: int = 0
    """Linear: rows of a step from which the wide kernels are used; 0 lets the operator choose, -1 means never."""

    @property
    def is_linear(self) -> bool:
        return self.format is not None

    def takes(self, k: int) -> bool:
        """Whether it computes matmuls of *k* rows of W."""
        return not self.is_linear or k <= MAX_K


FP32 = MatmulKernel("fp32", 32)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Gate of the parity report, against transformers in fp32; divergences in nats, agreement a share."""

    mean_kl: float
    top1: float


@dataclass(frozen=True, slots=True)
class Recipe:
    name: str
    summary: str
    layer_kernels: tuple[MatmulKernel, ...]
    """Allowed inside the layers; the first is the default without tuning."""
    head_kernels: tuple[MatmulKernel, ...]
    tolerance: Tolerance
    """With fp32, bf16 or int8 KV blocks."""
    fp8_kv_tolerance: Tolerance = field(default=Tolerance(mean_kl=0.05, top1=0.90))
    embedding_kernel: MatmulKernel = FP32
    """How an embedding is stored that no matmul reads: a format of Linear, or fp32."""
    needs_grid: bool = False
    """Only for weights that are on a 4-bit (d, m) grid as they come."""

    def tolerance_for(self, kv_dtype: KvDtype) -> Tolerance:
        """The wider of the recipe's own gate and the fp8 gate where the pool is fp8."""
        if kv_dtype != "fp8":
            return self.tolerance
        return Tolerance(
            max(self.tolerance.mean_kl, self.fp8_kv_tolerance.mean_kl),
            min(self.tolerance.top1, self.fp8_kv_tolerance.top1),
        )


def _nbits(bits: int, block: int, accuracy_level: int, *, symmetric: bool = True) -> MatmulKernel:
    suffix = "" if symmetric else "-zp"
    return MatmulKernel(f"nbits{bits}-b{block}-a{accuracy_level}{suffix}", bits, block, accuracy_level, symmetric)


def _linear(name: str, format: LinearFormat, group: int) -> MatmulKernel:
    bits = 8 if format == LinearFormat.W8 else 4
    return MatmulKernel(name, bits, group, symmetric=format != LinearFormat.W4_DM, format=format)


LINEAR_W8 = _linear("linear-w8", LinearFormat.W8, 0)
LINEAR_W8_G32 = _linear("linear-w8-g32", LinearFormat.W8, 32)
LINEAR_W8_G64 = _linear("linear-w8-g64", LinearFormat.W8, 64)
LINEAR_W4DM = _linear("linear-w4dm-g32", LinearFormat.W4_DM, 32)
LINEAR_W4_G32 = _linear("linear-w4-g32", LinearFormat.W4, 32)
"""For weights that lie on the symmetric grid as they come: exact, and 2 bytes of 20 less than LINEAR_W4DM. Put on it,
others lose too much: SmolLM2-135M a KL of 0.28."""
FALLBACK = _nbits(8, 32, 4)
"""For a matmul that Linear was chosen for and cannot take: no recipe of 8 or 4 bits is more accurate."""

# SmolLM2-135M over the 1,212 tokens of data/verify.txt with int8 KV, mean KL and top-1 agreement, head in groups of 32.
# Linear, narrow: groups of 32 0.0045, 95.5 %; of 64 0.0046, 96.4 %; a scale a column 0.0060, 94.6 %, too near the gate
# of 94 % to promise for other models. MatMulNBits quantises activations in the weights' blocks, so that a longer block
# costs accuracy twice: blocks of 32 0.0045, 95.3 %; of 64 0.0063, 94.4 %, and with a head of 64 too 0.0071, 93.98 %,
# under the gate. Its accuracy level 0 (activations in fp32) is 4 to 50 times slower up to 32 tokens a step.
_INT8 = (LINEAR_W8_G32, LINEAR_W8_G64, _nbits(8, 64, 4), FALLBACK)
_INT8_HEAD = (LINEAR_W8_G32, FALLBACK)
_INT4 = (LINEAR_W4DM, _nbits(4, 32, 4, symmetric=False), _nbits(4, 64, 4, symmetric=False))
_Q4_1 = (LINEAR_W4DM, FALLBACK)

RECIPES = {
    "fp32": Recipe("fp32", "weights as they are", (FP32,), (FP32,), Tolerance(0.001, 0.99)),
    "int8": Recipe(
        "int8",
        "8-bit weights in groups along K",
        _INT8,
        _INT8_HEAD,
        Tolerance(0.02, 0.94),
        embedding_kernel=LINEAR_W8_G32,
    ),
    "q4_1": Recipe(
        "q4_1",
        "4-bit weights on the grid they came on (a GGUF file of type Q4_1 or Q4_0), 8-bit head",
        _Q4_1,
        _INT8_HEAD,
        Tolerance(0.02, 0.94),
        embedding_kernel=LINEAR_W8_G32,
        needs_grid=True,
    ),
    "int4": Recipe(
        "int4",
        "4-bit weights in the layers, 8-bit head",
        _INT4,
        _INT8_HEAD,
        Tolerance(0.5, 0.6),
        embedding_kernel=LINEAR_W8_G32,
    ),
}
AUTO_RECIPE = "auto"
"""q4_1 where the weights are on a grid, else int8."""
RECIPE_CHOICES = (AUTO_RECIPE, *RECIPES)
DEFAULT_RECIPE = AUTO_RECIPE


def recipe(name: str) -> Recipe:
    """The recipe of that name. Raises BuildError listing the names there are."""
    try:
        return RECIPES[name]
    except KeyError:
        raise BuildError(f"--recipe {name!r} is unknown; choose one of {', '.join(RECIPE_CHOICES)}") from None
