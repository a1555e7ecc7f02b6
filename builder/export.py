"""The transformers model itself, through ``torch.onnx``, as an ONNX graph over packed tokens.

No architecture has a model file of ours: attention and RoPE come out as nodes (see `castline.builder.attention`),
everything else as the exporter writes it. Weights stay the torch tensors they are, by reference.
"""

import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor
from transformers import PreTrainedModel

from castline.builder.attention import TRANSLATIONS, Calls, rope, traced
from castline.builder.checkpoint import Checkpoint
from castline.builder.probe import ModelProbe, run_attention
from castline.engines.errors import BuildError
from castline.plugins.contract import DOMAIN, INPUT_IDS, LOGITS, LOGITS_INDICES, POSITIONS

OPSET = 21
_PREFIX = "packed."


class _Packed(torch.nn.Module):
    """T packed tokens in, R rows of logits out."""

    def __init__(self, model: PreTrainedModel, calls: Calls) -> None:
        super().__init__()
        self.packed = model
        self.calls = calls

    def forward(self, input_ids: Tensor, positions: Tensor, logits_indices: Tensor) -> Tensor:
        self.calls.reset()
        out = self.packed(
            input_ids=input_ids[None],
            position_ids=positions[None],
            attention_mask=None,
            use_cache=False,
            logits_to_keep=logits_indices,
        )
        logits: Tensor = out.logits[0]
        return logits


class _Exporter:
    """Emits one operator for each attention and, where its style is known, each RoPE."""

    def __init__(self, probe: ModelProbe, calls: Calls) -> None:
        self.probe = probe
        self.calls = calls

    def mask(self, **_: Any) -> None:
        return None

    def attention(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> Tensor:
        return run_attention(self.calls.next(), query, key, value)

    def rope(self, original: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor] | None:
        style = self.probe.rope_styles.get(original)
        if style is None:
            return None
        return rope(q, cos, sin, int(style[0]), style[1]), rope(k, cos, sin, int(style[0]), style[1])


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps the exporter's remarks off the console; its errors still raise."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def export_model(checkpoint: Checkpoint) -> ir.Model:
    """ONNX of the checkpoint: ``input_ids``, ``positions`` [T], ``logits_indices`` [R] → ``logits`` [R, vocabulary].

    The graph holds exactly one ``castline::Attention`` a layer. Raises BuildError when torch cannot export the model.
    """
    probe = checkpoint.probe
    calls = Calls(probe.layers)
    dynamic = {0: torch.export.Dim.DYNAMIC}
    example = (torch.arange(11) % probe.vocab_size, torch.arange(11), torch.tensor([10, 2]))
    with quiet(), torch.no_grad(), traced(checkpoint.model, _Exporter(probe, calls)):
        try:
            program = torch.onnx.export(
                _Packed(checkpoint.model, calls).eval(),
                example,
                dynamo=True,
                optimize=False,
                opset_version=OPSET,
                input_names=[INPUT_IDS, POSITIONS, LOGITS_INDICES],
                output_names=[LOGITS],
                dynamic_shapes=(dynamic, dynamic, dynamic),
                custom_translation_table=TRANSLATIONS,
                verbose=False,
            )
        except (RuntimeError, torch.onnx.errors.OnnxExporterError) as error:
            reason = str(error).strip().splitlines()[0]
            raise BuildError(f"export: torch cannot export {checkpoint.facts.architecture}: {reason}") from error
    assert program is not None
    model: ir.Model = program.model
    _check(model, len(probe.layers))
    _rename(model)
    return model


def _check(model: ir.Model, num_layers: int) -> None:
    counts = Counter(n.op_type for n in model.graph.all_nodes() if n.domain == DOMAIN)
    layers = [n.attributes["layer"].as_int() for n in model.graph if (n.domain, n.op_type) == (DOMAIN, "Attention")]
    if layers != list(range(num_layers)):
        raise BuildError(
            f"export: {counts['Attention']} attention nodes for {num_layers} layers; castline cannot build this model"
        )


def _rename(model: ir.Model) -> None:
    """Weights under the checkpoint's own names; sizes T and R as the contract calls them."""
    graph = model.graph
    for name in [n for n in graph.initializers if n.startswith(_PREFIX)]:
        graph.initializers[name].name = name.removeprefix(_PREFIX)
    ids, positions, rows = graph.inputs
    sizes = {str(v.shape[0]): size for v, size in ((ids, "T"), (positions, "T"), (rows, "R")) if v.shape is not None}
    for value in [*graph.inputs, *graph.outputs, *(out for node in graph for out in node.outputs)]:
        if value.shape is not None:
            value.shape = ir.Shape([d if isinstance(d, int) else sizes.get(str(d), str(d)) for d in value.shape])
