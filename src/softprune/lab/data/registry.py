"""The data sets by name: one entry each, read by `load_data`, the command line and its help."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from softprune.errors import DataError, check_types
from softprune.factories import check_name
from softprune.lab.data.cifar import CIFAR10, CIFAR100, Cifar, load_cifar
from softprune.lab.data.datasets import Augmentation, DataBundle, load_digits
from softprune.lab.data.folder import load_folder, require_decoder
from softprune.lab.data.huggingface import load_huggingface
from softprune.lab.data.images import Crops
from softprune.lab.data.memory import keep_in_memory
from softprune.lab.data.own import load_own
from softprune.lab.data.shards import load_shards


@dataclass(frozen=True, kw_only=True)
class DataEntry:
    """A data set that `load_data` knows."""

    load: Callable[..., DataBundle]
    """Called with the keywords that `load_data` passes; most loaders use only some of them."""
    description: str
    needs_root: bool
    input_shape: tuple[int, int, int] | None = None
    """Shape of one image; None if `image_size` determines it."""
    num_classes: int | None = None
    """None if the files determine it."""

    @property
    def in_files(self) -> bool:
        """Whether images are decoded from files and cropped to `image_size`."""
        return self.input_shape is None


def _cifar(cifar: Cifar) -> DataEntry:
    return DataEntry(
        load=lambda *, root, download, **_: load_cifar(cifar, root or "data", download=download),
        description=f"60,000 photographs of 32 x 32 pixels, {cifar.num_classes} classes; "
        "from the official Python files",
        needs_root=True,
        input_shape=(3, 32, 32),
        num_classes=cifar.num_classes,
    )


DATASETS: dict[str, DataEntry] = {
    "digits": DataEntry(
        load=lambda **_: load_digits(),
        description="1,797 handwritten digits of 8 x 8 pixels, 10 classes; ships with softprune",
        needs_root=False,
        input_shape=(1, 8, 8),
        num_classes=10,
    ),
    "cifar10": _cifar(CIFAR10),
    "cifar100": _cifar(CIFAR100),
    "folder": DataEntry(
        load=lambda *, root, crops, **_: load_folder(root, crops),
        description="your images, in the ImageNet layout: train/CLASS/*.jpeg and val/CLASS/*.jpeg",
        needs_root=True,
    ),
    "webdataset": DataEntry(
        load=lambda *, root, crops, train_shards, val_shards, download, **_: load_shards(
            root, crops, train_shards=train_shards, val_shards=val_shards, download=download
        ),
        description="your images, in tar shards of the WebDataset layout: train-*.tar and val-*.tar",
        needs_root=True,
    ),
    "huggingface": DataEntry(
        load=lambda *, repo, crops, root, download, **_: load_huggingface(repo, crops, root, download=download),
        description="an image set of the Hugging Face Hub, data.repo; needs the package datasets",
        needs_root=False,
    ),
}
_IN_FILES = tuple(name for name, entry in DATASETS.items() if entry.in_files)


@check_types
def load_data(
    name: str,
    root: str | os.PathLike[str] | None = None,
    *,
    device: torch.device | str = "cpu",
    download: bool = False,
    image_size: int = 224,
    seed: int = 0,
    augment: bool = True,
    randaugment: int = 0,
    erasing: float = 0.0,
    holdout: int = 0,
    train_shards: str = "train-*.tar",
    val_shards: str = "val-*.tar",
    repo: str = "",
    in_memory: bool = False,
    workers: int = 0,
    options: Mapping[str, Any] | None = None,
) -> DataBundle:
    """Return the data set `name`: a key of DATASETS, or `module:factory` of your own (docs/data.md).

    Args:
        name: Which data set.
        root: The folder with its files (./data by default; the digits need none).
        device: Data sets in memory are copied to this device.
        download: Fetch missing files: CIFAR from its official address, shards by URL, sets of the Hugging Face Hub.
        image_size: Side of the crops of images in files.
        seed: Seeds these crops.
        augment: Augment the training images.
        randaugment: Magnitude of RandAugment, for images in files; 0 for none.
        erasing: Probability that a random rectangle of a training image is set to the mean colour.
        holdout: Training images that are left out of training and evaluated after each epoch.
        train_shards: Pattern or URL pattern of the training shards of a WebDataset.
        val_shards: Pattern or URL pattern of its test shards.
        repo: The set on the Hugging Face Hub, or a folder that its package `datasets` saved.
        in_memory: Decode images in files once and keep them on `device`; they must have one size.
        workers: Processes that decode them.
        options: Further keyword arguments of a factory of your own.
    """
    check_name("data.name", name, DATASETS, DataError, options=options)
    if randaugment and name not in _IN_FILES:
        raise DataError(
            f"data.randaugment needs images in files (data.name = {', '.join(_IN_FILES)}). Got data.name = "
            f"{name!r}; leave it out, or put RandAugment into the transform of your own data set."
        )
    folder = None if root is None else Path(root).expanduser()
    if name not in DATASETS:
        if in_memory:
            raise DataError(
                f"data.in_memory needs images in files (data.name = {', '.join(_IN_FILES)}). Got data.name = {name!r}; "
                "leave it out, or return two softprune.lab.data.ArrayDataset from the factory."
            )
        if erasing:
            raise DataError(
                f"data.erasing needs one of softprune's data sets ({', '.join(DATASETS)}). Got data.name = {name!r}; "
                "leave it out, or put random erasing into the transform of your own data set."
            )
        bundle = load_own(name, options or {}, root=folder, image_size=image_size, seed=seed, augment=augment)
    else:
        entry = DATASETS[name]
        if entry.in_files and entry.needs_root and folder is None:
            raise DataError("Images in files need their folder's path. Got none; pass --data-dir (`root`).")
        if entry.in_files:
            require_decoder(randaugment)
        bundle = entry.load(
            root=folder,
            download=download,
            crops=Crops(size=image_size, seed=seed, augment=augment, randaugment=randaugment, erasing=erasing),
            train_shards=train_shards,
            val_shards=val_shards,
            repo=repo,
        )
        if erasing and not entry.in_files:
            bundle = replace(bundle, augmentation=replace(bundle.augmentation, erasing=erasing))
    if holdout:
        bundle = bundle.with_holdout(holdout, seed)
    if in_memory and name in _IN_FILES:
        bundle = keep_in_memory(bundle, torch.device(device), workers)
    return (bundle if augment else replace(bundle, augmentation=Augmentation())).to(device)
