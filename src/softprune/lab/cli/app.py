"""The command-line application: its commands, the options that several share, and how errors are shown."""

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
"""The user can correct the error; the message says how."""

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
    """Register a command. A SoftpruneError, or a path that cannot be opened, ends it with a message and exit code 2."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except (SoftpruneError, OSError) as error:
            if logging.getLogger("softprune").level == logging.DEBUG or isinstance(error, BrokenPipeError):
                raise  # a closed pipe, as of `head`, ends a command quietly
            message = str(error)
            if isinstance(error, OSError):
                message = (
                    f"A path must be one that can be opened. Got {error.strerror or error}: "
                    f"{str(error.filename or 'standard output')[:200]}. Give another path, or change its permissions."
                )
            error_line(message)
            raise typer.Exit(EXIT_ERROR) from error

    return app.command()(guarded)


def main() -> NoReturn:
    """Run the command line of this process."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal may lack characters of a name
            stream.reconfigure(errors="backslashreplace")
    app()
    sys.exit(0)


_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|d)?")
SIZE = re.compile(r"0*[1-9]\d{0,8}", re.ASCII)
"""A whole number above 0, of nine digits at most."""
_SECONDS = {None: 1, "s": 1, "m": 60, "h": 3600, "d": 86400}

Run = Annotated[Path, typer.Argument(help="Folder of a run.", show_default=False)]
DataDir = Annotated[str | None, typer.Option("--data-dir", help="Folder with the files of the data set.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]
TimeLimit = Annotated[
    str | None, typer.Option("--time-limit", metavar="TIME", help="Save and stop after: 90 (seconds), 30m, 2h.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Model = Annotated[str, typer.Option(help="The dense network, if it is module:factory, or if no run names it.")]
DataSet = Annotated[str, typer.Option("--data", help="The run's data set, if it is module:factory.")]
Method = Annotated[str, typer.Option("--method", help="The run's method, if it is module:Class.")]
Input = Annotated[str, typer.Option("--input", metavar="CxHxW", help="Shape of one image, such as 3x224x224.")]


def parse_time(text: str | None) -> float | None:
    """Return the seconds of a --time-limit: 90, 30m, 2h."""
    if text is None:
        return None
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"--time-limit must be a number of seconds, or end in s, m, h or d. Got {text!r}.")
    return float(match[1]) * _SECONDS[match[2]]


def parse_shape(text: str) -> tuple[int, ...]:
    """Return the three numbers of CxHxW, or an empty tuple for an empty text."""
    if not text:
        return ()
    parts = text.lower().replace(",", "x").split("x")
    if len(parts) != 3 or not all(SIZE.fullmatch(part.strip()) for part in parts):
        raise ConfigError(f"--input must be CHANNELSxHEIGHTxWIDTH, such as 3x224x224. Got {text!r}.")
    return tuple(int(part) for part in parts)
