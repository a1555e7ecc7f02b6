"""`castline plan`: options and tables. The arithmetic is `castline.planning`."""

import dataclasses
from typing import Any, get_args

import click
import msgspec

from castline.builder.options import BLOCK_SIZES, KvDtypeChoice
from castline.engines.build_recipe import BuildRecipe
from castline.engines.errors import BuildError
from castline.engines.memory_plan import Asked
from castline.engines.precision import gpu_weights
from castline.engines.sku import HOST_SKU, Sku
from castline.option_types import WEIGHT_RECIPES, RecipeChoice, SkuChoice, merge
from castline.planning import DEFAULT_CONTEXT, OF_THE_BUNDLE, Engine, Report, Speeds, plan

ASKED = ("max_model_len", "max_num_seqs", "max_num_batched_tokens")


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--model", help="Hugging Face directory, GGUF file, `demo`, or an engine bundle or its repository.")
@click.option(
    "--sku",
    type=SkuChoice(),
    metavar="NAME",
    help="GPU by its file under engines/skus; `cpu` is this machine's processor.  [default: the bundle's, or cpu]",
)
@click.option(
    "--recipe",
    type=RecipeChoice(),
    metavar=f"[{'|'.join(WEIGHT_RECIPES)}|FILE.toml]",
    help="Precision of the weights, or a build recipe's file.  [default: the SKU's]",
)
@click.option("--kv-dtype", type=click.Choice(get_args(KvDtypeChoice)), help="Of the KV blocks.  [default: the SKU's]")
@click.option("--block-size", type=click.Choice([str(size) for size in BLOCK_SIZES]), help="Tokens of a KV block.")
@click.option("--max-model-len", type=click.IntRange(min=2), metavar="TOKENS", help="Prompt and answer together.")
@click.option("--max-num-seqs", type=click.IntRange(min=1), metavar="N", help="Most sequences in a step.")
@click.option("--max-num-batched-tokens", type=click.IntRange(min=1), metavar="TOKENS", help="Most tokens in a step.")
@click.option("--memory-utilization", type=float, metavar="SHARE", help="Share of the memory to use, 0 to 1.")
@click.option("--kv-blocks", type=int, metavar="N", help="Exactly this many KV blocks.")
@click.option(
    "--context",
    type=click.IntRange(min=1),
    metavar="TOKENS",
    help=f"Length of the sequences that speeds are for.  [default: {DEFAULT_CONTEXT}]",
)
@click.option("--json", "as_json", is_flag=True, help="Print it all as JSON, sizes in bytes.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    model: str | None,
    sku: Sku | None,
    recipe: str | BuildRecipe | None,
    memory_utilization: float | None,
    kv_blocks: int | None,
    context: int | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Say what of a model fits on a GPU, and how fast it can be at most. Needs no GPU, and reads no weights.

    The memory is divided by the function that `castline run` calls, so that both agree to the block where the memory is
    the same; speeds are the roofline: 100 % of bandwidth and of the dense peak, which no engine reaches.

    \b
    castline plan --model demo --sku l4
    castline plan --model ./Qwen3-0.6B --sku h100-sxm --recipe fp8 --max-model-len 8192
    castline plan --model models
    """
    options = merge(recipe, {"model": model, **given})
    if "model" not in options:
        raise BuildError("--model is missing: name a model, a bundle, or a build recipe with --recipe FILE.toml")
    asked = Asked(
        kv_blocks=kv_blocks, memory_utilization=memory_utilization, **{name: options.get(name) for name in ASKED}
    )
    is_host = sku is None and ctx.get_parameter_source("sku") is click.core.ParameterSource.COMMANDLINE
    precision = {name: options[name] for name in OF_THE_BUNDLE if name in options}
    report = plan(options["model"], HOST_SKU if is_host else sku, precision, asked, context)
    click.echo(to_json(report) if as_json else "\n".join(lines(report)))


def to_json(report: Report) -> str:
    """Every figure, with those that are derived."""
    memory = report.memory
    document = {
        "model": report.engine.model,
        "sku": report.engine.sku.name if report.engine.sku else HOST_SKU,
        "recipe": report.engine.recipe,
        "kv_dtype": report.engine.kv_dtype,
        "limits": memory.limits,
        "memory": {
            "available_bytes": memory.available_bytes,
            "utilization": memory.utilization,
            "weight_bytes": memory.weight_bytes,
            "weights_are_estimated": not report.engine.is_built,
            "scratch_bytes": report.engine.memory.scratch_bytes,
            "step_bytes": memory.step_bytes,
            "pool_bytes": memory.pool.total_bytes,
        },
        "kv": {
            "num_blocks": memory.pool.num_blocks,
            "block_size": memory.pool.block_size,
            "bytes_per_block": memory.pool.bytes_per_block,
            "num_tokens": memory.pool.num_tokens,
            "max_concurrency": memory.pool.max_concurrency,
        },
        "roofline": _roofline(report),
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()


def _roofline(report: Report) -> dict[str, Any] | None:
    if report.speeds is None or report.engine.sku is None:
        return None
    sku = report.engine.sku
    return {
        "share_of_peak": 1.0,
        "bandwidth_gb_per_s": sku.bandwidth_gb_per_s,
        "dense_tflops": sku.dense_tflops,
        **dataclasses.asdict(report.speeds),
    }


def lines(report: Report) -> list[str]:
    """The tables, at most 80 columns wide."""
    found = [*_engine_lines(report), "", *_memory_lines(report), "", *_kv_lines(report), ""]
    if report.speeds is None:
        return [*found, "speed  not estimated: no datasheet tells this processor's bandwidth and peak"]
    assert report.engine.sku is not None
    return [*found, *_speed_lines(report.speeds, report.engine.sku, report.engine.recipe)]


def _engine_lines(report: Report) -> list[str]:
    engine, limits = report.engine, report.memory.limits
    model = engine.model
    device = "this machine's processor" if engine.sku is None else engine.sku.title
    return [
        f"model    {model.name} ({model.architecture}, {model.num_parameters / 1e6:,.1f} M parameters)",
        f"device   {device}",
        *([f"         compute capability {engine.sku.compute_capability}"] if engine.sku else []),
        f"engine   {engine.recipe} weights, {engine.kv_dtype} KV blocks of {limits.block_size} tokens",
        f"limits   max_model_len {limits.max_model_len}, max_num_seqs {limits.max_num_seqs}, "
        f"max_num_batched_tokens {limits.max_num_batched_tokens}",
    ]


def _memory_lines(report: Report) -> list[str]:
    memory = report.memory
    whose = "free on this machine" if report.engine.sku is None else "of the device"
    rows = [
        ("available", memory.available_bytes, whose),
        ("weights", memory.weight_bytes, _weights_note(report.engine)),
        ("step", memory.step_bytes, f"activations and logits of {memory.limits.max_num_batched_tokens:,} tokens"),
        ("KV pool", memory.pool.total_bytes, f"to {memory.utilization:.0%} of what is available"),
        ("unused", memory.available_bytes - memory.used_bytes, ""),
    ]
    return [
        "memory           MiB",
        *(f"  {name:<9}{size / 2**20:>9,.0f}  {note}".rstrip() for name, size, note in rows),
    ]


def _weights_note(engine: Engine) -> str:
    if not engine.is_built:
        return "estimated"
    return "the bundle's files" if engine.sku is None else "as the bundle records them"


def _kv_lines(report: Report) -> list[str]:
    pool = report.memory.pool
    return [
        "KV cache",
        f"  blocks     {pool.num_blocks:,} of {pool.block_size} tokens; {pool.bytes_per_block:,} bytes each",
        f"  tokens     {pool.num_tokens:,}",
        f"  maximum concurrency at max_model_len ({pool.max_model_len}): {pool.max_concurrency:.2f}x",
    ]


def _speed_lines(speeds: Speeds, sku: Sku, recipe: str) -> list[str]:
    rate = gpu_weights(recipe).rate
    peak = f"{sku.flops_per_s(rate) / 1e12:g} dense TFLOP/s in {rate}"
    steps = [("decode", decode.batch, decode.estimate) for decode in speeds.decode]
    steps.append(("prefill", 1, speeds.prefill))
    return [
        f"speed: upper bound, 100 % of {sku.bandwidth_gb_per_s:,g} GB/s and of {peak}",
        f"  {'':<8}{'sequences':>9}{'context':>9}{'tokens/s':>12}{'ms':>10}  bound by",
        *(
            f"  {name:<8}{batch:>9}{speeds.context:>9}{e.tokens_per_s:>12,.0f}{e.seconds * 1e3:>10.3f}  {e.bound}"
            for name, batch, e in steps
        ),
        "  seconds = max(bytes / bandwidth, layer FLOP / peak + other FLOP / 16-bit peak)",
        "  decode reads the weights once and each sequence's K and V; FLOP = 2 a weight",
        "  and token, 4·heads·head_dim a layer and pair of tokens (attention).",
        *([f"  The weights fit the L2 cache of {sku.l2_mib} MiB: decode may pass its bound."] if speeds.in_l2 else []),
    ]
