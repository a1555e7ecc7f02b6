"""Whether a build can end well, asked before it starts. Whether memory suffices is asked where the weights' headers are
read (`castline.builder.memory`)."""

import os
import shutil
from pathlib import Path

from castline.builder.recipes import MatmulKernel, Recipe
from castline.engines.errors import BuildError
from castline.engines.manifest import ModelFacts

DISK_MARGIN_BYTES = 64 << 20
"""Graph, tokenizer, report."""


def check_output(output: Path, name: str | None, version: int | None) -> None:
    """Raises BuildError where *output* cannot be written, or the version that was asked for exists."""
    ancestor = _nearest_existing(output)
    if not ancestor.is_dir():
        raise BuildError(f"bundle: --output {output}: {ancestor} is a file, not a directory; choose another --output")
    if not os.access(ancestor, os.W_OK | os.X_OK):
        raise BuildError(f"bundle: --output {output}: {ancestor} is not writable; choose another --output")
    if name is not None and version is not None and (output / name / str(version)).exists():
        raise BuildError(
            f"bundle: {output / name / str(version)} exists and is never overwritten: remove it, or leave out "
            "--version for the next free one"
        )


def check_disk(output: Path, facts: ModelFacts, recipe: Recipe) -> None:
    """Raises BuildError with the estimate where the disk of *output* cannot hold the engine."""
    needed = engine_bytes(facts, recipe)
    free = shutil.disk_usage(_nearest_existing(output)).free
    if needed > free:
        raise BuildError(
            f"bundle: an engine of {facts.num_parameters / 1e6:,.0f} M parameters with recipe {recipe.name} takes "
            f"about {needed / 2**30:.1f} GiB, and {output} has {free / 2**30:.1f} GiB free; free some, or choose "
            "another --output"
        )


def engine_bytes(facts: ModelFacts, recipe: Recipe) -> int:
    """Estimated size of a bundle: every parameter of a matmul at the widest kernel that the recipe allows, and
    embeddings of their own as it stores them."""
    widest = max(map(_bytes_per_weight, (*recipe.layer_kernels, *recipe.head_kernels)))
    lookup = facts.num_lookup_parameters
    weights = widest * (facts.num_parameters - lookup) + _bytes_per_weight(recipe.embedding_kernel) * lookup
    return int(weights) + DISK_MARGIN_BYTES


def _bytes_per_weight(kernel: MatmulKernel) -> float:
    if kernel.block == 0:  # fp32, or one scale a column
        return kernel.bits / 8
    if kernel.format is not None:
        return kernel.bits / 8 + 2 * (1 if kernel.symmetric else 2) / kernel.block
    zero_point = 0 if kernel.symmetric else kernel.bits / 8
    return kernel.bits / 8 + (4 + zero_point) / kernel.block


def _nearest_existing(path: Path) -> Path:
    """*path*, or the closest of its parents that is there."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path
