"""Lists: `runs`, `recipes`, `methods`, `models`."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from softprune.errors import ConfigError, SoftpruneError, nearest
from softprune.io import write_atomically
from softprune.lab.cli.app import Json, command
from softprune.lab.cli.output import format_cut, format_percent, print_facts, print_json, print_table, say
from softprune.lab.config import recipes as library
from softprune.lab.runs.folder import RunFolder
from softprune.lab.runs.reading import load_run


@command
def runs(
    folder: Annotated[Path, typer.Argument(help="Folder to look in.")] = Path("runs"), as_json: Json = False
) -> None:
    """List the runs in a folder and its subfolders, with their state."""
    if not folder.is_dir():
        raise ConfigError(
            f"The folder to look for runs in must exist. Got {folder}. `softprune train` makes runs in ./runs; "
            "name another folder as the argument."
        )
    rows = [_run_cells(run) for run in sorted(_run_folders(folder), key=lambda run: run.path)]
    columns = ["run", "state", "epoch", "top-1 %", "MACs cut %"]
    if not rows and not as_json:
        say(f"No runs in {folder}.")
        return
    print_facts(columns, rows, as_json=as_json)


def _run_folders(root: Path) -> Iterator[RunFolder]:
    """Yield the folders below ``root`` with a config.toml, without dense baselines. Links are not followed."""
    folders = [str(root)]  # not rglob, which fails in deep folders
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(folder) as entries:
                inside = list(entries)
        except OSError:  # a folder that cannot be read has no runs to show
            continue
        folders += [entry.path for entry in inside if entry.is_dir(follow_symlinks=False)]
        run = RunFolder(folder)
        if run.whole is run and any(entry.name == "config.toml" for entry in inside):
            yield run


def _run_cells(folder: RunFolder) -> list[str]:
    try:
        run = load_run(folder.path)
    except SoftpruneError:  # damaged, or no epoch has ended
        begun = any(path.exists() for path in (folder.checkpoints, folder.metrics, folder.dense))
        state = "running" if folder.is_locked() else "stopped" if begun else "not started"
        return [str(folder.path), state, "-", "-", "-"]
    state = "finished" if not run.in_progress else "running" if folder.is_locked() else "stopped"
    last = run.epochs[-1]
    cut = "-" if run.in_progress else format_cut(run.dense.macs, last.macs)
    # Of a finished run the accuracy of its network on the test images, which epochs may not have used.
    top1 = last.test_top1 if run.in_progress or run.compact_top1 is None else run.compact_top1
    return [str(folder.path), state, str(last.number), format_percent(top1), cut]


@command
def recipes(
    name: Annotated[str | None, typer.Argument(help="Print this recipe or sweep.")] = None,
    copy: Annotated[Path | None, typer.Option(metavar="FILE", help="Copy it to a file that you can edit.")] = None,
    as_json: Json = False,
) -> None:
    """List recipes and sweeps, or print one.

    Train them with `softprune train NAME` and `softprune sweep NAME`.
    """
    if name is not None:
        _show_recipe(name, copy)
        return
    if copy is not None:
        raise ConfigError("--copy must come with the name of a recipe. Got no name; `softprune recipes` lists them.")
    kinds = {"recipe": library.recipe_files(), "sweep": library.sweep_files()}
    found = [(kind, name, library.title_of(file)) for kind, files in kinds.items() for name, file in files.items()]
    if as_json:
        print_json([{"kind": kind, "name": name, "description": title} for kind, name, title in found])
        return
    for kind in kinds:
        rows = [[name, title] for each, name, title in found if each == kind]
        print_table("", [kind, "description"], rows)
        say()


def _show_recipe(name: str, copy: Path | None) -> None:
    files = library.sweep_files() | library.recipe_files()
    if name not in files:
        raise ConfigError(
            f"A recipe must be a name that `softprune recipes` lists. Got {name!r}.{nearest(name, files)}"
        )
    text = files[name].read_text(encoding="utf-8")
    if copy is None:
        say(text.rstrip("\n"))
        return
    if copy.exists():
        raise ConfigError(f"--copy must name a file that does not exist. Got {copy}; name another.")
    write_atomically(copy, text.encode(), then="copy again", follow_link=True)
    command = "sweep" if name in library.sweep_files() else "train"
    say(f"{copy} written. Edit it, then: softprune {command} {copy}")


@command
def methods(as_json: Json = False) -> None:
    """List the pruning methods (`method.name` in a recipe)."""
    from softprune.lab.train.pruner import options_of
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
