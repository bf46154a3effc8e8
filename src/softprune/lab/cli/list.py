"""Lists: `recipes`, `methods`, `models`."""

from pathlib import Path
from typing import Annotated

import typer

from softprune.errors import ConfigError, nearest
from softprune.io import write_atomically
from softprune.lab.cli.app import Json, command
from softprune.lab.cli.output import print_facts, print_json, print_table, say
from softprune.lab.config import recipes as library


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
    from softprune.lab.train.stage import options_of
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
