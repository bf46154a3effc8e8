"""Give a trial's record the name of the recipe that took over its settings.

    python benchmarks/adopt.py results/cifar100-vgg19-scp-strength4.35e-5-s0 cifar100-vgg19-scp

A search for a strength trains under names of its own. When a recipe takes over the strength that was found, the trial
is the run of that recipe: its configuration is the same but for the name. The command in the record stays that of the
trial. The record that the recipe had before moves to results/search.
"""

import shutil
import sys
from pathlib import Path

from missing import RESULTS, SETTINGS

from softprune.lab.config.recipes import dump_config, load_recipe
from softprune.lab.config.settings import RunConfig
from softprune.lab.runs.folder import RunFolder


def adopt(trial: Path, recipe: str, results: Path = RESULTS) -> Path:
    """Move the record of ``trial`` to the folder of ``recipe``, under its name."""
    record = RunFolder(trial).read_result()
    wanted = load_recipe(recipe, (*SETTINGS, f"seed={record.seed}"))
    different = [key for key, value in _trained(wanted).items() if _trained(record.config)[key] != value]
    if different:
        raise SystemExit(f"The trial must be trained as {recipe} says. Got {trial}, which differs in {different}.")
    target = results / f"{recipe}-s{record.seed}"
    if target.exists():
        before = RunFolder(target).read_config().method.strength
        shutil.move(target, results / "search" / f"{recipe}-strength{before:g}-s{record.seed}")
    config = record.config.replace(name=recipe)
    shutil.move(trial, target)  # with its latencies, if there are some
    (target / "config.toml").write_text(dump_config(config), encoding="utf-8")
    renamed = record.model_copy(update={"name": recipe, "config": config})
    (target / "result.json").write_text(renamed.to_json(), encoding="utf-8")
    return target


def _trained(config: RunConfig) -> dict[str, object]:
    """What decides the weights: all but the names, the folder of the data and what is recorded."""
    plain = config.replace(name="", records=RunConfig().records, data=config.data.replace(dir="", workers=0))
    return plain.model_dump()


if __name__ == "__main__":
    print(adopt(Path(sys.argv[1]), sys.argv[2]))
