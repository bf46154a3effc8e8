"""The command-line application: its commands, its global options, and how errors are shown."""

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer

from softprune import __version__
from softprune.cli.output import begin_output, error_line, lost_output, say, show_log
from softprune.errors import SoftpruneError

EXIT_ERROR = 2
"""The user can correct the error; the message says how."""

COMMANDS = ("train", "sweep", "lists", "datasets", "networks", "deploy", "reports")
"""Modules that register commands when they are imported, in the order of the help."""

app = typer.Typer(
    name="softprune",
    help=(
        "Train a CNN and prune its channels in one run, then remove the dead channels.\n\n"
        "Start with `softprune train`: it takes about a minute on a laptop and writes a report."
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class _Settings:
    debug = False


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"softprune {__version__}")
        raise typer.Exit


@app.callback()
def _settings(
    debug: Annotated[bool, typer.Option("--debug", help="Show Python's traceback with an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    _Settings.debug = debug
    show_log(debug)


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Register a command. A SoftpruneError, or a path that cannot be opened, ends it with a message and exit code 2."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> None:
        begin_output()
        try:
            function(*args, **kwargs)
        except SoftpruneError as error:
            if _Settings.debug:
                raise
            error_line(str(error))
            raise typer.Exit(EXIT_ERROR) from None
        except OSError as error:
            if _Settings.debug or error.filename is None:
                raise
            error_line(
                f"A path must be one that can be opened. Got {error.strerror}: {str(error.filename)[:200]}. "
                "Give another path, or change its permissions."
            )
            raise typer.Exit(EXIT_ERROR) from None
        lost = lost_output()
        if lost is not None:
            error_line(f"Standard output must be writable. Got {lost}. Redirect it to another file.")
            raise typer.Exit(EXIT_ERROR)

    return app.command()(guarded)


def main() -> NoReturn:
    """Run the command line of this process."""
    for module in COMMANDS:
        importlib.import_module(f"softprune.cli.{module}")
    app()
    sys.exit(0)
