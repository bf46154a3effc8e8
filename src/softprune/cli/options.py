"""Arguments and options that several commands share, and how their text is parsed."""

import math
import re
from pathlib import Path
from typing import Annotated

import typer

from softprune.errors import ConfigError

_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|d)?")
_SIZE = re.compile(r"0*[1-9]\d{0,8}", re.ASCII)
_LARGEST_INPUT = 2**26
"""Larger than any image, and small enough for memory."""
_SECONDS = {None: 1, "s": 1, "m": 60, "h": 3600, "d": 86400}

Run = Annotated[Path, typer.Argument(help="Folder of a run.", show_default=False)]
DataDir = Annotated[str | None, typer.Option("--data-dir", help="Folder with the files of the data set.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]
TimeLimit = Annotated[
    str | None, typer.Option("--time-limit", metavar="TIME", help="Save and stop after: 90 (seconds), 30m, 2h.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Model = Annotated[
    str,
    typer.Option(
        help="The dense network: for a compact network outside its run, or a run whose model is module:factory."
    ),
]
DataName = Annotated[
    str,
    typer.Option(
        "--data", help="The data set: for a compact network outside its run, or a run whose data is module:factory."
    ),
]
OwnModel = Annotated[str, typer.Option("--model", help="The run's network, if it is module:factory.")]
OwnData = Annotated[str, typer.Option("--data", help="The run's data set, if it is module:factory.")]
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
    if len(parts) != 3 or not all(_SIZE.fullmatch(part.strip()) for part in parts):
        raise ConfigError(f"--input must be CHANNELSxHEIGHTxWIDTH, such as 3x224x224. Got {text!r}.")
    shape = tuple(int(part) for part in parts)
    if math.prod(shape) > _LARGEST_INPUT:
        raise ConfigError(f"--input must have at most {_LARGEST_INPUT:,} numbers per image. Got {text!r}.")
    return shape
