"""What a user may ask of a build, with every default in one place. Plain data; validation names the option."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from castline.builder.recipes import AUTO_RECIPE, DEFAULT_RECIPE, recipe
from castline.engines.errors import BuildError, EngineError
from castline.engines.manifest import KvDtype, Target
from castline.engines.repository import MAX_VERSION, MODEL_NAME_RULE, is_model_name
from castline.engines.sku import all_skus, check_flavour, check_precision, load_sku

KvDtypeChoice = Literal["auto", "fp32", "bf16", "int8", "fp8", "fp16"]
CPU_KV_DTYPES: tuple[KvDtype, ...] = ("fp32", "bf16", "int8", "fp8")

DEFAULT_BLOCK_SIZE = 32
BLOCK_SIZES = (16, 32, 64, 128)
GPU_BLOCK_SIZES = (16, 32, 64)
MAX_MODEL_LEN_CAP = 32768
"""Without --max-model-len a model of a longer context is served up to here."""

AUTO_KV_DTYPE: KvDtype = "int8"
"""On a CPU int8 with a scale for each token and head is faster and nearer to fp32 than fp8. A SKU names its own."""

REBUILD_OPTIONS = (
    "name",
    "recipe",
    "kv_dtype",
    "block_size",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "threads",
)


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """One build. Lengths in tokens; None lets the builder choose."""

    model: str
    output: Path
    target: Target = "cpu"
    sku: str | None = None
    """The GPU to build for, of a file under engines/skus; None for the cpu target."""
    kernels_only: bool = False
    """Graph, kernels and manifest without the plan, which may need TensorRT and the GPU."""
    name: str | None = None
    version: int | None = None
    recipe: str = DEFAULT_RECIPE
    kv_dtype: KvDtypeChoice = "auto"
    block_size: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    threads: int | None = None
    tune: bool = True
    verify: bool = True
    allow_unverified: bool = False
    cache_dir: Path | None = None

    def __post_init__(self) -> None:
        if self.kv_dtype not in get_args(KvDtypeChoice):
            raise BuildError(f"--kv-dtype {self.kv_dtype!r} is unknown; choose {', '.join(get_args(KvDtypeChoice))}")
        if self.block_size is not None and self.block_size not in BLOCK_SIZES:
            raise BuildError(f"--block-size {self.block_size} must be one of {', '.join(map(str, BLOCK_SIZES))}")
        for flag in ("version", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "threads"):
            value = getattr(self, flag)
            if value is not None and value < 1:
                raise BuildError(f"--{flag.replace('_', '-')} {value} must be at least 1")
        if self.version is not None and self.version > MAX_VERSION:
            raise BuildError(f"--version {self.version} must be at most {MAX_VERSION}")
        if self.max_model_len == 1:
            raise BuildError("--max-model-len 1 must be at least 2: a token to read and a token to answer")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise BuildError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} is below --max-num-seqs {self.max_num_seqs}, "
                "so not every running sequence could decode in one step; raise the first or lower the second"
            )
        if self.name is not None and not is_model_name(self.name):
            raise BuildError(f"--name {self.name!r} is not valid: a name takes {MODEL_NAME_RULE}")
        if self.target == "cpu":
            self._check_cpu()
        else:
            self._check_gpu()

    def _check_cpu(self) -> None:
        if self.sku is not None:
            raise BuildError(
                f"--sku {self.sku} is a GPU, and --target cpu builds for this machine's processor: leave --sku out, "
                "or use --target tensorrt"
            )
        if self.kernels_only:
            raise BuildError("--kernels-only is for GPUs, whose plan may need TensorRT: leave it out with --target cpu")
        if self.kv_dtype not in ("auto", *CPU_KV_DTYPES):
            raise BuildError(f"--kv-dtype {self.kv_dtype} is for GPUs; on a cpu choose {', '.join(CPU_KV_DTYPES)}")
        if self.recipe != AUTO_RECIPE:
            recipe(self.recipe)

    def _check_gpu(self) -> None:
        if self.sku is None:
            known = ", ".join(sku.name for sku in all_skus())
            raise BuildError(f"--target {self.target} needs a --sku, the GPU to build for; known are {known}")
        try:
            sku = load_sku(self.sku)
            check_flavour(sku, self.target)
            check_precision(sku, self.recipe, self.resolved_kv_dtype)
        except EngineError as error:
            raise BuildError(f"--sku {self.sku}, --recipe {self.recipe}, --kv-dtype {self.kv_dtype}: {error}") from None
        if self.threads is not None:
            raise BuildError(f"--threads {self.threads} is of the cpu target: leave it out with --target {self.target}")
        if self.block_size is not None and self.block_size not in GPU_BLOCK_SIZES:
            raise BuildError(
                f"--block-size {self.block_size} must be one of {', '.join(map(str, GPU_BLOCK_SIZES))} on GPUs"
            )

    @property
    def resolved_kv_dtype(self) -> KvDtype:
        if self.kv_dtype != "auto":
            return self.kv_dtype
        return AUTO_KV_DTYPE if self.sku is None else load_sku(self.sku).defaults.kv_dtype

    def resolve_max_model_len(self, max_position: int) -> int:
        """Tokens of the longest sequence. Raises BuildError where more is asked than the model's positions."""
        if self.max_model_len is None:
            return min(max_position, MAX_MODEL_LEN_CAP)
        if self.max_model_len > max_position:
            raise BuildError(
                f"--max-model-len {self.max_model_len} is over the model's {max_position} positions; "
                f"use at most {max_position}"
            )
        return self.max_model_len

    def rebuild_command(self) -> str:
        """The command that builds this engine again on another host."""
        words = ["castline", "build", self.model, "--target", self.target, "--output", str(self.output)]
        words += [] if self.sku is None else ["--sku", self.sku]
        # A SKU has defaults of its own: what it would fill in is said.
        said = () if self.sku is None else ("recipe", "kv_dtype", "max_num_seqs", "max_num_batched_tokens")
        defaults = BuildOptions(self.model, self.output)
        for field in REBUILD_OPTIONS:
            value = getattr(self, field)
            if field in said or value != getattr(defaults, field):
                words += [f"--{field.replace('_', '-')}", str(value)]
        words += ["--kernels-only"] if self.kernels_only else []
        words += [] if self.tune else ["--no-tune"]
        words += [] if self.verify else ["--no-verify"]
        words += ["--allow-unverified"] if self.allow_unverified else []
        return shlex.join(words)
