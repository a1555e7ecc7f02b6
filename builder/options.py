"""What a user may ask of a build, with every default in one place. Plain data; validation names the option."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from castline.builder.recipes import AUTO_RECIPE, DEFAULT_RECIPE, recipe
from castline.engines.bundle import MAX_VERSION, MODEL_NAME_RULE, is_model_name
from castline.engines.errors import BuildError
from castline.engines.manifest import KvDtype, Target

KvDtypeChoice = Literal["auto", "fp32", "bf16", "int8", "fp8"]

DEFAULT_BLOCK_SIZE = 32
BLOCK_SIZES = (16, 32, 64, 128)
MAX_MODEL_LEN_CAP = 32768
"""Without --max-model-len a model of a longer context is served up to here."""

AUTO_KV_DTYPE: dict[Target, KvDtype] = {"cpu": "int8", "tensorrt": "fp8", "tensorrt_rtx": "fp8"}
"""On a CPU int8 with a scale for each token and head is faster and nearer to fp32 than fp8."""


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """One build. Lengths in tokens; None lets the builder choose."""

    model: str
    output: Path
    target: Target = "cpu"
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
        if self.target != "cpu":
            raise BuildError(
                f"--target {self.target} is not in this version of castline: it builds for the cpu target only; "
                "leave --target out, or use --target cpu"
            )
        if self.recipe != AUTO_RECIPE:
            recipe(self.recipe)
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

    @property
    def resolved_kv_dtype(self) -> KvDtype:
        return AUTO_KV_DTYPE[self.target] if self.kv_dtype == "auto" else self.kv_dtype

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
        defaults = BuildOptions(self.model, self.output)
        for flag in ("name", "recipe", "kv_dtype", "block_size", "max_model_len", "max_num_seqs"):
            words += self._flag(flag, defaults)
        words += self._flag("max_num_batched_tokens", defaults) + self._flag("threads", defaults)
        words += [] if self.tune else ["--no-tune"]
        words += [] if self.verify else ["--no-verify"]
        words += ["--allow-unverified"] if self.allow_unverified else []
        return shlex.join(words)

    def _flag(self, field: str, defaults: "BuildOptions") -> list[str]:
        value = getattr(self, field)
        return [] if value == getattr(defaults, field) else [f"--{field.replace('_', '-')}", str(value)]
