"""How transformers' attention and RoPE become nodes of ours: torch custom operators, and their ONNX translation.

transformers calls whatever function its ``AttentionInterface`` holds under the config's attention name. Ours records
what each layer asks for (`LayerAttention`) and calls a custom operator, which `torch.onnx` translates to one node:

- ``castline::Attention(q [T, H*D], k [T, KV*D], v [T, KV*D]) -> [T, H*D]``; its KV pool comes with lowering.
- ``castline::Rope(x [1, heads, T, D], cos, sin [1, T, ...]) -> x``; ``style`` is a `RopeStyle`, and the first
  ``rotary_dim`` elements turn.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol

import onnx
import onnxscript
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from castline.plugins.contract import DOMAIN, OPSET_VERSION

INTERFACE = "castline"
"""Our name in transformers' registries; it must not begin with "paged", which transformers reads as a prefix."""


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What one layer's attention computes. ``window`` 0: full; ``softcap`` 0: none."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int
    softcap: float


class RopeStyle(IntEnum):
    """How cos and sin, r wide in half of the rotated elements, reach ``apply_rotary_pos_emb``."""

    HALF = 0
    """cos is [c, c]; element i turns with i + r."""
    HALF_NARROW = 1
    """cos is [c]; element i turns with i + r."""
    INTERLEAVED = 2
    """cos is [c0, c0, c1, c1, ...]; element 2i turns with 2i + 1."""
    INTERLEAVED_NARROW = 3
    """cos is [c]; element 2i turns with 2i + 1."""
    INTERLEAVED_TILED = 4
    """cos is [c, c] and only its first half is used; element 2i turns with 2i + 1."""

    @property
    def interleaved(self) -> bool:
        return self >= RopeStyle.INTERLEAVED

    @property
    def narrow(self) -> bool:
        return self in (RopeStyle.HALF_NARROW, RopeStyle.INTERLEAVED_NARROW)


