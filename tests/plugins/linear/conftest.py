"""Linear and Embedding nodes in sessions of their own, and random weights and inputs for them."""

from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from castline.plugins.cpu.linear_model import linear_feeds, serialise_linear_model
from castline.plugins.linear import LINEAR_GROUPS, LinearAttributes, LinearFormat
from castline.plugins.linear_packing import PackedWeight, pack, pack_gated
from castline.plugins.linear_reference import LinearInputs

Floats = NDArray[np.float32]

FORMATS = [(fmt, group) for fmt, groups in LINEAR_GROUPS.items() for group in groups]


class LinearNode:
    """One Linear node with its packed weights."""

    def __init__(
        self,
        tools,
        attributes: LinearAttributes,
        packed: PackedWeight,
        *,
        bias=False,
        residual=False,
        maxima=False,
        isa=None,
        threads=1,
    ):
        self.packed = packed
        with tools.isa(isa):
            model = serialise_linear_model(attributes, bias=bias, residual=residual, maxima=maxima)
            self.session = tools.session(model, threads)

    def __call__(self, inputs: LinearInputs, **overrides: NDArray[np.generic]) -> Floats:
        return self.outputs(inputs, **overrides)[0]

    def outputs(self, inputs: LinearInputs, **overrides: NDArray[np.generic]) -> list[Floats]:
        """With the maxima, where the node has them."""
        outputs: list[Floats] = self.session.run(None, dict(linear_feeds(inputs, self.packed)) | overrides)
        return outputs


def random_weight(attributes: LinearAttributes, seed: int = 0) -> PackedWeight:
    """Packed weights whose products with unit inputs have size about 1."""
    a = attributes
    rng = np.random.default_rng(seed)
    weights = (rng.standard_normal((2, a.n, a.k)) / np.sqrt(a.k)).astype(np.float32)
    fmt = LinearFormat(a.format)
    return pack_gated(*weights, fmt, a.group) if a.gated else pack(weights[0], fmt, a.group)


def random_inputs(
    attributes: LinearAttributes, rows: int, seed: int = 0, *, bias=False, residual=False
) -> LinearInputs:
    """The data of a row depends on (seed, row) alone. Some groups of a row are large, some are zero."""
    a = attributes
    rng = np.random.default_rng(seed)
    norm_weight = rng.uniform(0.5, 1.5, a.k).astype(np.float32)
    bias_values = rng.standard_normal((2, a.n) if a.gated else a.n).astype(np.float32)
    x = np.empty((rows, a.k), np.float32)
    added = np.empty((rows, a.n), np.float32)
    for row in range(rows):
        row_rng = np.random.default_rng((seed, row))
        sizes = row_rng.choice([0.0, 0.2, 1.0, 3.0], a.k // 32 + 1, p=[0.1, 0.3, 0.5, 0.1])
        x[row] = row_rng.standard_normal(a.k) * np.repeat(sizes, 32)[: a.k]
        added[row] = row_rng.standard_normal(a.n)
    return LinearInputs(x, norm_weight if a.norm else None, bias_values if bias else None, added if residual else None)


@dataclass
class LinearTools:
    """What the tests of this folder share."""

    Node = LinearNode
    weight = staticmethod(random_weight)
    inputs = staticmethod(random_inputs)

    @staticmethod
    def attributes(**changes: float) -> LinearAttributes:
        """A small node: 100 to 40 in W4_DM, narrow kernels only."""
        defaults = {"k": 100, "n": 40, "format": int(LinearFormat.W4_DM), "group": 32, "wide_rows": -1}
        return LinearAttributes(**(defaults | changes))  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def linear_tools() -> LinearTools:
    return LinearTools()


@pytest.fixture(params=FORMATS, ids=lambda p: f"{p[0].name}-{p[1]}")
def format_and_group(request) -> dict[str, int]:
    fmt, group = request.param
    return {"format": int(fmt), "group": group}
