"""`castline run`: serve an engine over gRPC and HTTP."""

import logging
import signal
import sys
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from castline.engines.repository import find_bundle
from castline.runtime.engine_child import EngineProcess
from castline.runtime.huge_heap import SETTINGS
from castline.runtime.load_options import DEFAULT_DRAFTS, HUGE_PAGES_MODES, SPECULATION_MODES, LoadOptions
from castline.runtime.profile_options import DEFAULT_STEPS, ProfileOptions
from castline.runtime.stream_interval import FEW_REQUESTS, INTERVALS, MAX_SHARE
from castline.server.options import Endpoints, ServerOptions

if TYPE_CHECKING:
    from castline.runtime.async_engine import AsyncEngine
    from castline.runtime.loader import EnginePlan
    from castline.server.serving import ServedModel

LOG_LEVELS = ("debug", "info", "warning", "error")
SERVER, LOAD = ServerOptions(), LoadOptions()
"""The defaults."""
PORT = click.IntRange(0, 65535)


class StreamIntervalChoice(click.ParamType):  # type: ignore[type-arg]
    """A number of tokens, or ``auto``, which gives None."""

    name = "stream interval"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        if value == "auto":
            return None
        if value.isdecimal() and int(value) >= 1:
            return int(value)
        raise click.BadParameter(f"{value!r} is neither a number of tokens, at least 1, nor auto", ctx, param)


@click.command()
@click.argument("repository", type=click.Path(path_type=Path))
@click.option("--model", metavar="NAME", help="Model of the repository.  [default: the only one]")
@click.option("--version", type=int, metavar="N", help="Version of the model.  [default: the latest]")
@click.option("--served-model-name", metavar="NAME", help="Name in the API.  [default: the model's]")
@click.option("--host", default=SERVER.host, show_default=True, help="Address to listen on.")
@click.option("--http-port", type=PORT, default=SERVER.http_port, show_default=True, help="0 picks a free port.")
@click.option("--grpc-port", type=PORT, default=SERVER.grpc_port, show_default=True, help="0 picks a free port.")
@click.option("--memory-utilization", type=float, metavar="SHARE", help="Share of free memory to use, 0 to 1.")
@click.option(
    "--kv-blocks",
    type=int,
    metavar="N",
    help="Exactly this many KV blocks.  [default: on CPUs one longest sequence and 256 tokens for each of the others, "
    "on GPUs what is free]  On CPUs memory is taken as it is used, up to all of them.",
)
@click.option("--max-model-len", type=int, metavar="TOKENS", help="Prompt and answer together.")
@click.option("--max-num-seqs", type=int, metavar="N", help="Sequences computed at once.")
@click.option("--max-num-batched-tokens", type=int, metavar="TOKENS", help="Tokens of one step.")
@click.option(
    "--max-waiting",
    default=LOAD.max_waiting,
    show_default=True,
    metavar="N",
    help="Continuations that may wait, n of each prompt; more are refused.",
)
@click.option("--threads", type=int, metavar="N", help="Compute threads of a CPU.  [default: the tuner's choice]")
@click.option(
    "--speculation",
    type=click.Choice(SPECULATION_MODES),
    default=LOAD.speculation,
    show_default=True,
    help="Guess tokens ahead from the text so far, where it pays: never on a GPU. Answers stay the same.",
)
@click.option(
    "--max-drafts",
    type=int,
    metavar="N",
    help=f"Tokens guessed ahead at most, for each sequence; not on a GPU.  [default: {DEFAULT_DRAFTS}]",
)
@click.option(
    "--huge-pages",
    type=click.Choice(HUGE_PAGES_MODES),
    default=LOAD.huge_pages,
    show_default=True,
    help="Move a CPU engine's weights into huge pages, in the background while it serves, where the system has them. "
    "off: they stay in the file's pages, which several servers of one engine share.",
)
@click.option(
    "--drain-timeout",
    type=click.FloatRange(min=0),
    default=SERVER.drain_timeout_s,
    show_default=True,
    metavar="SECONDS",
    help="What running requests get to finish after SIGTERM or Ctrl-C.",
)
@click.option(
    "--stream-interval",
    type=StreamIntervalChoice(),
    default="auto",
    show_default=True,
    metavar="N|auto",
    help="Tokens of a streamed message; the first token goes at once. auto: one, and up to "
    f"{INTERVALS[-1]} while serving more than {FEW_REQUESTS} requests would take more than {MAX_SHARE:.0%} of the "
    "machine's CPU time otherwise.",
)
@click.option("--allow-unverified", is_flag=True, help="Serve an engine that did not pass its parity check.")
@click.option("--verify-files", is_flag=True, help="Hash every file of the engine first.")
@click.option(
    "--profile",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIRECTORY",
    help="Record where the time of the first steps goes, by phase and operator: prints a table, and writes "
    "DIRECTORY/castline-N.trace.json for ui.perfetto.dev. SIGUSR1 ends the recording and begins the next.",
)
@click.option(
    "--profile-steps",
    type=click.IntRange(min=1, max=10_000),
    default=DEFAULT_STEPS,
    show_default=True,
    metavar="N",
    help="Steps of a recording.",
)
@click.option("--log-level", type=click.Choice(LOG_LEVELS), default="info", show_default=True)
def command(
    repository: Path,
    served_model_name: str | None,
    host: str,
    http_port: int,
    grpc_port: int,
    drain_timeout: float,
    stream_interval: int | None,
    profile: Path | None,
    profile_steps: int,
    log_level: str,
    **load: Any,
) -> None:
    """Serve an engine of REPOSITORY, the directory that `castline build` wrote, over HTTP and gRPC."""
    begin = perf_counter()
    if profile is not None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # one that comes too early would end the server
    _configure_logging(log_level)
    # The engine's process begins first, and each imports on a core of its own; nothing else here is imported before it.
    asked = LoadOptions(**load)
    bundle = find_bundle(repository, asked.model, asked.version)
    process, connection = EngineProcess.begin(bundle, asked.huge_pages)
    try:
        from castline.runtime.loader import plan_bundle

        plan = plan_bundle(bundle, asked)
        profiling = None if profile is None else ProfileOptions.into(profile, profile_steps)
        name = served_model_name or _model_name(plan)
        options = ServerOptions(host, http_port, grpc_port, name, drain_timeout, stream_interval)
    except BaseException:
        process.abandon(connection)
        raise
    process.load(connection, plan, profiling)
    # Here, so that a refused engine answers at once; and the engine loads meanwhile.
    import asyncio

    from castline.runtime.async_engine import AsyncEngine
    from castline.runtime.huge_pages import Settling
    from castline.runtime.stream_interval import AdaptiveInterval, StreamInterval
    from castline.server.app import serve
    from castline.server.event_loop import run

    def on_listening(endpoints: Endpoints) -> None:
        _print_plan(plan, name)
        if plan.manifest.host.target == "cpu":
            click.echo(f"huge pages: {_huge_pages(plan, asked.huge_pages)}")
        click.echo(f"listening: {endpoints.http} {endpoints.grpc}")

    def on_ready(model: "ServedModel", endpoints: Endpoints) -> None:
        click.echo(f"ready in {perf_counter() - begin:.2f} s: {endpoints.http}/v1 {endpoints.grpc}")
        if plan.huge_pages:
            Settling()  # of this process; the engine's sees to itself

    async def open_engine() -> "AsyncEngine":
        interval = AdaptiveInterval() if options.stream_interval is None else StreamInterval(options.stream_interval)
        engine = await AsyncEngine.start(plan, interval=interval, profile=profiling, loading=(process, connection))
        if profiling is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, engine.start_profile)
        return engine

    try:
        run(serve(open_engine, options, on_listening=on_listening, on_ready=on_ready))
    finally:
        process.kill()  # it has ended, unless the server could not begin


