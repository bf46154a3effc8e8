"""The command-line application: registration of commands, shared options, and error output."""

import functools
import io
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from softprune import __version__
from softprune.errors import ConfigError, SoftpruneError
from softprune.lab.cli.output import error_line, say, show_log

EXIT_ERROR = 2
"""Exit code of an error that the user can correct, as the message explains."""

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
    show_log(debug)


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Register a command that prints a SoftpruneError or OSError as a message and exits with code 2."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except (SoftpruneError, OSError) as error:
            if logging.getLogger("softprune").level == logging.DEBUG or isinstance(error, BrokenPipeError):
                raise  # a closed pipe, such as that of `head`, ends the command without a message
            message = str(error)
            if isinstance(error, OSError):
                message = (
                    f"Files must be readable and writable. Got {error.strerror or error}: "
                    f"{str(error.filename or 'standard output')[:200]}. Choose another path or change its permissions."
                )
            error_line(message)
            raise typer.Exit(EXIT_ERROR) from error

    return app.command()(guarded)


def main() -> NoReturn:
    """Run the command-line interface."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names may contain characters that the terminal cannot encode
            stream.reconfigure(errors="backslashreplace")
    app()
    sys.exit(0)


_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|d)?")
SIZE = re.compile(r"0*[1-9]\d{0,8}", re.ASCII)
"""Matches a positive integer of at most nine digits."""
_SECONDS = {None: 1, "s": 1, "m": 60, "h": 3600, "d": 86400}

Run = Annotated[Path, typer.Argument(help="Folder of a run.", show_default=False)]
DataDir = Annotated[str | None, typer.Option("--data-dir", help="Folder with the files of the data set.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]
TimeLimit = Annotated[
    str | None, typer.Option("--time-limit", metavar="TIME", help="Save and stop after this time: 90s, 30m, 2h.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Model = Annotated[str, typer.Option(help="Dense network. Needed for a module:factory, or a file without its run.")]
DataSet = Annotated[str, typer.Option("--data", help="Data set of the run. Needed for a module:factory.")]
Method = Annotated[str, typer.Option("--method", help="Method of the run. Needed for a module:Class.")]
Input = Annotated[str, typer.Option("--input", metavar="CxHxW", help="Shape of an input image, such as 3x224x224.")]


def parse_time(text: str | None) -> float | None:
    """Convert a --time-limit, such as 90, 30m or 2h, to seconds."""
    if text is None:
        return None
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"--time-limit must be a number of seconds, or a number with s, m, h or d. Got {text!r}.")
    return float(match[1]) * _SECONDS[match[2]]


def parse_shape(text: str) -> tuple[int, ...]:
    """Parse CxHxW to three integers; return an empty tuple for an empty string."""
    if not text:
        return ()
    parts = text.lower().replace(",", "x").split("x")
    if len(parts) != 3 or not all(SIZE.fullmatch(part.strip()) for part in parts):
        raise ConfigError(f"--input must be CHANNELSxHEIGHTxWIDTH, such as 3x224x224. Got {text!r}.")
    return tuple(int(part) for part in parts)
