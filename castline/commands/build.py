"""`castline build`: the options, and the interruptions. What a build does is `castline.builder.pipeline`."""

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, get_args

import click

from castline.builder.options import BLOCK_SIZES, BuildOptions, KvDtypeChoice
from castline.builder.recipes import AUTO_RECIPE, DEFAULT_RECIPE, RECIPES
from castline.engines.build_recipe import BuildRecipe
from castline.engines.errors import BuildError
from castline.engines.manifest import Target
from castline.engines.precision import GPU_WEIGHTS
from castline.engines.sku import Sku
from castline.option_types import WEIGHT_RECIPES, RecipeChoice, SkuChoice, merge, sku_defaults

_DEFAULTS = BuildOptions("", Path())
_RECIPE_HELP = "; ".join(
    [
        f"{AUTO_RECIPE}: q4_1 where the weights are on its grid, else int8",
        *(f"{recipe.name}: {recipe.summary}" for recipe in RECIPES.values()),
    ]
)
_GPU_RECIPE_HELP = "; ".join(f"{form.name}: {form.summary}" for form in GPU_WEIGHTS.values())
DEFAULT_OUTPUT = Path("models")
_NEEDED = ("torch", "transformers", "safetensors", "onnx", "onnx_ir", "onnxscript", "gguf", "matplotlib", "rich")


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.argument("model", required=False)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Repository to write into: the engine becomes OUTPUT/NAME/VERSION.  [default: models, or models/SKU]",
)
@click.option(
    "--target",
    type=click.Choice(get_args(Target)),
    help="Kind of hardware; `tensorrt` takes TensorRT for RTX where it is what can build.  "
    "[default: cpu, or tensorrt with a --sku]",
)
@click.option(
    "--sku",
    type=SkuChoice(),
    metavar="NAME",
    help="GPU to build for, by its file under engines/skus (l4, rtx4090, h100-sxm …). It need not be in this machine.",
)
@click.option(
    "--kernels-only",
    is_flag=True,
    help="For a GPU: graph, kernels and manifest without the plan, which may need TensorRT and that GPU.",
)
@click.option("--name", help="Name of the model when served.  [default: from MODEL]")
@click.option("--version", type=int, help="Version number of the bundle.  [default: the next free one]")
@click.option(
    "--recipe",
    type=RecipeChoice(),
    metavar=f"[{'|'.join(WEIGHT_RECIPES)}|FILE.toml]",
    help=f"Precision of the weights. On a cpu {_RECIPE_HELP}. On a GPU {_GPU_RECIPE_HELP}. "
    f"FILE.toml is a build recipe, as under engines/recipes: it names model, precision and limits, and other options "
    f"override it.  [default: {DEFAULT_RECIPE}, or the SKU's]",
)
@click.option(
    "--kv-dtype",
    type=click.Choice(get_args(KvDtypeChoice)),
    help="Precision of the KV cache.  [default: auto: int8 on the cpu target, or the SKU's]",
)
@click.option(
    "--block-size",
    type=click.Choice([str(size) for size in BLOCK_SIZES]),
    help="Tokens of a KV block.  [default: tuned; 32 with --no-tune]",
)
@click.option("--max-model-len", type=int, help="Longest sequence in tokens.  [default: the model's, at most 32768]")
@click.option(
    "--max-num-seqs",
    type=int,
    help=f"Most sequences in a step.  [default: {_DEFAULTS.max_num_seqs}, or the SKU's]",
)
@click.option(
    "--max-num-batched-tokens",
    type=int,
    help="Most tokens in a step. Bounds a step, never a prompt: longer prompts are computed in chunks.  "
    f"[default: {_DEFAULTS.max_num_batched_tokens}, or the SKU's]",
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
    no_tune: bool, no_verify: bool, verbose: bool, recipe: str | BuildRecipe | None, sku: Sku | None, **given: Any
) -> None:
    """Compile MODEL into a static engine.

    MODEL is a Hugging Face directory (safetensors), a hub id, a GGUF file, or `demo` for the small model of the demo
    extra. An engine runs on the kind of host it was built on; a failed or interrupted build leaves nothing behind.

    \b
    castline build demo --output engines
    castline build ./Qwen3-0.6B --recipe int8 --max-model-len 4096 --output engines
    castline build --recipe engines/recipes/demo.toml --sku l4
    """
    options = resolve_options(recipe, sku, {**given, "tune": not no_tune, "verify": not no_verify})
    _require_build_extra()
    from castline.builder.pipeline import build
    from castline.builder.progress import BuildLog

    with _terminated_like_interrupted():
        bundle = build(options, BuildLog(verbose))
    click.echo(str(bundle))


def resolve_options(recipe: str | BuildRecipe | None, sku: Sku | None, given: Mapping[str, Any]) -> BuildOptions:
    """What to build: options that were given, then the build recipe's, the SKU's, and the defaults.

    *given* has options by the name of their field in BuildOptions, None where the user did not say. Raises BuildError.
    """
    options = merge(recipe, given)
    if "model" not in options:
        raise BuildError("MODEL is missing: name a model, or a build recipe with --recipe FILE.toml")
    if "block_size" in options:
        options["block_size"] = int(options["block_size"])
    options.setdefault("target", "cpu" if sku is None else "tensorrt")
    if isinstance(recipe, BuildRecipe) and options["target"] not in recipe.targets:
        raise BuildError(
            f"the recipe of {recipe.name} is for {', '.join(recipe.targets)}, and not for {options['target']}: "
            + ("give a --sku" if sku is None else "give another recipe")
        )
    options.setdefault("output", DEFAULT_OUTPUT if sku is None else DEFAULT_OUTPUT / sku.name)
    if sku is not None:
        options = {"sku": sku.name, **(sku_defaults(sku) if options["target"] != "cpu" else {}), **options}
    return BuildOptions(**options)


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
