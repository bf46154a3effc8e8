"""The application: its commands, and how errors reach the user."""

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer

from softprune.cli.output import begin_output, error_line, lost_output, show_log
from softprune.errors import SoftpruneError

EXIT_ERROR = 2
"""Something the user can mend; the message says what."""

COMMANDS = ("training", "sweeps", "networks", "shipping", "reports", "lists")
"""Modules that register commands when they are imported, in the order of the help."""

app = typer.Typer(
    name="softprune",
    help=(
        "Train a network while pruning its channels, cut it for good, and see what was gained.\n\n"
        "Start with `softprune train`: a minute on a laptop, and a report to open."
    ),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class _Settings:
    debug = False


@app.callback()
def _settings(
    debug: Annotated[bool, typer.Option("--debug", help="Show Python's traceback with an error.")] = False,
) -> None:
    _Settings.debug = debug
    show_log(debug)


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Register a command whose SoftpruneErrors end as one clear message and exit code 2."""

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
        lost = lost_output()
        if lost is not None:
            error_line(f"What a command prints must be written somewhere. Got {lost} on standard output.")
            raise typer.Exit(EXIT_ERROR)

    return app.command()(guarded)


def main() -> NoReturn:
    """Run the command line of this process."""
    for room in COMMANDS:
        importlib.import_module(f"softprune.cli.{room}")
    app()
    sys.exit(0)
