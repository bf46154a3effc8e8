"""Data sets: CIFAR batches, image folders and tar shards."""

import os
from pathlib import Path
from random import Random

from fuzzing.formats import command, outcome_of, register
from fuzzing.mutations import mutate_bytes, mutate_pickle, replace_by_other_kind
from fuzzing.seeds import Seeds, small_cifar
from fuzzing.worker import WrongResult


@register(0.05)
def cifar(rng: Random, seeds: Seeds, work: Path) -> str:
    """A CIFAR batch, which is a pickle."""
    import torch

    from softprune.lab.data.cifar import load_cifar

    folder = seeds.copy("cifar", work)
    path = rng.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    kind = rng.random()
    if kind < 0.6:
        path.write_bytes(mutate_pickle(rng, path.read_bytes()))
    elif kind < 0.95:
        path.write_bytes(mutate_bytes(rng, path.read_bytes(), seeds.others))
    else:
        replace_by_other_kind(rng, path)
    bundle = load_cifar(small_cifar(), folder)
    for part, count in ((bundle.train, 10), (bundle.test, 2)):
        if part.images.shape != (count, 3, 32, 32) or part.images.dtype != torch.uint8:
            raise WrongResult(f"images of {part.images.dtype} {tuple(part.images.shape)}")
        if not 0 <= int(part.labels.min()) <= int(part.labels.max()) < 10:
            raise WrongResult(f"labels {part.labels.tolist()}")
    return "accepted"


@register(0.03)
def images(rng: Random, seeds: Seeds, work: Path) -> str:
    """An image folder: its files and what else a folder can hold."""
    from softprune.lab.data import load_data

    folder = seeds.copy("images", work)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    path = rng.choice(paths)
    kind = rng.random()
    others = (*(each.read_bytes() for each in paths[:6]), (seeds.folder / "page.eps").read_bytes())
    if kind < 0.7:
        path.write_bytes(mutate_bytes(rng, path.read_bytes(), others))
    elif kind < 0.85:
        replace_by_other_kind(rng, path)
    else:
        _mutate_folders(rng, path)
    if kind < 0.2:
        seeds.copy("run", work)
        return outcome_of(command("predict", "run", str(path))[0])
    bundle = load_data("folder", folder, image_size=16)
    for part in (bundle.train, bundle.test):
        if len(part) > 2 * len(paths):
            raise WrongResult(f"{len(part)} images where there are {len(paths)} files")
        for index in range(len(part)):
            if kind < 0.85 and part.path(index).parent != path.parent:
                continue  # decoding takes time, and only one image was damaged
            item = part[index, 0]
            if isinstance(item, tuple) and item[0].shape != (3, 16, 16):
                raise WrongResult(f"an image of shape {tuple(item[0].shape)}")
    return "accepted"


@register(0.02)
def shards(rng: Random, seeds: Seeds, work: Path) -> str:
    """Tar shards in the WebDataset layout, and the list of their classes."""
    from softprune.lab.data import load_data

    folder = seeds.copy("shards", work)
    path = rng.choice(sorted(folder.iterdir()))
    if rng.random() < 0.95:
        path.write_bytes(mutate_bytes(rng, path.read_bytes(), seeds.others))
    else:
        replace_by_other_kind(rng, path)
    bundle = load_data("webdataset", folder, image_size=16)
    for part in (bundle.train, bundle.test):
        if not 0 <= int(part.labels.min()) <= int(part.labels.max()) < bundle.num_classes:
            raise WrongResult(f"labels {part.labels.tolist()} of {bundle.num_classes} classes")
        for index in range(len(part)):
            item = part[index, 0]
            if isinstance(item, tuple) and item[0].shape != (3, 16, 16):
                raise WrongResult(f"an image of shape {tuple(item[0].shape)}")
    return "accepted"


def _mutate_folders(rng: Random, path: Path) -> None:
    kind = rng.randrange(6)
    if kind == 0:
        (path.parent / "loop").symlink_to("..")
    elif kind == 1:  # every folder leads to every other one
        for name in "abcdefghij":
            (path.parent / name).mkdir()
            (path.parent / name / "image.png").write_bytes(b"")
        for first in "abcdefghij":
            for second in "abcdefghij":
                (path.parent / first / f"to-{second}").symlink_to(f"../{second}")
    elif kind == 2:
        deep = path.parent / "/".join(["deep"] * rng.choice((50, 400)))
        deep.mkdir(parents=True)
    elif kind == 5:  # a small file with many pixels, or with sides that no crop fits
        from PIL import Image

        Image.new("1", rng.choice(((1, 65_000), (65_000, 1), (9_000, 9_000)))).save(path, "PNG")
    elif kind == 3:
        path.rename(os.fsdecode(os.fsencode(path.parent) + b"/\x1b[31m\xff\n" + os.fsencode(path.suffix)))
    else:
        path.parent.rename(path.parent.with_name(rng.choice((".hidden", "a b", "\u202e", "-x", "\x1b[2J"))))
