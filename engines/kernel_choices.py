"""Shapes of work that the GPU kernels are compiled with: what is best known for each SKU, under ``engines/kernels``.

`castline tune-kernels` writes the files: on a machine with the GPU from times, on any other from what the compiled
kernels say of registers and shared memory. A build reads them, with no GPU.
"""

from functools import cache
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from castline.engines.errors import EngineError

CHOICES_DIRECTORY: Final = Path(__file__).parent / "kernels"
NOT_TIMED: Final = "pruned, not timed"

TunedKernel = Literal["decode", "decode_split", "prefill", "greedy", "sample"]
"""The others have nothing to choose."""
Power = Annotated[int, msgspec.Meta(ge=1, le=65_536)]


class KernelChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One kernel's shape, for every node whose keys and values are of that type and size."""

    kernel: TunedKernel
    tile: Power
    """Keys of one step of the loop; logits, of greedy and sample."""
    num_warps: Annotated[int, msgspec.Meta(ge=1, le=32)]
    num_stages: Annotated[int, msgspec.Meta(ge=1, le=8)]
    chosen: str
    """``pruned, not timed``, or ``timed on DEVICE, DATE``."""
    kv_dtype: Literal["fp8", "fp16", ""] = ""
    """fp16 stands for bf16 as well: both are 16 bits that nothing decodes. Empty for greedy and sample."""
    head_dim: int = 0
    """As padded: a power of two. 0 for greedy and sample."""
    rows: Power = 64
    """Query rows of a prefill tile: tokens times query heads of a kv head."""
    max_splits: Power = 32
    """Of decode_split: most parts that are joined."""
    registers: int = 0
    shared_bytes: int = 0
    microseconds: float | None = None
    """Of the timed launch; None where it was not timed."""

    @property
    def key(self) -> tuple[str, str, int]:
        return self.kernel, self.kv_dtype, self.head_dim

    def queries(self, group: int) -> int:
        """Tokens of a prefill tile where *group* query heads share a kv head."""
        return max(1, self.rows // (1 << (group - 1).bit_length()))


class KernelChoices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of one SKU."""

    compiler: str
    """``triton 3.9.0``: registers are those that it gave."""
    choice: tuple[KernelChoice, ...]

    def find(self, kernel: str, kv_dtype: str = "", head_dim: int = 0) -> KernelChoice | None:
        """*head_dim* as padded. None where nothing is known."""
        wanted = (kernel, "fp16" if kv_dtype == "bf16" else kv_dtype, head_dim)
        return next((choice for choice in self.choice if choice.key == wanted), None)


NOTHING_KNOWN: Final = KernelChoices(compiler="", choice=())


@cache
def kernel_choices(sku: str) -> KernelChoices:
    """What is known for the SKU of that name; nothing where it has no file. Raises EngineError for a wrong file."""
    path = CHOICES_DIRECTORY / f"{sku}.toml"
    return read_kernel_choices(path) if path.is_file() else NOTHING_KNOWN


def read_kernel_choices(path: Path) -> KernelChoices:
    """Raises EngineError naming file and field."""
    try:
        choices = msgspec.toml.decode(path.read_bytes(), type=KernelChoices)
    except (OSError, msgspec.DecodeError) as error:
        raise EngineError(f"{path}: {error}; `castline tune-kernels` writes it again") from None
    keys = [choice.key for choice in choices.choice]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise EngineError(f"{path}: {' '.join(map(str, twice[0]))} is chosen twice")
    for choice in choices.choice:
        for name in ("tile", "rows", "max_splits", "num_warps"):
            if (value := getattr(choice, name)) & (value - 1):
                raise EngineError(f"{path}: {name} {value} of {choice.kernel} must be a power of two")
    return choices


def write_kernel_choices(path: Path, choices: KernelChoices) -> None:
    """One table a choice, without what is at its default, in order of their keys. Raises EngineError."""
    lines = [
        "# Written by `castline tune-kernels`. Registers and shared memory are those of the compiled kernel.",
        f'compiler = "{choices.compiler}"',
    ]
    for choice in sorted(choices.choice, key=lambda one: one.key):
        lines += ["", "[[choice]]"]
        for field in msgspec.structs.fields(choice):
            value = getattr(choice, field.name)
            if field.required or value != field.default:
                lines.append(f"{field.name} = " + (f'"{value}"' if isinstance(value, str) else f"{value}"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n")
    except OSError as error:
        raise EngineError(f"cannot write {path} ({error.strerror}); name another file with --output") from None
