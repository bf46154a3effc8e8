"""`data` and `shards`: the data sets, and tar shards from a folder of images."""

from pathlib import Path
from typing import Annotated

import typer

from softprune.errors import ConfigError, DataError
from softprune.lab.cli.app import DataDir, Json, command
from softprune.lab.cli.output import print_facts, say
from softprune.lab.config.recipes import DEFAULT_RECIPE, load_recipe


@command
def data(
    name: Annotated[
        str | None, typer.Argument(help="Read all images of this one, which `train` would take with --data.")
    ] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """List the data sets (`data.name` in a recipe), or check one: which of its images cannot be read?"""
    from softprune.lab.data import DATASETS

    if name is not None:
        _check_images(name, data_dir, as_json=as_json)
        return
    if data_dir is not None:
        raise ConfigError("--data-dir must come with the name of a data set, such as folder. Got it alone.")
    rows = [[name, "yes" if entry.needs_root else "no", entry.description] for name, entry in DATASETS.items()]
    print_facts(["data", "--data-dir", "description"], rows, as_json=as_json)


def _check_images(name: str, data_dir: str | None, *, as_json: bool) -> None:
    import torch

    from softprune.lab.data.images import LoadedDataset
    from softprune.lab.data.loader import broken_images
    from softprune.lab.train.run import open_data

    config = load_recipe(DEFAULT_RECIPE, [f"data.name={name}"])
    found = open_data(config, torch.device("cpu"), data_dir, download=False)
    parts = (found.train, found.test)
    broken = [
        [each.path, each.reason]
        for part in parts
        if isinstance(part, LoadedDataset)
        for each in broken_images(part, config.data.workers)
    ]
    if broken or as_json:
        print_facts(["image", "reason"], broken, as_json=as_json)
    total = sum(map(len, parts))
    if broken:
        raise DataError(
            f"Every image must be readable, with its label. Got {len(broken):,} of {total:,} that are not; replace or "
            "remove them."
        )
    if not as_json:
        say(f"All {total:,} images of {found.num_classes} classes can be read.")


@command
def shards(
    folder: Annotated[Path, typer.Argument(help="Images: train/CLASS/*.jpeg and val/CLASS/*.jpeg.")],
    out: Annotated[Path, typer.Argument(help="Folder for the shards.")],
    per_shard: Annotated[int, typer.Option(min=1, help="Images per shard.")] = 1000,
) -> None:
    """Write a folder of images as tar shards (WebDataset layout). Repeat the command to resume."""
    from softprune.lab.data.shards import write_shards

    written: list[Path] = []
    write_shards(folder, out, per_shard=per_shard, on_shard=written.append)
    say(f"{len(written)} shards in {out}")
    say(f"Train on them: softprune train RECIPE --data webdataset --data-dir {out}")
