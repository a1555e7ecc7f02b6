"""Stage quantize: every matmul with a constant weight gets the kernel that was chosen for its shape.

castline::Linear takes in what surrounds its matmul (`castline.builder.linear_sites`); the others leave the graph around
them as it is. What then is left of residual sums before RMSNorms becomes one node of ONNX Runtime's. An embedding that
no matmul reads is packed for its own lookups.
"""

from collections.abc import Mapping

import onnx_ir as ir

from castline.builder.linear_nodes import replace_site, replace_table
from castline.builder.linear_sites import find_site, takes_rows
from castline.builder.lookups import token_tables
from castline.builder.matmuls import Matmul, Shape, find_head, find_matmuls
from castline.builder.nbits import replace_matmul
from castline.builder.passes.norms import fuse_skip_norm
from castline.builder.passes.pipeline import PassReport, run_pass
from castline.builder.recipes import FALLBACK, FP32, MatmulKernel
from castline.engines.errors import BuildError
from castline.plugins.contract import DOMAIN, OPSET_VERSION

Choices = Mapping[Shape, MatmulKernel]


def matmul_shapes(model: ir.Model) -> dict[Shape, bool]:
    """Every shape of a matmul with a constant weight, and whether it is the output head's."""
    head = find_head(model)
    shapes: dict[Shape, bool] = {}
    for matmul in find_matmuls(model):
        shapes[matmul.shape] = shapes.get(matmul.shape, False) or matmul.node is head
    return shapes


def quantize(model: ir.Model, choices: Choices, embedding: MatmulKernel = FP32) -> tuple[PassReport, ...]:
    """Puts the chosen kernels in, in place; what each step did. *embedding* is for an embedding that no matmul reads.
    Raises BuildError for a shape without a choice."""
    kernels = {matmul: _kernel(matmul, choices) for matmul in find_matmuls(model)}
    linears = {matmul: kernel for matmul, kernel in kernels.items() if kernel.is_linear}
    nbits = {matmul: kernel for matmul, kernel in kernels.items() if not kernel.is_linear and kernel.bits < 32}
    return (
        run_pass(model, "matmuls and what surrounds them as Linear", lambda model: put_linears(model, linears)),
        run_pass(model, "matmuls as MatMulNBits", lambda model: put_nbits(model, nbits)),
        run_pass(model, "embeddings in their packed form", lambda model: put_embeddings(model, embedding)),
        run_pass(model, "residual + RMSNorm", fuse_skip_norm),
    )


def _kernel(matmul: Matmul, choices: Choices) -> MatmulKernel:
    kernel = choices.get(matmul.shape)
    if kernel is None:
        k, n = matmul.shape
        raise BuildError(f"quantize: no kernel was chosen for the matmul {k} x {n}")
    return kernel if not kernel.is_linear or takes_rows(matmul) else FALLBACK


def put_linears(model: ir.Model, kernels: Mapping[Matmul, MatmulKernel]) -> int:
    """The count is of matmuls."""
    nodes = {matmul.node for matmul in kernels}
    for matmul, kernel in kernels.items():
        replace_site(model, find_site(matmul, nodes), kernel)
        model.opset_imports[DOMAIN] = OPSET_VERSION
    return len(kernels)


def put_nbits(model: ir.Model, kernels: Mapping[Matmul, MatmulKernel]) -> int:
    """The count is of matmuls."""
    for matmul, kernel in kernels.items():
        replace_matmul(model, matmul, kernel)
    return len(kernels)


def put_embeddings(model: ir.Model, kernel: MatmulKernel) -> int:
    """The count is of tables."""
    tables = token_tables(model) if kernel.is_linear else []
    for table in tables:
        replace_table(model, table, kernel)
        model.opset_imports[DOMAIN] = OPSET_VERSION
    return len(tables)
