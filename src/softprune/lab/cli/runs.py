"""Commands for runs (`train`, `resume`, `sweep`, `report`, `compare`) and lists (`recipes`, `methods`, `models`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from softprune.errors import CheckpointError, ConfigError, SoftpruneError
from softprune.io import read_bytes
from softprune.lab.cli.app import DataDir, DataSet, Device, Json, Method, Model, Run, TimeLimit, command, parse_time
from softprune.lab.cli.output import error_line, print_facts, print_json, print_table, remark, run_progress, say
from softprune.lab.config.recipes import DEFAULT_RECIPE, RECIPES, SWEEPS, find_file, load_recipe, title_of
from softprune.lab.config.settings import BASELINE, RunConfig
from softprune.lab.report.text import cut, file_size, milliseconds, percent, short
from softprune.lab.runs.folder import RunFolder
from softprune.lab.runs.result import Result
from softprune.lab.train.control import EXIT_STOPPED
from softprune.log import is_rank_0

if TYPE_CHECKING:
    from softprune.lab.report.comparison import Row
    from softprune.lab.train.run import Outcome

EXIT_FAILED = 1
"""Exit code if runs of a sweep failed or the record of a run is damaged."""
_OPTIONAL = "minutes", "front", "activations cut", "channels cut", "params cut", "best", "method", "n", "dense", "data"
"""Columns that are left out on a narrow terminal, in this order."""


@command
def train(
    recipe: Annotated[
        str,
        typer.Argument(
            help="A name from `softprune recipes`, or a TOML file. [default: digits; images with --data folder]",
            autocompletion=lambda incomplete: [name for name in RECIPES if name.startswith(incomplete)],
            show_default=False,
        ),
    ] = "",
    model: Annotated[str | None, typer.Option(help="Network: a name or module:factory (model.name).")] = None,
    data: Annotated[str | None, typer.Option(help="Data set: a name or module:factory (data.name).")] = None,
    data_dir: DataDir = None,
    method: Annotated[str | None, typer.Option(help="Method: a name or module:Class (method.name).")] = None,
    epochs: Annotated[int | None, typer.Option(help="Number of epochs (train.epochs).")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Images per step (data.batch_size).")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate (optimizer.lr).")] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed (seed).")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="KEY=VALUE", help="Set a key, such as data.image_size=64. Repeatable."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder of the run. [default: runs/NAME]")] = None,
    time_limit: TimeLimit = None,
    device: Device = "auto",
    against: Annotated[
        str, typer.Option(help="Also run one-shot pruning with this method, such as l1, for as many epochs; compare.")
    ] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the recipe, print what it would train, and exit.")
    ] = False,
) -> None:
    """Train and prune a network, cut it, and write a report.

    Without arguments, trains a small network on the bundled digits, which takes about a minute. With only
    `--data folder`, trains a ResNet-18 from ImageNet weights.

    On SIGTERM, Ctrl-C, a closed terminal or --time-limit, finishes the step, saves, and exits with code 75. `softprune
    resume RUN` continues.
    To use several GPUs: torchrun --nproc-per-node N -m softprune train ...
    """
    seconds = parse_time(time_limit)
    flags = {
        "model.name": model,
        "data.name": data,
        "data.dir": None if data_dir is None else Path(data_dir).expanduser().resolve(),
        "method.name": method,
        "train.epochs": epochs,
        "data.batch_size": batch_size,
        "optimizer.lr": lr,
        "seed": seed,
    }
    overrides = [f"{key}={value}" for key, value in flags.items() if value is not None] + (settings or [])
    if not recipe and data == "folder":
        recipe = "images"
        overrides = ["model.pretrained=false"] * (model is not None and ":" not in model) + overrides
    config = load_recipe(recipe or DEFAULT_RECIPE, overrides)
    keys = {override.partition("=")[0].strip() for override in overrides}
    if "name" not in keys and keys & {"model.name", "data.name", "method.name"}:
        # The name of the recipe would mislead if its network, data set or method is replaced.
        names = (config.data.name, config.model.name, config.method.name)
        config = config.replace(name="-".join(Path(each.rpartition(":")[2]).name for each in names))
    if dry_run:
        _print_plan(config, out, device)
        return
    from softprune.lab.train.method import check_method
    from softprune.lab.train.run import start

    if against:
        check_method(_one_shot(config, against, Path("dense")))
    with run_progress() as listener:
        outcome = start(config, out, device=device, time_limit=seconds, listener=listener)
    _conclude(outcome)
    if against:
        run = outcome.folder.path
        other = _one_shot(config, against, outcome.folder.dense)
        with run_progress() as listener:
            second = start(other, Path(f"{run}-{against}"), device=device, time_limit=seconds, listener=listener)
        _conclude(second)
        if is_rank_0():
            _print_rows(_rows_of([run, second.folder.path]))


def _one_shot(config: RunConfig, method: str, dense: Path) -> RunConfig:
    """Return a one-shot run with as many epochs. It cuts at once, or halfway if it starts from random weights."""
    from softprune.lab.train.method import RARE

    if not config.method.target:
        raise ConfigError("--against needs a target to compare at. Got none; add --set method.target.macs=0.5.")
    own, teacher, epochs = config.model.weights == BASELINE, config.distill.teacher, config.train.epochs
    options = config.method.options
    before = 0 if config.model.weights or config.model.pretrained else epochs // 2
    drops = tuple(epoch - before for epoch in config.schedule.milestones if epoch > before)
    tuning = {"lr": config.optimizer.lr, "schedule": config.schedule.kind, "milestones": drops}
    return config.replace(
        name=f"{config.name}-{method}",
        model=config.model.replace(weights=str(dense), pretrained=False) if own else config.model,
        train=config.train.replace(epochs=before, dense_baseline=False, dense_epochs=0, compact_at=0),
        method=config.method.replace(name=method, options={key: options[key] for key in options.keys() & set(RARE)}),
        distill=config.distill.replace(teacher=str(dense) if teacher == BASELINE else teacher),
        schedule=config.schedule.replace(warmup_epochs=min(config.schedule.warmup_epochs, before / 2)),
        finetune=config.finetune.replace(epochs=epochs - before + config.finetune.epochs, **tuning),
    )


@command
def resume(
    run: Run,
    time_limit: TimeLimit = None,
    device: Device = "auto",
    data_dir: DataDir = None,
    model: Model = "",
    data: DataSet = "",
    method: Method = "",
) -> None:
    """Resume a stopped run.

    Training continues from the newest checkpoint, with the same result as an uninterrupted run. If this checkpoint is
    damaged, the previous one is used.
    """
    seconds = parse_time(time_limit)
    from softprune.lab.runs.networks import named_config
    from softprune.lab.train.run import resume as resume_run

    folder = RunFolder.open(run)
    if not folder.result.is_file():
        named_config(folder, model=model, data=data, method=method)
    with run_progress() as listener:
        outcome = resume_run(run, device=device, time_limit=seconds, data_dir=data_dir, listener=listener)
    _conclude(outcome)


def _print_plan(config: RunConfig, out: Path | None, device: str) -> None:
    """Check a run like `train` does, and print what it would train."""
    from softprune.lab.train.run import check

    trainer = check(config, out, device=device)
    data, cost, pruner = trainer.data, trainer.dense_cost, trainer.pruner
    sites, frozen = (pruner.sites, pruner.graph.frozen) if pruner is not None else ((), ())
    method, steps = config.method, trainer.step.steps
    limits = [f"target {name} = {amount}" for name, amount in method.target.items()]
    if pruner is not None and pruner.penalised and not limits:
        limits = [f"strength = {method.strength:g}"]
    limits += [f"{name} = {value}" for name, value in method.options.items()]
    fine = f", then {config.finetune.epochs} of fine-tuning" if config.finetune.epochs else ""
    images = f"{len(data.train):,} training and {len(data.test):,} test images"
    say(f"network   {config.model.name}: {short(cost.params)} parameters, {short(cost.macs)} MACs")
    say(f"prunable  {len(sites)} BatchNorms ({len(frozen)} frozen)")
    say(f"data      {config.data.name}: {images}, {data.num_classes} classes")
    say(f"training  {config.train.epochs} epochs of {steps:,} steps{fine}")
    say(f"method    {', '.join([method.name, *limits])}")
    say(f"device    {trainer.world.device}")
    say(f"folder    {trainer.folder.path}")


def _conclude(outcome: "Outcome") -> None:
    """Print the result table and the path of the report, or how to resume."""
    if outcome.stopped:
        if is_rank_0():
            say(f"Stopped by {outcome.stopped}; everything is saved. Resume: {outcome.folder.resume_command}")
        raise typer.Exit(EXIT_STOPPED)
    if not is_rank_0():
        return
    from softprune.lab.report import render_run

    assert outcome.result is not None
    print_result(outcome.result)
    if outcome.folder.compact.exists():
        say(f"Compact network: {outcome.folder.compact}")
    try:
        say(f"Report: {render_run(outcome.folder.path)}")
    except CheckpointError as error:  # the disk is full or read-only, but the run is finished
        remark(f"warning: {error}")


def print_result(result: Result) -> None:
    """Print the table of the dense, masked and compact network, and the speed-up."""
    dense, rows = result.dense, []
    for row in result.table:
        activations = (result.compact if row.name == "compact" else dense).activations
        rows.append([row.name, percent(row.top1, 2), percent(row.top5, 2)])
        rows[-1] += [short(row.params), percent(cut(dense.params, row.params))]
        rows[-1] += [short(row.macs), percent(cut(dense.macs, row.macs)), short(activations)]
        rows[-1] += [file_size(row.file_bytes), milliseconds(row.latency_ms)]
    columns = ["", "top-1", "top-5", "params", "cut", "MACs", "cut", "activations", "file", "latency"]
    say()
    say(f"{result.model} on {result.data}, {result.method}")
    print_table(columns, rows, optional=["activations", "top-5", "file"])
    if result.speed_up is not None:
        say(f"\nSpeed-up: {result.speed_up:.2f}x (latency of {result.latency_batch} images)")


@command
def sweep(
    file: Annotated[str, typer.Argument(help="A sweep from `softprune recipes`, or a TOML file.", show_default=False)],
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Runs in parallel. More than 1 needs Ray.")] = 1,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for the runs. [default: runs/NAME]")] = None,
    data_dir: DataDir = None,
    time_limit: TimeLimit = None,
    device: Device = "auto",
    address: Annotated[
        str | None, typer.Option(help="Address of a Ray cluster to train on; `auto` for the one of this machine.")
    ] = None,
    cpus: Annotated[float, typer.Option("--cpus-per-run", min=0, help="Ray: CPU cores per run.")] = 1,
    gpus: Annotated[
        float | None,
        typer.Option(
            "--gpus-per-run", min=0, help="Ray: GPUs per run; 0.25 lets four runs share one. [default: all share]"
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs and exit.")] = False,
) -> None:
    """Train a grid of recipes. Repeat the command to resume a stopped sweep.

    Finished runs are skipped; stopped and failed runs resume from their newest checkpoint. A failed run does not stop
    the others. On SIGTERM, Ctrl-C or --time-limit, all runs save and the command exits with code 75. Exit code 1 means
    that some runs failed.
    """
    seconds = parse_time(time_limit)
    from softprune.lab.sweep import read_sweep, run_here, run_on_ray

    cells = read_sweep(file, out, data_dir=data_dir)
    if dry_run:
        rows = [[cell.name, cell.config.method.name, cell.state(), cell.after or "-"] for cell in cells]
        print_table(["run", "method", "", "after"], rows)
        return
    if jobs == 1 and address is None:
        runs = run_here(cells, run_progress, device=device, time_limit=seconds)
    else:
        gpus = 0.0 if gpus is None and device == "cpu" else gpus
        limits: dict[str, Any] = {"cpus": cpus, "gpus": gpus, "device": device, "time_limit": seconds}
        runs = run_on_ray(cells, run_progress, jobs=jobs, address=address, **limits)
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
            _print_rows(_rows_of(done))
    except SoftpruneError as error:  # a damaged record must not hide the list of failed runs
        failed.append(str(error))
    for line in failed:
        error_line(line)
    if stopped:
        say("Stopped; everything is saved. Repeat the command to resume.")
        raise typer.Exit(EXIT_STOPPED)
    say(f"{len(done)} of {len(cells)} runs done: {cells[0].folder.path.parent}")
    if failed:
        raise typer.Exit(EXIT_FAILED)


@command
def report(
    run: Run,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write. [default: RUN/report.html]")] = None,
) -> None:
    """Write the report of a finished run, a single HTML page."""
    from softprune.lab.report import render_run

    say(f"Report: {render_run(run, out)}")


@command
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Folders of finished runs, or of sweeps.", show_default=False)],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Also write the comparison as an HTML page.")] = None,
    as_json: Json = False,
) -> None:
    """Compare finished runs in a table.

    The table has the accuracy of the dense and the compact network, and the reduction of channels, parameters, MACs,
    activations and latency. Runs that differ only in the seed are averaged. The dense accuracy is that of the run's own
    baseline (train.dense_baseline), or the mean of the compared dense runs with the same training settings (network,
    data, epochs, optimizer, schedule). Unfinished runs, and runs with the configuration and seed of a newer run, are
    left out with a message.
    """
    folders = _finished(runs)
    rows = _rows_of(folders)
    if as_json:
        print_json([row.facts() for row in rows])
    else:
        _print_rows(rows)
    if out is not None:
        from softprune.lab.report import render_comparison

        render_comparison(folders, out)
        remark(f"Comparison: {out}")


def _rows_of(folders: Sequence[Path]) -> "list[Row]":
    """Read finished runs and return the rows of their table; print a line for each run that is left out."""
    from softprune.lab.report.comparison import compare_runs
    from softprune.lab.runs.folder import load_run

    rows, repeats = compare_runs([load_run(folder) for folder in folders])
    for repeat in repeats:
        remark(f"Left out: {repeat}")
    return rows


def _print_rows(rows: "Sequence[Row]") -> None:
    """Print the table without descriptive columns in which all cells are the same."""
    from softprune.lab.report.comparison import cells_of

    heads, cells = cells_of(rows)
    columns = {head: column for head, *column in zip(heads, *cells, strict=True)}
    same = {
        head for head, column in columns.items() if len(set(column)) == 1 and head in ("data", "model", "n", "front")
    }
    if {"data", "model"} <= same:
        say(f"{columns['model'][0]} on {columns['data'][0]}")
    else:
        same -= {"data", "model"}
    columns = {head: column for head, column in columns.items() if head not in same}
    left_out = print_table(list(columns), list(zip(*columns.values(), strict=True)), _OPTIONAL)
    if left_out:
        say(f"Not shown at this width: {', '.join(left_out)}. --json prints all columns.", wrap=True)


def _finished(given: Sequence[Path]) -> list[Path]:
    """Return the finished runs in these folders of runs and sweeps; print a line for each run that is left out."""
    found = list[RunFolder]()
    for path in given:
        inside = sorted({file.parent for name in ("config.toml", "result.json") for file in path.glob(f"*/{name}")})
        is_run = not inside or RunFolder(path).config.exists() or RunFolder(path).result.exists()
        found += [RunFolder(path)] if is_run else map(RunFolder, inside)
    finished = [run.path for run in found if run.result.is_file()]
    if not finished:
        found[0].read_result()  # raises an error with a remedy
    for run in found:
        if run.path not in finished:
            why = f"is not finished; `{run.resume_command}` finishes it" if run.config.is_file() else "contains no run"
            remark(f"Left out: {run.path} {why}.")
    return finished


@command
def recipes(
    name: Annotated[str | None, typer.Argument(help="Recipe or sweep to print; copy it with `> my.toml`.")] = None,
    as_json: Json = False,
) -> None:
    """List recipes and sweeps, or print one.

    Train them with `softprune train NAME` and `softprune sweep NAME`.
    """
    kinds = {"recipe": RECIPES, "sweep": SWEEPS}
    files = {name: file for each in kinds.values() for name, file in each.items()}
    if name is None:
        rows = [[each, kind, title_of(file)] for kind, found in kinds.items() for each, file in found.items()]
        print_facts(["name", "kind", "description"], rows, as_json=as_json)
    else:
        say(read_bytes(find_file(name, files)).decode(errors="replace").rstrip("\n"))


@command
def methods(as_json: Json = False) -> None:
    """List the pruning methods (`method.name` in a recipe)."""
    from softprune.lab.train.method import options_of
    from softprune.methods import REGISTRY

    rows = [[name, pruner.description, ", ".join(options_of(pruner))] for name, pruner in REGISTRY.items()]
    rows.append(["dense", "no pruning: the baseline", ""])
    print_facts(["method", "description", "method.options"], rows, as_json=as_json)


@command
def models(as_json: Json = False) -> None:
    """List the networks (`model.name` in a recipe)."""
    from softprune.models import REGISTRY

    rows = [[name, "x".join(map(str, entry.input_shape)), entry.description] for name, entry in REGISTRY.items()]
    print_facts(["model", "input", "description"], rows, as_json=as_json)