def _model_name(plan: "EnginePlan") -> str:
    """The model's directory in a repository; for a bundle that lies elsewhere, the name it was built under."""
    bundle = plan.bundle.resolve()
    return bundle.parent.name if bundle.name.isdigit() else plan.manifest.model.name


def _print_plan(plan: "EnginePlan", name: str) -> None:
    model, precision, limits = plan.manifest.model, plan.manifest.precision, plan.limits
    click.echo(f"model: {name} ({model.architecture}, {model.num_parameters / 1e6:.1f}M parameters) from {plan.bundle}")
    host = plan.manifest.host
    where = f"{plan.num_threads} threads" if host.gpu is None else host.gpu.device_name or host.gpu.sku
    click.echo(f"engine: {host.target}, {precision.recipe} weights, {precision.kv_dtype} KV, {where}")
    click.echo(
        f"limits: max_model_len {limits.max_model_len}, max_num_seqs {limits.max_num_seqs}, "
        f"max_num_batched_tokens {limits.max_num_batched_tokens}, max_waiting {limits.max_waiting}"
    )
    if limits.max_drafts:
        click.echo(f"speculation: prompt lookup where it pays, up to {limits.max_drafts} tokens ahead")
    else:
        click.echo("speculation: off")
    pool_mib = plan.pool.total_bytes / 2**20
    click.echo(f"KV cache: {limits.num_blocks} blocks of {limits.block_size} tokens ({pool_mib:.0f} MiB)")
    click.echo(f"maximum concurrency at max_model_len ({limits.max_model_len}): {limits.max_concurrency:.2f}x")


def _huge_pages(plan: "EnginePlan", mode: str) -> str:
    if plan.huge_pages:
        return "weights and heap move into them while it serves, as far as the system lets them"
    return "off" if mode == "off" else f"none of 2 MiB here, so that steps are slower: see {SETTINGS}"


def _configure_logging(level: str) -> None:
    """One plain line an event, on standard error."""
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=level.upper(), stream=sys.stderr, format=form)
    # castline logs what matters of a request; uvicorn would say it again, and more for every broken request.
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
