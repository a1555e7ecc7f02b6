"""Rows looked up in constant matrices: the embeddings of a graph."""

import onnx_ir as ir

from castline.builder.passes.walk import attribute, is_op, is_weight, present, producer, users
from castline.plugins.contract import INPUT_IDS


def lookups_in(matrix: ir.Value) -> list[ir.Node]:
    """The nodes that read rows of *matrix*."""
    return [user for user in users(matrix) if is_op(user, "Gather") and user.inputs[0] is matrix]


def token_tables(model: ir.Model) -> list[ir.Value]:
    """Every table that nothing reads but lookups of the step's token ids.

    Tables of positions, learned or computed, are none: they are small beside a vocabulary, and what is lost in them is
    lost in every token.
    """
    return [value for value in model.graph.initializers.values() if _is_token_table(value)]


def _is_token_table(value: ir.Value) -> bool:
    if not is_weight(value) or value.dtype != ir.DataType.FLOAT or len(value.shape or ()) != 2:
        return False
    lookups = lookups_in(value)
    return 0 < len(lookups) == len(value.uses()) and all(_gives_a_row_a_token(node) for node in lookups)


def _gives_a_row_a_token(lookup: ir.Node) -> bool:
    """Whether it gives [T, K] or [1, T, K] for the step's T token ids."""
    shape = lookup.outputs[0].shape
    is_rows = shape is not None and (len(shape) == 2 or (len(shape) == 3 and shape[0] == 1))
    ids = present(lookup.inputs[1])
    batched = producer(ids, "Unsqueeze")
    source = ids if batched is None else present(batched.inputs[0])
    return is_rows and source.name == INPUT_IDS and attribute(lookup, "axis", 0) == 0
