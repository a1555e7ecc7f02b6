"""The `castline` command. Subcommands are imported when called, so that `--help` costs milliseconds."""

import os
import sys
from importlib import import_module

import click

from castline import __version__
from castline.engines.errors import CastlineError

COMMANDS = {
    "build": "Compile a model into a static engine.",
    "plan": "Say what of a model fits on a GPU, and how fast it can be at most.",
    "run": "Serve an engine over gRPC and HTTP.",
    "profile": "Show where the time of a step goes.",
    "tune-kernels": "Choose the shapes of the GPU kernels for a SKU.",
    "bench": "Load an OpenAI-compatible server and plot what it does.",
    "inspect": "Print what is inside an engine bundle.",
}


class LazyGroup(click.Group):
    """Lists commands from COMMANDS; loads ``command`` of its module of castline.commands only to run one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command = import_module(f"castline.commands.{name.replace('-', '_')}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="castline")
def cli() -> None:
    """Compile a Hugging Face causal language model into a static engine once; serve it many times."""


def main() -> None:
    """Console entry point: errors castline raises on purpose print one message, and no traceback."""
    _fill_standard_streams()
    try:
        # Not standalone, click returns the status of ctx.exit() instead of raising it.
        sys.exit(cli.main(standalone_mode=False))
    except click.exceptions.Abort:
        click.echo("castline: interrupted", err=True)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except CastlineError as error:
        click.echo(f"castline: {error}", err=True)
        sys.exit(1)


def _fill_standard_streams() -> None:
    """Where one is closed, the next socket or file would take its number, and what is printed would go there."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
