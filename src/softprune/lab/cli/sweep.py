"""`sweep`: several runs from one file."""

from pathlib import Path
from typing import Annotated

import typer

from softprune.errors import ConfigError, SoftpruneError
from softprune.lab.cli.app import DataDir, Device, TimeLimit, command, parse_time
from softprune.lab.cli.output import error_line, print_facts, print_table, say
from softprune.lab.cli.progress import run_progress
from softprune.lab.cli.reports import comparison_rows, print_rows
from softprune.lab.train.control import EXIT_STOPPED

EXIT_FAILED = 1
"""Some runs of the sweep failed, or the record of one is damaged."""


@command
def sweep(
    file: Annotated[
        str, typer.Argument(help="TOML file with a grid, or a name from `softprune recipes`.", show_default=False)
    ],
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Runs side by side. Above 1 needs Ray.")] = 1,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for the runs. [default: runs/NAME]")] = None,
    data_dir: DataDir = None,
    time_limit: TimeLimit = None,
    device: Device = "auto",
    address: Annotated[
        str | None, typer.Option(help="Train on the Ray cluster at this address; `auto`: on this machine's.")
    ] = None,
    cpus: Annotated[float, typer.Option("--cpus-per-run", min=0, help="Ray: CPU cores of a run.")] = 1,
    gpus: Annotated[
        float | None,
        typer.Option(
            "--gpus-per-run", min=0, help="Ray: GPUs of a run; 0.25 lets four share one. [default: all share]"
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the dry run as JSON.")] = False,
) -> None:
    """Train a grid of recipes. Repeat the command to resume a stopped sweep.

    Finished runs are kept, unfinished ones resume from their newest checkpoint, and failed ones start again from it.
    A failed run does not stop the others. SIGTERM, Ctrl-C and --time-limit make all runs save and exit with code 75;
    exit code 1 means that some runs failed.
    """
    seconds = parse_time(time_limit)
    from softprune.lab.sweep import read_sweep, run_here, run_on_ray

    if as_json and not dry_run:
        raise ConfigError("--json of `sweep` must come with --dry-run. Got it alone; use `softprune compare --json`.")
    planned = read_sweep(file, out, data_dir=data_dir)
    if dry_run:
        rows = [[cell.name, cell.config.method.name, cell.state(), cell.after or "-"] for cell in planned.cells]
        if as_json:
            print_facts(["run", "method", "state", "after"], rows, as_json=True)
        else:
            print_table(f"{len(rows)} runs in {planned.folder}", ["run", "method", "", "after"], rows)
        return
    if jobs == 1 and address is None:
        runs = run_here(planned, run_progress, device=device, time_limit=seconds)
    else:
        runs = run_on_ray(
            planned,
            run_progress,
            jobs=jobs,
            address=address,
            cpus=cpus,
            gpus=0.0 if gpus is None and device == "cpu" else gpus,
            device=device,
            time_limit=seconds,
        )
    done, failed, stopped = [], [], False
    for ended in runs:
        say(f"{ended.state:<9} {ended.cell.name}")
        stopped |= ended.state == "stopped"
        if ended.state == "done":
            done.append(ended.cell.folder.path)
        elif ended.message and ended.state != "stopped":
            failed.append(f"{ended.cell.name} {ended.state}: {ended.message} ({ended.cell.folder.log})")
    try:
        if done:
            print_rows(comparison_rows(done))
    except SoftpruneError as error:  # a damaged record must not hide which runs failed
        failed.append(str(error))
    for line in failed:
        error_line(line)
    if stopped:
        say("Stopped; everything is saved. Repeat the command to resume.")
        raise typer.Exit(EXIT_STOPPED)
    say(f"{len(done)} of {len(planned.cells)} runs done: {planned.folder}")
    if failed:
        raise typer.Exit(EXIT_FAILED)
