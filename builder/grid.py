"""Whether a model's weights lie on a 4-bit grid as they come, and the recipe and the kernels that follow from it.

Weights that came out of llama.cpp's Q4_1 or Q4_0 do: packed on their own grid they cost nothing, on another one the
whole error of 4 bits. Rows are sampled, for a matrix is quantised as a whole or not at all. Q4_1's grid is (d, m);
Q4_0's has no m to store or to add; as (d, m) its weights come out up to the rounding of m.
"""

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from castline.builder.matmuls import Shape, find_matmuls
from castline.builder.recipes import AUTO_RECIPE, RECIPES, Recipe, recipe
from castline.engines.errors import BuildError
from castline.plugins.linear import LinearFormat
from castline.plugins.linear_packing import grid_error

ON_GRID = 0.005
"""Relative error up to which a matrix counts as on a grid: it is 0 on one, and about 0.08 of weights rounded to one."""
SAMPLED_ROWS = 64


def resolve_recipe(name: str, model: PreTrainedModel) -> Recipe:
    """The recipe *name* for *model*, ``auto`` decided. Raises BuildError where its weights are not on the grid that
    the recipe needs."""
    if name == AUTO_RECIPE:
        return RECIPES["q4_1" if off_grid(model) is None else "int8"]
    found = recipe(name)
    off = off_grid(model) if found.needs_grid else None
    if off is not None:
        raise BuildError(
            f"recipe {name}: the weights are not on a 4-bit grid ({off[0]} differs from its nearest by {off[1]:.1%}), "
            "so this recipe would cost far more than its name says; take --recipe int8, which fits every checkpoint, "
            "or --recipe int4 for 4 bits at the price that verify will show"
        )
    return found


def off_grid(model: PreTrainedModel) -> tuple[str, float] | None:
    """The first matrix of the layers that lies on no grid, with its relative error, which is infinite where no grid can
    hold it; None where all do."""
    for name, rows in _matrices(model):
        error = grid_error(_sample(rows))
        if error > ON_GRID:
            return name, error
    return None


def symmetric_shapes(model: ir.Model, shapes: Collection[Shape]) -> frozenset[Shape]:
    """Those of *shapes* whose matmuls all have weights on symmetric 4-bit grids: LINEAR_W4_G32 holds every one to the
    bit. Where a sample lies on one, all rows are read, for a merged matrix may be of more than one type."""
    off: set[Shape] = set()
    for matmul in find_matmuls(model):
        shape = matmul.shape
        if shape in shapes and shape not in off and not _is_symmetric(matmul.reader()()):
            off.add(shape)
    return frozenset(shapes) - off


def _is_symmetric(rows: NDArray[np.float32]) -> bool:
    return all(grid_error(part, LinearFormat.W4) == 0 for part in (_sample(rows), rows))


def _sample(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    step = max(1, len(rows) // SAMPLED_ROWS)
    return np.ascontiguousarray(rows[::step][:SAMPLED_ROWS])


def _matrices(model: Any) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Every matmul's W [N, K] but the head's."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if module is head:
            continue
        if isinstance(module, torch.nn.Linear):
            yield f"{name}.weight", module.weight.detach().numpy()
        elif isinstance(module, Conv1D):
            yield f"{name}.weight", module.weight.detach().numpy().T
