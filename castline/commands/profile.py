"""`castline profile`: where the time of a step of a given shape goes, without a server."""

from pathlib import Path
from typing import Any

import click

from castline.runtime.load_options import LoadOptions
from castline.runtime.loader import plan_engine
from castline.runtime.profile_options import DEFAULT_STEPS, ProfileOptions
from castline.runtime.sampling_params import SamplingParams


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("repository", type=click.Path(path_type=Path))
@click.option("--model", metavar="NAME", help="Model of the repository.  [default: the only one]")
@click.option("--version", type=int, metavar="N", help="Version of the model.  [default: the latest]")
@click.option("--batch", type=click.IntRange(min=0), default=1, show_default=True, help="Sequences that decode.")
@click.option("--context", type=click.IntRange(min=1), default=128, show_default=True, help="Tokens of each before.")
@click.option(
    "--prefill",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Tokens of a prompt that is computed beside them, again and again; may be longer than a step takes.",
)
@click.option("--steps", type=click.IntRange(1, 10_000), default=DEFAULT_STEPS, show_default=True, help="To record.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="Of the sampling; 0 is greedy.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="Of the sampling.")
@click.option("--top-k", type=int, default=0, show_default=True, help="Of the sampling; 0 keeps every token.")
@click.option("--kv-blocks", type=int, metavar="N", help="Exactly this many KV blocks.")
@click.option("--threads", type=int, metavar="N", help="Compute threads of a CPU.  [default: the tuner's choice]")
@click.option("--allow-unverified", is_flag=True, help="Take an engine that did not pass its parity check.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(),
    help="Directory for castline-N.trace.json, which ui.perfetto.dev opens.  [default: here]",
)
def command(
    repository: Path,
    batch: int,
    context: int,
    prefill: int,
    steps: int,
    temperature: float,
    top_p: float,
    top_k: int,
    output: Path,
    **load: Any,
) -> None:
    """Show where the time of a step goes, by phase and by operator.

    Runs steps of one shape on an engine of REPOSITORY, prints a table, and writes a trace. The steps of real traffic:
    `castline run --profile`. On a GPU it tells the phases of the engine loop only, for Nsight Systems sees the rest.

    \b
    castline profile engines --batch 32 --context 256
    castline profile engines --batch 8 --prefill 4000
    """
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k)
    plan = plan_engine(repository, LoadOptions(**load, speculation="off"))  # a guess would change the shape
    options = ProfileOptions.into(output, steps)
    # Here, so that help and a refused engine answer at once.
    from castline.runtime.profiler import Profiler
    from castline.runtime.startup import load_core
    from castline.runtime.step_workload import StepShape, StepWorkload

    profiler = Profiler(options)
    core, executor = load_core(plan.bundle, plan.limits, plan.num_threads, profiler, huge_pages=plan.huge_pages)
    try:
        profiler.attach(executor, plan.limits)
        shape = StepShape(batch, context, prefill, params)
        StepWorkload(shape, core, plan.limits, plan.manifest.model.vocab_size).run(profiler)
    finally:
        core.close()
        executor.close()
