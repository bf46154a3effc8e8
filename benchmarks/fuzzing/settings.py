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
    from softprune.config.recipes import dump_config, load_recipe

    config = load_recipe(str(path), overrides)
    copy = path.with_name("written.toml")
    copy.write_text(dump_config(config), encoding="utf-8")
    if load_recipe(str(copy)) != config:
        raise WrongResult(f"written and read again it differs: {dump_config(config)[:500]}")
    return "accepted"


@register(0.08)
def settings(rng: Random, seeds: Seeds, work: Path) -> str:
    """`--set KEY=VALUE`."""
    from softprune.config.recipes import load_recipe

    path = seeds.copy("recipe.toml", work)
    keys = _keys(load_recipe(str(path)))
    key = rng.choice(keys) if rng.random() < 0.9 else rng.choice(TEXTS)
    value = rng.choice((toml_value(rng), json_value(rng), rng.choice(TEXTS)))
    text = rng.choice((f"{key}={value}", f"{key} = {value}", key, f"{key}.x={value}", f"={value}", value))
    return _check_config(path, [text])


def _keys(config: Any) -> list[str]:
    import tomllib

    from softprune.config.recipes import dump_config

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


_OPTIONS = {
    "train": (
        "--model", "--data", "--data-dir", "--epochs", "--batch-size", "--lr", "--seed", "--set", "--time-limit",
        "--device",
    ),
    "sweep": ("--jobs", "--data-dir", "--time-limit", "--device"),
    "inspect": ("--num-classes", "--input", "--include", "--exclude"),
    "evaluate": ("--device", "--data-dir", "--model", "--data"),
    "export": ("--format", "--model", "--input"),
    "bench": (
        "--backend", "--batch", "--threads", "--dtype", "--compile-mode", "--repeats", "--device", "--model", "--input",
    ),
    "predict": ("--device", "--data-dir"),
    "runs": (),
    "recipes": (),
    "report": (),
    "compare": (),
    "resume": ("--time-limit", "--device", "--data-dir"),
}  # fmt: skip
_FIXED = {
    "train": ("recipe.toml", "--dry-run"),
    "sweep": ("sweep.toml", "--dry-run"),
    "predict": ("run", "images/train/ant/image.png"),
}


@register(0.03)
def options(rng: Random, seeds: Seeds, work: Path) -> str:
    """Arguments and options of every command, one of them hostile."""
    for name in ("recipe.toml", "sweep.toml", "run", "images"):
        (work / name).symlink_to(seeds.folder / name)
    name = rng.choice([*_OPTIONS, "train", "inspect"])
    text = rng.choice(
        (*TEXTS, "-1", "0", "1.5", "1" * 400, "cpu", "1x8x8", "3x200000x200000", "1x-1x8", "run", "\udcff")
    )
    known = _OPTIONS[name]
    if known and rng.random() < 0.85:
        fixed = _FIXED.get(name, ("digits_net",) if name == "inspect" else ("missing",))
        arguments = (name, *fixed, rng.choice(known), text)
    else:
        arguments = (name, text, *(("--dry-run",) if name in ("train", "sweep") else ()))
    # An option's own text may come back: it was the user who typed it.
    return outcome_of(command(*arguments, terminal=False)[0])
