"""`sweep`: several runs from one file."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from softprune.errors import ConfigError, SoftpruneError
from softprune.lab.cli.app import DataDir, TimeLimit, command, parse_time
from softprune.lab.cli.output import error_line, print_facts, print_table, say
from softprune.lab.cli.reports import comparison_rows, print_rows
from softprune.lab.train.control import EXIT_STOPPED

if TYPE_CHECKING:
    from softprune.lab.sweep.grid import Sweep
    from softprune.lab.sweep.runner import Executor, Job

EXIT_FAILED = 1
"""Some runs of the sweep failed, or the record of one is damaged."""


@command
def sweep(
    file: Annotated[
        str, typer.Argument(help="TOML file with a grid, or a name from `softprune recipes`.", show_default=False)
    ],
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs", "-j", min=1, max=1000, help="Number of runs in parallel. [default: 1; with Ray all that fit]"
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for the runs. [default: runs/NAME]")] = None,
    data_dir: DataDir = None,
    time_limit: TimeLimit = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, or without Ray a list: cuda:0,cuda:1.")] = "auto",
    on: Annotated[str, typer.Option(help="Where runs execute: local, or ray for a Ray cluster.")] = "local",
    address: Annotated[str | None, typer.Option(help="Ray: address of the cluster. [default: RAY_ADDRESS]")] = None,
    gpus: Annotated[
        float | None,
        typer.Option("--gpus-per-run", min=0, help="Ray: GPUs of a run; 0.25 lets four share one. [default: 0]"),
    ] = None,
    cpus: Annotated[
        float | None, typer.Option("--cpus-per-run", min=0, help="Ray: CPU cores of a run. [default: 1]")
    ] = None,
    memory: Annotated[
        float | None,
        typer.Option("--memory-per-run", min=0, help="Ray: memory of a run in GB; 0 requests none. [default: 0]"),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the dry run as JSON.")] = False,
) -> None:
    """Run a grid of recipes in parallel processes. Repeat the command to resume a stopped sweep.

    Finished runs are kept, unfinished ones resume from their newest checkpoint, and failed ones start again from it.
    A failed run does not stop the others. SIGTERM, Ctrl-C and --time-limit make all runs save and exit with code 75;
    exit code 1 means that some runs failed.
    """
    seconds = parse_time(time_limit)
    from softprune.lab.cli.progress import sweep_progress
    from softprune.lab.sweep.grid import read_sweep
    from softprune.lab.sweep.runner import SweepRunner

    if as_json and not dry_run:
        raise ConfigError(
            "--json of `sweep` must come with --dry-run. Got --json alone; use `softprune compare --json`."
        )
    ray_only = {"address": address, "gpus_per_run": gpus, "cpus_per_run": cpus, "memory_per_run": memory}
    make_executor = _executor(on, jobs, device, {name: value for name, value in ray_only.items() if value is not None})
    planned = read_sweep(file, out, data_dir=data_dir)
    if dry_run:
        rows = []
        for cell in planned.cells:
            run = cell.folder
            state = "done" if run.result.is_file() else "started" if run.config.is_file() else "new"
            rows.append([cell.name, cell.config.method.name, state, cell.after or "-"])
        if as_json:
            print_facts(["run", "method", "state", "after"], rows, as_json=True)
        else:
            print_table(f"{len(planned.cells)} runs in {planned.folder}", ["run", "method", "", "after"], rows)
        return
    runner = SweepRunner(planned, make_executor(planned.folder))
    with sweep_progress() as listener:
        reason = runner.run(listener, seconds)
    _conclude(planned, runner.jobs, reason)


def _conclude(planned: "Sweep", jobs: "Sequence[Job]", reason: str | None) -> None:
    """Print the comparison of finished runs and why others have no result; exit with the code of the sweep."""
    done = [job.cell.folder.path for job in jobs if job.state == "done"]
    code = 0
    try:
        if done:
            print_rows(comparison_rows(done))
        if done and planned.search is not None:
            from softprune.lab.report import render_comparison

            say(f"Dropped early: {sum(job.state == 'dropped' for job in jobs)} of {len(jobs)} trials.")
            say(f"Pareto front: {render_comparison(done, planned.folder / 'pareto.html')}")
    except SoftpruneError as error:  # a damaged record must not hide which runs failed
        error_line(str(error))
        code = EXIT_FAILED
    # Unless the sweep was stopped, a run that stopped got a signal from elsewhere.
    without_result = ("failed", "blocked", "stopped") if reason is None else ("failed", "blocked")
    for job in jobs:
        if job.state in without_result:
            lines = [f"it needs {job.cell.after}, which has no result"] if job.state == "blocked" else job.last_lines()
            error_line(f"{job.cell.name} {job.state}: {' / '.join(lines) or 'it wrote no message'} ({job.log})")
            code = EXIT_FAILED
    if reason is not None:
        say(f"Stopped by {reason}; everything is saved. Repeat the command to resume.")
        raise typer.Exit(EXIT_STOPPED)
    say(f"{len(done)} of {len(jobs)} runs done: {planned.folder}")
    if code:
        raise typer.Exit(code)


def _executor(on: str, jobs: int | None, device: str, ray_only: dict[str, Any]) -> "Callable[[Path], Executor]":
    """Check the options that say where runs execute; return what makes the executor for the folder of a sweep."""
    if on == "ray":
        from softprune.lab.sweep.executor import RayExecutor
        from softprune.lab.sweep.ray_task import RayOptions

        options = RayOptions(jobs=jobs, device=device, **ray_only)
        return lambda folder: RayExecutor(options, folder)
    if on != "local":
        raise ConfigError(f"--on must be local or ray. Got {on!r}.")
    for name, value in ray_only.items():
        option = "--" + name.replace("_", "-")
        raise ConfigError(f"{option} must come with --on ray. Got {option} {value} for runs on this machine; add it.")
    from softprune.lab.sweep.executor import LocalPool

    return lambda folder: LocalPool(jobs or 1, _devices(device))


def _devices(device: str) -> list[str]:
    """Return the devices that the runs are distributed over. `auto` means all GPUs."""
    if device != "auto":
        return [part.strip() for part in device.split(",")]
    import torch

    gpus = torch.cuda.device_count()
    return [f"cuda:{number}" for number in range(gpus)] if gpus > 1 else ["auto"]
