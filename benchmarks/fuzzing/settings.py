"""Recipes, `--set`, sweeps, and the options of the command line."""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from fuzzing.formats import command, mutate_text, outcome_of, register
from fuzzing.mutations import TEXTS, json_value, mutate_toml, toml_value
from fuzzing.seeds import Seeds
from fuzzing.worker import WrongResult


@register(0.14)
def recipe(rng: Random, seeds: Seeds, work: Path) -> str:
    """A recipe, read as `train` reads it; what is accepted must survive being written and read."""
    path, _ = seeds.copy("recipe.toml", work), seeds.copy("fuzz_canary.py", work)
    mutate_text(rng, path, seeds, mutate_toml)
    if rng.random() < 0.03 and "pretrained" not in path.name:
        return outcome_of(command("train", "recipe.toml", "--dry-run", "--device", "cpu")[0])
    return _check_config(path)


def _check_config(path: Path, overrides: Sequence[str] = ()) -> str:
    from softprune.lab.config.recipes import dump_config, load_recipe

    config = load_recipe(str(path), overrides)
    copy = path.with_name("written.toml")
    copy.write_text(dump_config(config), encoding="utf-8")
    if load_recipe(str(copy)) != config:
        raise WrongResult(f"written and read again it differs: {dump_config(config)[:500]}")
    return "accepted"


@register(0.08)
def settings(rng: Random, seeds: Seeds, work: Path) -> str:
    """`--set KEY=VALUE`."""
    from softprune.lab.config.recipes import load_recipe

    path = seeds.copy("recipe.toml", work)
    keys = _keys(load_recipe(str(path)))
    key = rng.choice(keys) if rng.random() < 0.9 else rng.choice(TEXTS)
    value = rng.choice((toml_value(rng), json_value(rng), rng.choice(TEXTS)))
    text = rng.choice((f"{key}={value}", f"{key} = {value}", key, f"{key}.x={value}", f"={value}", value))
    return _check_config(path, [text])


def _keys(config: Any) -> list[str]:
    import tomllib

    from softprune.lab.config.recipes import dump_config

    found: list[str] = []

    def walk(table: dict[str, Any], prefix: str) -> None:
        for name, value in table.items():
            found.append(prefix + name)
            if isinstance(value, dict):
                walk(value, f"{prefix}{name}.")

    walk(tomllib.loads(dump_config(config)), "")
    return found


@register(0.07)
def sweep(rng: Random, seeds: Seeds, work: Path) -> str:
    """A sweep file."""
    path, _ = seeds.copy("sweep.toml", work), seeds.copy("recipe.toml", work)
    seeds.copy("fuzz_canary.py", work)
    mutate_text(rng, path, seeds, mutate_toml)
    return outcome_of(command("sweep", "sweep.toml", "--dry-run")[0])


_GOOD_ARGUMENTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "train": (("recipe.toml", "--dry-run"),),
    "sweep": (("sweep.toml", "--dry-run"),),
    "inspect": (("digits_net",), ("run",)),
    "predict": (("run", "images/train/ant/image.png"),),
    "compare": (("run", "run", "--out", "table.md"),),
    "export": (("missing",), ("run", "--format", "pt2")),
    "bench": (("missing",),),  # how long it may take is for the user to choose
    "recipes": (("digits",), ()),
    "runs": ((".",),),
    "methods": ((),),
    "models": ((),),
    "data": ((),),
}
"""Arguments of each command that it accepts; ("run",) where nothing is given."""
_VALUES = (
    *TEXTS, "-1", "0", "1.5", "1" * 400, "cpu", "1x8x8", "3x200000x200000", "1x-1x8", "run", "\udcff", "ray",
)  # fmt: skip


def known_options() -> dict[str, list[str]]:
    """Return every option of every command, as the application declares them."""
    import typer.main

    from softprune.lab.cli.app import app

    group: Any = typer.main.get_command(app)
    return {
        name: sorted(text for each in found.params for text in each.opts if text.startswith("--"))
        for name, found in sorted(group.commands.items())
    }


@register(0.04)
def options(rng: Random, seeds: Seeds, work: Path) -> str:
    """Arguments and options of every command, one of them hostile."""
    for name in ("recipe.toml", "sweep.toml", "images"):
        (work / name).symlink_to(seeds.folder / name)
    seeds.copy("run", work)
    known = known_options()
    name = rng.choice(list(known))
    good = rng.choice(_GOOD_ARGUMENTS.get(name, (("run",),)))
    text = rng.choice(_VALUES)
    if name == "runs" and text == "/":
        text = ".."  # a search of the whole disk takes as long as the disk is large
    kind = rng.random()
    if kind < 0.7:
        # A value is taken as another argument where the option is a flag: both are mistakes to report.
        arguments = (name, *good, rng.choice(known[name]), text)
    elif kind < 0.8:
        arguments = (name, *good, *rng.choices(known[name], k=2))
    else:
        arguments = (name, text, *good[1:])
    # An option's own text may come back: it was the user who typed it.
    return outcome_of(command(*arguments, terminal=False)[0])
