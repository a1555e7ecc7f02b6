"""`castline bench`: options and their checks; everything heavy is imported when it runs."""

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from castline import __version__

if TYPE_CHECKING:
    from castline.server.bench.results import Report
    from castline.server.bench.settings import Settings

SYNTHETIC_ONLY = ("prompt_tokens", "prompt_spread", "output_spread", "shared_prefix_tokens")
PLOT_SUFFIXES = (".png", ".svg")


def _numbers(of: type[int] | type[float]) -> Callable[[click.Context, click.Parameter, str | None], tuple[float, ...]]:
    """An option's callback: comma-separated positive numbers, none twice; none at all without the option."""

    def parse(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[float, ...]:
        if value is None:
            return ()
        try:
            numbers = tuple(of(part) for part in value.split(","))
        except ValueError:
            kind = "whole numbers" if of is int else "numbers"
            raise click.BadParameter(f"{value!r} is not a list of {kind}, as in 1,4,16") from None
        if not all(0 < number < float("inf") for number in numbers):
            raise click.BadParameter(f"{value!r}: every number must be above 0")
        if len(set(numbers)) < len(numbers):
            raise click.BadParameter(f"{value!r} names a number twice")
        return numbers

    return parse


@click.command(context_settings={"max_content_width": 100})
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="The server, with or without /v1.")
@click.option("--model", help="Model to ask for.  [default: the first of /v1/models]")
@click.option("--api-key", envvar="OPENAI_API_KEY", show_envvar=True, help="Sent as a bearer token.")
@click.option(
    "--endpoint",
    type=click.Choice(["completions", "chat"]),
    default="completions",
    show_default=True,
    help="Which of the two APIs to load.",
)
@click.option(
    "--concurrency",
    "concurrencies",
    callback=_numbers(int),
    metavar="N,N,…",
    help="Closed loop: keep N requests in flight; one point for each N.  [default: 1,4,8,16, without --rate]",
)
@click.option(
    "--rate",
    "rates",
    callback=_numbers(float),
    metavar="R,R,…",
    help="Open loop: R requests a second at random times, whatever the server does; one point for each R.",
)
@click.option(
    "--burstiness",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SHAPE",
    default=1.0,
    show_default=True,
    help="Of the open loop: shape of the gamma-distributed gaps. 1 is Poisson, less is burstier.",
)
@click.option(
    "--num-requests",
    type=click.IntRange(min=1),
    metavar="N",
    help="Requests of each point.  [default: 8 for each worker, or 30 s of arrivals; at least 16]",
)
@click.option(
    "--duration",
    "duration_s",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Start requests for so long at each point, instead of --num-requests.",
)
@click.option(
    "--prompt-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    default=128,
    show_default=True,
    help="Length of the synthetic prompts, in the server's tokens.",
)
@click.option(
    "--prompt-spread",
    type=click.IntRange(min=0),
    metavar="N",
    default=0,
    show_default=True,
    help="Prompt lengths are uniform over --prompt-tokens ± this.",
)
@click.option(
    "--output-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    default=128,
    show_default=True,
    help="Tokens asked of each answer (max_tokens).",
)
@click.option(
    "--output-spread",
    type=click.IntRange(min=0),
    metavar="N",
    default=0,
    show_default=True,
    help="Output lengths are uniform over --output-tokens ± this.",
)
@click.option(
    "--shared-prefix-tokens",
    type=click.IntRange(min=0),
    metavar="N",
    default=0,
    show_default=True,
    help="Begin every prompt with the same text of this length, before --prompt-tokens.",
)
@click.option(
    "--dataset",
    type=click.Path(exists=True, dir_okay=False),
    help="JSONL of prompts instead of synthetic ones: `prompt` or `messages`, optional `max_tokens`.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of prompts, lengths and arrival times.")
