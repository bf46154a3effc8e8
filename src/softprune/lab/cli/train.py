"""`train` and `resume`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from softprune.errors import CheckpointError, ConfigError
from softprune.lab.cli.app import DataDir, DataSet, Device, Method, Model, Run, Settings, TimeLimit, command, parse_time
from softprune.lab.cli.output import format_count, print_json, remark, say
from softprune.lab.config.recipes import config_to_dict, load_recipe, recipe_files
from softprune.lab.config.settings import RunConfig
from softprune.lab.runs.folder import RunFolder
from softprune.lab.train.control import EXIT_STOPPED

if TYPE_CHECKING:
    from softprune.lab.train.run import Outcome


@command
def train(
    recipe: Annotated[
        str,
        typer.Argument(
            help="A name from `softprune recipes`, or a TOML file of your own.",
            autocompletion=lambda incomplete: [name for name in recipe_files() if name.startswith(incomplete)],
        ),
    ] = "digits",
    model: Annotated[str | None, typer.Option(help="Name of a network, or module:factory (model.name).")] = None,
    data: Annotated[str | None, typer.Option(help="Name of a data set, or module:factory (data.name).")] = None,
    data_dir: DataDir = None,
    method: Annotated[str | None, typer.Option(help="Name of a method, or module:Class (method.name).")] = None,
    epochs: Annotated[int | None, typer.Option(help="Number of epochs (train.epochs).")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Images per step (data.batch_size).")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate (optimizer.lr).")] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed (seed).")] = None,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder of the run. [default: runs/NAME]")] = None,
    time_limit: TimeLimit = None,
    device: Device = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the recipe, print what it would train, and exit.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the dry run as JSON.")] = False,
) -> None:
    """Train and prune a network, cut it, and write a report.

    Without arguments it trains a small network on the embedded digits, which takes about a minute.

    SIGTERM, Ctrl-C, a closed terminal and --time-limit finish the step, save, and exit with code 75; `softprune resume
    RUN` continues.
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
    config = _load(recipe, overrides)
    if as_json and not dry_run:
        raise ConfigError(
            "--json of `train` must come with --dry-run. Got --json alone; the result of a run is RUN/result.json."
        )
    if dry_run:
        _print_plan(config, out, device, as_json=as_json)
        return
    from softprune.lab.cli.progress import run_progress
    from softprune.lab.train.run import start

    with run_progress() as listener:
        outcome = start(config, out, device=device, time_limit=seconds, listener=listener)
    _conclude(outcome)


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

    Training continues from the newest checkpoint; the result is the same as without the stop. If that checkpoint is
    damaged, the one before it is used.
    """
    seconds = parse_time(time_limit)
    from softprune.lab.cli.progress import run_progress
    from softprune.lab.runs.networks import named_config
    from softprune.lab.train.run import resume as resume_run

    folder = RunFolder.open(run)
    if not folder.result.is_file() and named_config(folder, model, data, method) != folder.read_config():
        own = config_to_dict(folder.read_config())
        given = {"model": model, "data": data, "method": method}
        wrong = [f"--{key} {name}" for key, name in given.items() if name not in ("", own[key]["name"])]
        raise ConfigError(
            f"A run is resumed with its own network, data and method. Got {', '.join(wrong)}; name those of "
            f"{folder.config}."
        )

    with run_progress() as listener:
        outcome = resume_run(run, device=device, time_limit=seconds, data_dir=data_dir, listener=listener)
    _conclude(outcome)


def _load(recipe: str, overrides: list[str]) -> RunConfig:
    """Load a recipe. A run of another network, data set or method than the recipe's is named after them."""
    config = load_recipe(recipe, overrides)
    keys = {override.partition("=")[0].strip() for override in overrides}
    if "name" not in keys and keys & {"model.name", "data.name", "method.name"}:
        names = (config.data.name, config.model.name, config.method.name)
        name = "-".join(Path(each.rpartition(":")[2]).name for each in names)
        return load_recipe(recipe, [*overrides, f"name={name}"])
    return config


def _print_plan(config: RunConfig, out: Path | None, device: str, *, as_json: bool) -> None:
    """Print what a run would train, after everything that is checked before training."""
    import softprune
    from softprune.lab.train.run import check

    data, begin, where, path = check(config, out, device=device)
    network, pruner = begin.dense, begin.stage.pruner
    sites, frozen = (pruner.sites, pruner.graph.frozen) if pruner is not None else ((), ())
    cost = softprune.cost(network, data.example(1))
    method, steps = config.method, begin.stage.step.steps
    if as_json:
        numbers = {
            "params": cost.params,
            "macs": cost.macs,
            "sites": len(sites),
            "frozen": len(frozen),
            "train_images": len(data.train),
            "test_images": len(data.test),
            "classes": data.num_classes,
            "steps_per_epoch": steps,
            "device": str(where),
            "folder": str(path),
        }
        print_json(numbers | {"config": config_to_dict(config)})
        return
    limits = [f"target {name} = {amount}" for name, amount in method.target.items()]
    if pruner is not None and pruner.penalised and not limits:
        limits = [f"strength = {method.strength:g}"]
    limits += [f"{name} = {value}" for name, value in method.options.items()]
    fine = f", then {config.finetune.epochs} of fine-tuning" if config.finetune.epochs else ""
    facts = {
        "network": f"{config.model.name}: {format_count(cost.params)} parameters, {format_count(cost.macs)} MACs",
        "prunable": f"{len(sites)} BatchNorms ({len(frozen)} frozen)",
        "data": f"{config.data.name}: {len(data.train):,} training and {len(data.test):,} test images, "
        f"{data.num_classes} classes",
        "training": f"{config.train.epochs} epochs of {steps:,} steps{fine}",
        "method": ", ".join([method.name, *limits]),
        "device": str(where),
        "folder": str(path),
    }
    for name, text in facts.items():
        say(f"{name:<9} {text}")


def _conclude(outcome: "Outcome") -> None:
    """Print the result table and the path of the report, or how to resume."""
    if outcome.stopped:
        if outcome.is_writer:
            say(f"Stopped by {outcome.stopped}; everything is saved. Resume: {outcome.folder.resume_command}")
        raise typer.Exit(EXIT_STOPPED)
    if not outcome.is_writer:
        return
    from softprune.lab.cli.reports import print_result, write_report

    assert outcome.result is not None
    print_result(outcome.result)
    if outcome.folder.compact.exists():
        say(f"Compact network: {outcome.folder.compact}")
    try:
        say(f"Report: {write_report(outcome.folder.path)}")
    except CheckpointError as error:  # a full or read-only disk; the run itself is finished
        remark(f"warning: {error}")
