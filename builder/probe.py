"""What a model's attention does, found by running it on a few tokens before anything long starts.

The model runs four times on eight tokens: with its own attention; with ours, which must give the same logits; and, with
attention replaced by a function of each token alone, on the tokens in two orders, which must give the same logits in
two orders. So a model whose layers hold other state (convolutions, recurrences), or bias attention in ways we do not
compute, is refused here and cannot come out of the export looking well.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from castline.builder.attention import LayerAttention, RopeStyle, attention, flat, half_table, rope, traced
from castline.engines.errors import BuildError
from castline.plugins.contract import HEAD_DIM_STEP, MAX_HEAD_DIM

NUM_TOKENS = 8
RELATIVE_TOLERANCE = 2e-4


@dataclass(frozen=True, slots=True)
class MaskFacts:
    """Stands for a mask in the probe: which keys a query sees. ``window`` 0: every key up to its own."""

    window: int


@dataclass(frozen=True, slots=True)
class ModelProbe:
    """Attention of every layer, and the RoPE style of each modelling function that applies one."""

    layers: tuple[LayerAttention, ...]
    vocab_size: int
    rope_styles: dict[Callable[..., Any], tuple[RopeStyle, int] | None]


def read_mask(mask_function: Callable[..., Any], local_size: int | None = None, **_: Any) -> MaskFacts:
    """The window of a mask, by evaluating it. Raises BuildError for what is neither causal nor a sliding window."""
    far = max(1 << 17, 2 * (local_size or 0))
    window = int(_row(mask_function, far).sum())
    window = 0 if window == far + 1 else window
    for query in (0, 1, 7, window, window + window // 2 + 1, far):
        keys = torch.arange(query + 8)
        expected = (keys <= query) & ((keys > query - window) if window else True)
        if not torch.equal(_row(mask_function, query), expected):
            raise BuildError(
                "probe: this model's attention mask is neither causal nor a sliding window; castline cannot build it"
            )
    return MaskFacts(window)


def _row(mask_function: Callable[..., Any], query: int) -> Tensor:
    keys = torch.arange(query + 8)
    zero = torch.zeros((), dtype=torch.long)
    row = torch.as_tensor(mask_function(zero, zero, torch.tensor(query), keys), dtype=torch.bool)
    return row.expand(keys.shape)


def rope_style(original: Callable[..., Any], q: Tensor, cos: Tensor) -> tuple[RopeStyle, int] | None:
    """The style of *original* for tensors shaped like these, and how many elements turn; None for a style unknown."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(q.shape, generator=generator)
    for style in RopeStyle:
        rotary_dim = cos.shape[-1] * (2 if style.narrow else 1)
        if rotary_dim > q.shape[-1]:
            continue
        angle = torch.randn((*cos.shape[:-1], rotary_dim // 2), generator=generator)
        tables = [_widen(t, style) for t in (angle.cos(), angle.sin())]
        try:
            wanted = original(x, x, *tables)[0]
        except RuntimeError:
            continue
        if torch.allclose(wanted, rope(x, *tables, int(style), rotary_dim), atol=1e-6):
            return style, rotary_dim
    return None


def _widen(half: Tensor, style: RopeStyle) -> Tensor:
    if style.narrow:
        return half
    wide = half.repeat_interleave(2, -1) if style == RopeStyle.INTERLEAVED else torch.cat((half, half), -1)
    assert torch.equal(half_table(wide, style), half)
    return wide


@dataclass
class _Recorder:
    """Runs our attention eagerly and notes what each layer asked for."""

    layers: list[LayerAttention] = field(default_factory=list)
    styles: dict[Callable[..., Any], tuple[RopeStyle, int] | None] = field(default_factory=dict)

    def mask(self, **kwargs: Any) -> MaskFacts:
        return read_mask(**kwargs)

    def rope(self, original: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
        if original not in self.styles:
            self.styles[original] = rope_style(original, q, cos)

    def attention(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        layer = len(self.layers)
        if s_aux is not None or getattr(module, "sinks", None) is not None:
            raise BuildError("probe: attention sinks are not supported yet; castline cannot build this model")
        if not isinstance(mask, MaskFacts):
            raise BuildError(f"probe: layer {layer} attends without a causal mask; castline cannot build this model")
        if key.shape[3] != value.shape[3] or query.shape[3] != key.shape[3]:
            raise BuildError(
                "probe: keys and values of different head sizes are not supported; castline cannot build this model"
            )
        if getattr(module, "layer_idx", layer) != layer:
            raise BuildError("probe: attention layers run out of order; castline cannot build this model")
        self.layers.append(
            LayerAttention(
                layer=layer,
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                head_dim=query.shape[3],
                scale=float(query.shape[3] ** -0.5 if scaling is None else scaling),
                window=mask.window,
                softcap=float(softcap or 0.0),
            )
        )
        return run_attention(self.layers[-1], query, key, value)


class _TokenLocal:
    """Attention that looks at its own token only."""

    def mask(self, **_: Any) -> None:
        return None

    def rope(self, original: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
        return None

    def attention(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> Tensor:
        return flat(query + value.repeat_interleave(query.shape[1] // value.shape[1], 1))


def run_attention(facts: LayerAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The custom operator for one layer; query [1, H, T, D], key and value [1, KV, T, D] → [T, H*D]."""
    out: Tensor = attention(
        flat(query),
        flat(key),
        flat(value),
        facts.layer,
        facts.num_heads,
        facts.num_kv_heads,
        facts.scale,
        facts.window,
        facts.softcap,
    )
    return out


def _logits(model: PreTrainedModel, ids: Tensor, positions: Tensor) -> Tensor:
    with torch.no_grad():
        out = model(input_ids=ids[None], position_ids=positions[None], attention_mask=None, use_cache=False)
    logits: Tensor = out.logits[0].float()
    return logits


def _differ(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() > RELATIVE_TOLERANCE * (1 + b.abs().max()))


def probe_model(model: PreTrainedModel) -> ModelProbe:
    """Facts about *model*'s attention. Raises BuildError where one paged-attention node a layer cannot carry it."""
    num_layers = model.config.num_hidden_layers
    ids = torch.randint(0, model.config.vocab_size, (NUM_TOKENS,), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(NUM_TOKENS)
    wanted = _logits(model, ids, positions)
    recorder = _Recorder()
    with traced(model, recorder):
        try:
            found = _logits(model, ids, positions)
        except (TypeError, AttributeError, RuntimeError) as error:
            raise BuildError(
                f"probe: this model's attention does not go through transformers' attention interface ({error})"
            ) from error
    _check_layers(recorder.layers, num_layers)
    if _differ(found, wanted):
        raise BuildError(
            "probe: this model's attention uses something castline does not compute (a bias, or another mask)"
        )
    order = torch.randperm(NUM_TOKENS, generator=torch.Generator().manual_seed(1))
    with traced(model, _TokenLocal()):
        straight, shuffled = _logits(model, ids, positions), _logits(model, ids[order], positions[order])
    if _differ(shuffled, straight[order]):
        raise BuildError(
            "probe: this model mixes tokens outside attention (a convolution or a recurrence); castline cannot build it"
        )
    return ModelProbe(tuple(recorder.layers), wanted.shape[-1], recorder.styles)


def _check_layers(layers: list[LayerAttention], num_layers: int) -> None:
    if len(layers) != num_layers:
        raise BuildError(
            f"probe: {len(layers)} attention calls for {num_layers} layers; "
            "castline builds models with one attention in every layer"
        )
    if not layers:
        raise BuildError("probe: this model has no layers; num_hidden_layers in its config must be at least 1")
    geometries = {(a.num_heads, a.num_kv_heads, a.head_dim) for a in layers}
    if len(geometries) != 1:
        raise BuildError("probe: layers with different heads are not supported; castline cannot build this model")
    head_dim = layers[0].head_dim
    if head_dim % HEAD_DIM_STEP or head_dim > MAX_HEAD_DIM:
        raise BuildError(
            f"probe: heads of {head_dim} elements are not supported: the attention kernels take multiples of "
            f"{HEAD_DIM_STEP} up to {MAX_HEAD_DIM}"
        )
