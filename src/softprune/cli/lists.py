"""The lists: `methods`, `models`, `data`, `recipes`."""

from softprune.cli.app import command
from softprune.cli.output import print_table, say


@command
def methods() -> None:
    """List the pruning methods (`method.name` of a recipe)."""
    from softprune.methods import REGISTRY

    rows = [[name, entry.description, ", ".join(entry.options)] for name, entry in REGISTRY.items()]
    rows.append(["dense", "no pruning: the baseline to compare with", ""])
    print_table("", ["method", "what it does", "method.options"], rows)


@command
def models() -> None:
    """List the networks (`model.name` of a recipe)."""
    from softprune.models import REGISTRY

    rows = [
        [name, "x".join(map(str, entry.input_shape)), entry.description] for name, entry in REGISTRY.items()
    ]
    print_table("", ["model", "input", "what it is"], rows)


@command
def data() -> None:
    """List the data sets (`data.name` of a recipe)."""
    from softprune.data import DATASETS

    rows = [
        [name, "yes" if entry.needs_root else "no", entry.description] for name, entry in DATASETS.items()
    ]
    print_table("", ["data", "--data-dir", "what it is"], rows)


@command
def recipes() -> None:
    """List the recipes, for `softprune train NAME`, and the sweeps, for `softprune sweep NAME`."""
    from softprune.config.shipped import recipe_names, recipe_title, sweep_names, sweep_title

    print_table("", ["recipe", "what it is"], [[name, recipe_title(name)] for name in recipe_names()])
    say()
    print_table("", ["sweep", "what it is"], [[name, sweep_title(name)] for name in sweep_names()])
