"""`castline build`: the options, and the interruptions. What a build does is `castline.builder.pipeline`."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import get_args

import click

from castline.builder.options import BLOCK_SIZES, BuildOptions, KvDtypeChoice
from castline.builder.recipes import AUTO_RECIPE, DEFAULT_RECIPE, RECIPE_CHOICES, RECIPES
from castline.engines.errors import BuildError
from castline.engines.manifest import Target

_DEFAULTS = BuildOptions("", Path())
_RECIPE_HELP = "; ".join(
    [
        f"{AUTO_RECIPE}: q4_1 where the weights are on its grid, else int8",
        *(f"{recipe.name}: {recipe.summary}" for recipe in RECIPES.values()),
    ]
)
_NEEDED = ("torch", "transformers", "safetensors", "onnx", "onnx_ir", "onnxscript", "gguf", "matplotlib", "rich")


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.argument("model")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    help="Repository to write into: the engine becomes OUTPUT/NAME/VERSION.",
)
@click.option(
    "--target", type=click.Choice(get_args(Target)), default="cpu", show_default=True, help="Kind of hardware."
)
@click.option("--name", help="Name of the model when served.  [default: from MODEL]")
@click.option("--version", type=int, help="Version number of the bundle.  [default: the next free one]")
@click.option(
    "--recipe",
    type=click.Choice(RECIPE_CHOICES),
    default=DEFAULT_RECIPE,
    show_default=True,
    help=f"Precision of the weights. {_RECIPE_HELP}.",
)
@click.option(
    "--kv-dtype",
    type=click.Choice(get_args(KvDtypeChoice)),
    default="auto",
    show_default=True,
    help="Precision of the KV cache; auto is int8 on the cpu target.",
)
@click.option(
    "--block-size",
    type=click.Choice([str(size) for size in BLOCK_SIZES]),
    help="Tokens of a KV block.  [default: tuned; 32 with --no-tune]",
)
@click.option("--max-model-len", type=int, help="Longest sequence in tokens.  [default: the model's, at most 32768]")
@click.option(
    "--max-num-seqs", type=int, default=_DEFAULTS.max_num_seqs, show_default=True, help="Most sequences in a step."
)
@click.option(
    "--max-num-batched-tokens",
    type=int,
    default=_DEFAULTS.max_num_batched_tokens,
    show_default=True,
    help="Most tokens in a step. Bounds a step, never a prompt: longer prompts are computed in chunks.",
)
@click.option("--threads", type=int, help="Threads of the engine.  [default: tuned; all physical cores with --no-tune]")
@click.option(
    "--no-tune", is_flag=True, help="Time nothing: the recipe's first kernels, all physical cores, blocks of 32 tokens."
)
@click.option(
    "--no-verify",
    is_flag=True,
    help="Do not compare the engine with the reference model. `castline run` refuses such an engine unless told.",
)
@click.option("--allow-unverified", is_flag=True, help="Write the engine, marked unverified, even over its tolerance.")
@click.option(
    "--cache-dir", type=click.Path(path_type=Path), help="Where timings are remembered.  [default: ~/.cache/castline]"
)
@click.option("-v", "--verbose", is_flag=True, help="Say what each pass and each choice did.")
def command(
    model: str,
    output: Path,
    target: Target,
    name: str | None,
    version: int | None,
    recipe: str,
    kv_dtype: KvDtypeChoice,
    block_size: str | None,
    max_model_len: int | None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    threads: int | None,
    no_tune: bool,
    no_verify: bool,
    allow_unverified: bool,
    cache_dir: Path | None,
    verbose: bool,
) -> None:
    """Compile MODEL into a static engine.

    MODEL is a Hugging Face directory (safetensors), a hub id, a GGUF file, or `demo` for the small model of the demo
    extra. An engine runs on the kind of host it was built on; a failed or interrupted build leaves nothing behind.

    \b
    castline build demo --output engines
    castline build ./Qwen3-0.6B --recipe int8 --max-model-len 4096 --output engines
    """
    options = BuildOptions(
        model=model,
        output=output,
        target=target,
        name=name,
        version=version,
        recipe=recipe,
        kv_dtype=kv_dtype,
        block_size=int(block_size) if block_size is not None else None,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        threads=threads,
        tune=not no_tune,
        verify=not no_verify,
        allow_unverified=allow_unverified,
        cache_dir=cache_dir,
    )
    _require_build_extra()
    from castline.builder.pipeline import build
    from castline.builder.progress import BuildLog

    with _terminated_like_interrupted():
        bundle = build(options, BuildLog(verbose))
    click.echo(str(bundle))


def _require_build_extra() -> None:
    from importlib.util import find_spec

    missing = [module for module in _NEEDED if find_spec(module) is None]
    if missing:
        raise BuildError(
            f"`castline build` needs {', '.join(missing)}: install them with  pip install 'castline[build]'"
        )


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM unwinds the build like Ctrl-C, so that its temporary directory goes too; the process exits with 143."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
