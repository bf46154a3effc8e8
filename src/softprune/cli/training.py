"""`train` and `resume`: the main job."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from softprune.cli.app import command
from softprune.cli.output import say
from softprune.errors import ConfigError
from softprune.train.stop_signal import EXIT_STOPPED

if TYPE_CHECKING:
    from softprune.train.run import Outcome

_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|d)?")
_SECONDS = {None: 1, "s": 1, "m": 60, "h": 3600, "d": 86400}

Recipe = Annotated[
    str,
    typer.Argument(help="A name from `softprune recipes`, or a TOML file of your own.", show_default=True),
]
Run = Annotated[Path, typer.Argument(help="The folder of a run.", show_default=False)]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", "-s", metavar="KEY=VALUE", help="Change one setting, such as optimizer.lr=0.05. Repeatable."
    ),
]
DataDir = Annotated[str | None, typer.Option("--data-dir", help="Where the data set's files are.")]
Out = Annotated[
    Path | None, typer.Option("--out", "-o", help="Folder for this run's files. [default: runs/NAME]")
]
TimeLimit = Annotated[
    str | None,
    typer.Option(
        "--time-limit", metavar="TIME", help="Save and stop after this long: 90 (seconds), 30m, 2h."
    ),
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Another random start; same as --set seed=N.")]


@command
def train(
    recipe: Recipe = "digits",
    settings: Set = None,
    data_dir: DataDir = None,
    out: Out = None,
    time_limit: TimeLimit = None,
    device: Device = "auto",
    seed: Seed = None,
) -> None:
    """Train and prune a network, cut it, and write a report.

    Without a recipe: a small network on the digits that ship with softprune, done in about a minute on a
    laptop.

    SIGTERM, Ctrl-C and --time-limit finish the step, save and exit with code 75; `softprune resume RUN` goes
    on. Several GPUs: torchrun --nproc-per-node N -m softprune train ...
    """
    seconds = parse_time(time_limit)
    from softprune.config.recipes import load_recipe
    from softprune.train.run import start

    overrides = list(settings or [])
    if data_dir is not None:
        overrides.append(f"data.dir={Path(data_dir).expanduser().resolve()}")
    if seed is not None:
        overrides.append(f"seed={seed}")
    config = load_recipe(recipe, overrides)
    from softprune.cli.watching import make_listener

    with make_listener() as listener:
        outcome = start(config, out, device=device, time_limit=seconds, listener=listener)
    _conclude(outcome)


@command
def resume(
    run: Run,
    time_limit: TimeLimit = None,
    device: Device = "auto",
    data_dir: DataDir = None,
) -> None:
    """Go on with a run that was stopped or killed.

    It goes on from the newest checkpoint, and the result is the same as if it had never stopped. A damaged
    checkpoint is set aside and the one before it is used.
    """
    seconds = parse_time(time_limit)
    from softprune.cli.watching import make_listener
    from softprune.train.run import resume as go_on

    with make_listener() as listener:
        outcome = go_on(run, device=device, time_limit=seconds, data_dir=data_dir, listener=listener)
    _conclude(outcome)


def parse_time(text: str | None) -> float | None:
    """Seconds of a --time-limit: 90, 30m, 2h."""
    if text is None:
        return None
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"--time-limit must be a number of seconds, or end in s, m, h or d. Got {text!r}.")
    return float(match[1]) * _SECONDS[match[2]]


def _conclude(outcome: "Outcome") -> None:
    """The last lines of a run: the table and where the report is, or how to go on."""
    if not outcome.is_writer:
        if outcome.stopped:
            raise typer.Exit(EXIT_STOPPED)
        return
    if outcome.stopped:
        say(f"Stopped by {outcome.stopped}; everything is saved. Go on with: {outcome.folder.resume_command}")
        raise typer.Exit(EXIT_STOPPED)
    from softprune.cli.results import print_result, write_report

    assert outcome.result is not None
    print_result(outcome.result)
    report = write_report(outcome.folder.path)
    say(f"Compact network: {outcome.folder.compact}" if outcome.folder.compact.exists() else "")
    say(f"Report: {report}")
