"""`data` and `shards`: the data sets, and tar shards from a folder of images."""

from pathlib import Path
from typing import Annotated

import typer

from softprune.cli.app import Json, command
from softprune.cli.output import print_facts, say


@command
def data(as_json: Json = False) -> None:
    """List the data sets (`data.name` in a recipe)."""
    from softprune.data import DATASETS

    rows = [[name, "yes" if entry.needs_root else "no", entry.description] for name, entry in DATASETS.items()]
    print_facts(["data", "--data-dir", "description"], rows, as_json=as_json)


@command
def shards(
    folder: Annotated[Path, typer.Argument(help="Images: train/CLASS/*.jpeg and val/CLASS/*.jpeg.")],
    out: Annotated[Path, typer.Argument(help="Folder for the shards.")],
    per_shard: Annotated[int, typer.Option(min=1, help="Images per shard.")] = 1000,
) -> None:
    """Write a folder of images as tar shards (WebDataset layout). Repeat the command to resume."""
    from softprune.data.shards import write_shards

    written: list[Path] = []
    write_shards(folder, out, per_shard=per_shard, on_shard=written.append)
    say(f"{len(written)} shards in {out}")
    say(f"Train on them: softprune train RECIPE --data webdataset --data-dir {out}")