def half_table(table: Tensor, style: int) -> Tensor:
    """The r distinct columns of a cos or sin table."""
    if RopeStyle(style).narrow:
        return table
    if style == RopeStyle.INTERLEAVED:
        return table[..., ::2]
    return table[..., : table.shape[-1] // 2]


@torch.library.custom_op("castline::rope", mutates_args=())
def rope(x: Tensor, cos: Tensor, sin: Tensor, style: int, rotary_dim: int) -> Tensor:
    """x [1, heads, T, D]; cos and sin [1, T, ...]."""
    c, s = (half_table(t, style).unsqueeze(1) for t in (cos, sin))
    turned, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    if RopeStyle(style).interleaved:
        a, b = turned[..., ::2], turned[..., 1::2]
        turned = torch.stack((a * c - b * s, b * c + a * s), dim=-1).flatten(-2)
    else:
        a, b = turned.chunk(2, dim=-1)
        turned = torch.cat((a * c - b * s, b * c + a * s), dim=-1)
    return torch.cat((turned, rest), dim=-1)


@rope.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, style: int, rotary_dim: int) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("castline::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: int,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    """Causal attention over one sequence, for the eager probe only. q [T, H*D], k and v [T, KV*D]."""
    tokens = q.shape[0]
    queries = q.view(tokens, num_kv_heads, num_heads // num_kv_heads, -1)
    scores = torch.einsum("qhgd,khd->hgqk", queries, k.view(tokens, num_kv_heads, -1)) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)[None, :]
    hidden = (distance < 0) | ((distance >= window) if window > 0 else False)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hgqk,khd->qhgd", weights, v.view(tokens, num_kv_heads, -1)).reshape(tokens, -1)


@attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: int,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    return q.new_empty(q.shape[0], num_heads * (v.shape[1] // num_kv_heads))


class Tracer(Protocol):
    """What the probe and the export do at each attention, mask and RoPE of a forward."""

    def mask(self, **kwargs: Any) -> Any: ...

    def attention(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Tensor:
        """query [1, H, T, D], key and value [1, KV, T, D] → [T, H*D]."""
        ...

    def rope(self, original: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor] | None:
        """None leaves the model's own code in the graph."""
        ...


_tracer: ContextVar[Tracer] = ContextVar("castline_tracer")


def _interface(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    out = _tracer.get().attention(module, query, key, value, attention_mask, **kwargs)
    return out.view(1, query.shape[2], query.shape[1], value.shape[3]), None


def _mask(*args: Any, **kwargs: Any) -> Any:
    return _tracer.get().mask(**kwargs)


AttentionInterface.register(INTERFACE, _interface)
AttentionMaskInterface.register(INTERFACE, _mask)


def flat(heads: Tensor) -> Tensor:
    """[1, heads, T, D] → [T, heads * D]."""
    return heads.transpose(1, 2).reshape(heads.shape[2], heads.shape[1] * heads.shape[3])


@contextmanager
def traced(model: PreTrainedModel, tracer: Tracer) -> Iterator[None]:
    """Runs *model* through *tracer* inside the block; model and modelling code are as before after it."""
    modules: set[Any] = {sys.modules[type(m).__module__] for m in model.modules()}
    patched = {m: m.apply_rotary_pos_emb for m in modules if hasattr(m, "apply_rotary_pos_emb")}

    def replacement(original: Any) -> Any:
        def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
            plain = not args and not kwargs and q.ndim == k.ndim == 4 and cos.ndim == 3
            turned = tracer.rope(original, q, k, cos, sin) if plain else None
            return original(q, k, cos, sin, *args, **kwargs) if turned is None else turned

        return apply

    config = model.config
    before = config._attn_implementation
    token = _tracer.set(tracer)
    try:
        config._attn_implementation = INTERFACE
        for module, original in patched.items():
            module.apply_rotary_pos_emb = replacement(original)
        with frozen_rope(model):
            yield
    finally:
        for module, original in patched.items():
            module.apply_rotary_pos_emb = original
        config._attn_implementation = before
        _tracer.reset(token)


@contextmanager
def frozen_rope(model: PreTrainedModel) -> Iterator[None]:
    """Stops rotary embeddings that choose their frequencies by length (longrope): the short ones hold inside the block.

    Sound because `load_checkpoint` limits such a model to its original maximum position.
    """
    switching: list[Any] = [m for m in model.modules() if getattr(m, "rope_type", None) == "longrope"]
    for module in switching:
        module.inv_freq.copy_(module.original_inv_freq)
        module.rope_type = "default"
    try:
        yield
    finally:
        for module in switching:
            module.rope_type = "longrope"


@dataclass
class Calls:
    """Counts the attentions of one forward, so that each finds its layer; `reset` at the start of a forward."""

    layers: tuple[LayerAttention, ...] = ()
    seen: int = field(default=0)

    def reset(self) -> None:
        self.seen = 0

    def next(self) -> LayerAttention:
        self.seen += 1
        return self.layers[self.seen - 1]


def _register_schemas() -> None:
    """torch.onnx refuses to emit a node whose schema the onnx package does not know."""
    schema, kind = onnx.defs.OpSchema, onnx.defs.OpSchema.AttrType
    floats = [("T", ["tensor(float)"], "")]
    tables: list[tuple[str, list[str], list[tuple[str, Any]]]] = [
        (
            "Attention",
            ["q", "k", "v"],
            [(name, kind.INT) for name in ("layer", "num_heads", "num_kv_heads", "window")]
            + [("scale", kind.FLOAT), ("softcap", kind.FLOAT)],
        ),
        ("Rope", ["x", "cos", "sin"], [("style", kind.INT), ("rotary_dim", kind.INT)]),
    ]
    for name, inputs, attributes in tables:
        onnx.defs.register_schema(
            schema(
                name,
                DOMAIN,
                OPSET_VERSION,
                "",
                inputs=[schema.FormalParameter(i, "T") for i in inputs],
                outputs=[schema.FormalParameter("out", "T")],
                type_constraints=floats,
                attributes=[schema.Attribute(n, t, required=True) for n, t in attributes],
            )
        )


if not onnx.defs.has("Attention", DOMAIN):
    _register_schemas()
_opset = onnxscript.values.Opset(DOMAIN, OPSET_VERSION)


def _emit_attention(
    q: Any, k: Any, v: Any, layer: int, num_heads: int, num_kv_heads: int, scale: float, window: int, softcap: float
) -> Any:
    return _opset.Attention(
        q,
        k,
        v,
        layer=layer,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        scale=scale,
        window=window,
        softcap=softcap,
    )


def _emit_rope(x: Any, cos: Any, sin: Any, style: int, rotary_dim: int) -> Any:
    return _opset.Rope(x, cos, sin, style=style, rotary_dim=rotary_dim)


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.castline.attention.default: _emit_attention,
    torch.ops.castline.rope.default: _emit_rope,
}