@click.option(
    "--warmup",
    type=click.IntRange(min=0),
    metavar="N",
    default=2,
    show_default=True,
    help="Unmeasured requests before the first point, one at a time.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="Give a request up, as a failure, after so long.",
)
@click.option(
    "--ignore-eos/--no-ignore-eos",
    default=True,
    show_default=True,
    help="Ask the server to generate the full length; some servers refuse the field.",
)
@click.option(
    "--temperature", type=click.FloatRange(min=0), metavar="T", default=0.0, show_default=True, help="0 is greedy."
)
@click.option(
    "--slo",
    metavar="LIMITS",
    help="Report goodput: requests a second within limits in ms, as in ttft:500,itl:80 (also tpot, e2e).",
)
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the results there.")
@click.option("--json-requests", is_flag=True, help="With --json: every request too.")
@click.option(
    "--plot",
    "plot_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw throughput, TTFT and ITL against the load; .png or .svg.",
)
@click.option("--title", help="Names the run in the table, the JSON and the picture.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    api_key: str | None,
    json_path: Path | None,
    json_requests: bool,
    plot_path: Path | None,
    **options: Any,
) -> None:
    """Load an OpenAI-compatible server, and say how fast it is.

    Streams completions over a sweep of loads and reports throughput, time to first token (TTFT), inter-token latency
    (ITL), time per output token (TPOT) and end-to-end latency at each. Prompts are synthetic and sized in the server's
    own tokens; the lengths reported are the server's own counts.

    \b
    castline bench --concurrency 1,8,32 --plot curve.png
    castline bench --rate 0.5,1,2,4 --duration 60 --json rates.json
    castline bench --url https://HOST --endpoint chat --no-ignore-eos

    Exit status: 0; 1 when no request succeeded; 2 for wrong options; 130 after Ctrl-C, with what was measured.
    """
    _check_options(ctx, options, json_path, json_requests, plot_path)
    _check_packages(plot_path)
    from castline.server.bench.settings import Settings

    report, stopped_early = _run(Settings(**options), api_key)
    _write(report, json_path, json_requests, plot_path)
    if stopped_early and not report.interrupted:
        click.echo("castline: no request of the last point succeeded; the loads after it were left out", err=True)
    if report.interrupted:
        click.echo("castline: interrupted; the last point is partial", err=True)
        ctx.exit(130)
    if not report.any_completed:
        click.echo("castline: no request succeeded", err=True)
        ctx.exit(1)


def _run(settings: "Settings", api_key: str | None) -> "tuple[Report, bool]":
    import platform

    from castline.server.bench.status import StatusLine
    from castline.server.bench.sweep import Sweep, run_sweep

    versions = {"castline": __version__, "python": platform.python_version(), "system": platform.platform()}
    status = StatusLine(sys.stderr)
    sweep = Sweep(settings, versions, status, api_key)
    try:
        report = run_sweep(sweep)
    finally:
        status.clear()
    return report, sweep.stopped_early


def _write(report: "Report", json_path: Path | None, json_requests: bool, plot_path: Path | None) -> None:
    from castline.server.bench.results import write_report
    from castline.server.bench.table import print_report

    print_report(report, sys.stdout)
    if json_path is not None:
        write_report(json_path, report, with_requests=json_requests)
        click.echo(f"wrote {json_path}", err=True)
    if plot_path is not None and report.points:
        from castline.server.bench.plot import draw

        draw(plot_path, report)
        click.echo(f"wrote {plot_path}", err=True)


def _check_options(
    ctx: click.Context, options: dict[str, Any], json_path: Path | None, json_requests: bool, plot_path: Path | None
) -> None:
    """Everything that can be wrong is found before the server is asked anything."""
    given = [name for name in options if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    if options["num_requests"] is not None and options["duration_s"] is not None:
        raise click.UsageError("--num-requests and --duration exclude each other: give one")
    if "burstiness" in given and not options["rates"]:
        raise click.UsageError("--burstiness shapes the arrivals of an open loop: give --rate with it")
    if options["dataset"] and (clash := [name for name in SYNTHETIC_ONLY if name in given]):
        raise click.UsageError(f"--dataset brings its own prompts: leave out --{clash[0].replace('_', '-')}")
    for name in ("prompt", "output"):
        if options[f"{name}_spread"] >= options[f"{name}_tokens"]:
            raise click.UsageError(
                f"--{name}-spread {options[f'{name}_spread']} must be below --{name}-tokens {options[f'{name}_tokens']}"
            )
    if json_requests and json_path is None:
        raise click.UsageError("--json-requests adds to the JSON document: give --json FILE with it")
    if plot_path is not None and plot_path.suffix not in PLOT_SUFFIXES:
        raise click.UsageError(f"--plot {plot_path}: the name must end in {' or '.join(PLOT_SUFFIXES)}")
    for option, path in (("--json", json_path), ("--plot", plot_path)):
        if path is not None and not path.parent.is_dir():
            raise click.UsageError(f"{option} {path}: the directory {path.parent} does not exist")


def _check_packages(plot_path: Path | None) -> None:
    needed = ["rich"] + (["matplotlib"] if plot_path is not None else [])
    if missing := [name for name in needed if find_spec(name) is None]:
        raise click.ClickException(
            f"castline bench needs {' and '.join(missing)}, of the optional packages: pip install 'castline[bench]'"
        )
