"""The data sets by name, and the bundle of training and test images that training takes."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from softprune.errors import DataError
from softprune.lab.data.arrays import ArrayBatches, ArrayDataset, Augmentation, EpochSampler
from softprune.lab.data.cifar import CIFAR10, CIFAR100, Cifar, read_cifar
from softprune.lab.data.files import BatchLoader, LoadedDataset, LoaderBatches, keep_on_device, load_folder
from softprune.lab.factories import call_factory, check_name
from softprune.rng import hashed_permutation

# Takes the place of a site's number in the hash; far above any of them.
_HOLDOUT = 0x686F6C64


@dataclass(frozen=True)
class DataEntry:
    """What is known of a data set before it is read."""

    input_shape: tuple[int, int, int] | None = None
    """Shape of one image; None if `image_size` determines it."""
    num_classes: int | None = None
    """None if the files determine it."""


DATASETS = {
    "digits": DataEntry((1, 8, 8), 10),
    "cifar10": DataEntry((3, 32, 32), 10),
    "cifar100": DataEntry((3, 32, 32), 100),
    "folder": DataEntry(),
}


@dataclass(frozen=True, kw_only=True)
class DataBundle:
    """A data set: its training and test images, and how the device augments those in memory."""

    name: str
    num_classes: int
    input_shape: tuple[int, ...]
    """(channels, height, width) of the network's input."""
    train: ArrayDataset | LoadedDataset
    test: ArrayDataset | LoadedDataset
    augmentation: Augmentation = field(default_factory=Augmentation)
    """For images in memory; the others come augmented."""
    class_names: tuple[str, ...] = ()
    holdout: ArrayDataset | LoadedDataset | None = None
    """Training images that are left out of training and evaluated after each epoch; None for the test images."""

    def __post_init__(self) -> None:
        for key, part in self.parts().items():
            if not isinstance(part, ArrayDataset | LoadedDataset) or not len(part):
                raise DataError(
                    f"`{key}` of a DataBundle must be a softprune.lab.data.ArrayDataset or LoadedDataset with images. "
                    f"Got a {type(part).__name__} in {self.name!r}; return the pair (train, test) for data sets of "
                    "torch."
                )
            is_cropped = key == "train" and self.augmentation.resize
            if not is_cropped and part.shape != tuple(self.input_shape):
                raise DataError(
                    f"Images must have the shape `input_shape`, {tuple(self.input_shape)}. Got {part.shape} for "
                    f"`{key}` of {self.name!r}; resize them, or correct it."
                )
            if isinstance(part, ArrayDataset):
                smallest, largest = map(int, part.labels.aminmax())
                if smallest < 0 or largest >= self.num_classes:
                    raise DataError(
                        f"Labels must be from 0 to {self.num_classes - 1}, since there are {self.num_classes} classes. "
                        f"Got {smallest} to {largest} from {self.name!r}; number the classes from 0, or correct "
                        "`classes` or `num_classes` of the training set."
                    )

    def parts(self) -> dict[str, ArrayDataset | LoadedDataset]:
        """Return the sets of images that there are, by name."""
        parts = {"train": self.train, "test": self.test, "holdout": self.holdout}
        return {key: part for key, part in parts.items() if part is not None}

    def to(self, device: torch.device | str) -> "DataBundle":
        """Return the data set with its images in memory, if it has any, on a device."""
        moved: Any = {key: part.to(device) for key, part in self.parts().items() if isinstance(part, ArrayDataset)}
        return replace(self, **moved)

    def with_holdout(self, count: int, seed: int) -> "DataBundle":
        """Hold ``count`` training images out. Which ones depends only on ``seed`` and the number of images."""
        total = len(self.train)
        if not 0 < count < total:
            raise DataError(
                f"data.holdout must leave at least one of the {total:,} training images. Got {count}; lower it."
            )
        order = hashed_permutation(total, seed, _HOLDOUT, 0)
        held, kept = order[:count].sort().values, order[count:].sort().values
        return replace(self, train=self.train.subset(kept), holdout=self.train.subset(held, augment=False))

    def batches(
        self, sampler: EpochSampler, device: torch.device | str, workers: int = 0
    ) -> ArrayBatches | LoaderBatches:
        """Return batches of the training images in the order of ``sampler``, on ``device``."""
        if isinstance(self.train, ArrayDataset):
            return ArrayBatches(self.train, sampler, self.augmentation)
        return LoaderBatches(BatchLoader(self.train, workers=workers, device=device), sampler)

    def example(self, batch_size: int = 2, device: torch.device | str = "cpu") -> Tensor:
        """Return zeros of the shape of the network's input."""
        return torch.zeros(batch_size, *self.input_shape, device=device)


def load_data(
    name: str,
    root: str | os.PathLike[str] | None = None,
    *,
    device: torch.device | str = "cpu",
    image_size: int = 224,
    seed: int = 0,
    augment: bool = True,
    randaugment: int = 0,
    erasing: float = 0.0,
    holdout: int = 0,
    in_memory: bool = False,
    workers: int = 0,
    options: Mapping[str, Any] | None = None,
) -> DataBundle:
    """Return the data set `name`: a key of DATASETS, or `module:factory` of your own (docs/data.md).

    Args:
        name: Which data set.
        root: The folder with its files (./data by default; the digits need none).
        device: Data sets in memory are copied to this device.
        image_size: Side of the crops of images in folders.
        seed: Seeds their augmentation, and chooses the images that are held out.
        augment: Augment the training images.
        randaugment: Magnitude of RandAugment, for images in folders; 0 for none.
        erasing: Probability that a random rectangle of a training image is set to the mean colour.
        holdout: Training images that are left out of training and evaluated after each epoch.
        in_memory: Decode images in folders once and keep them on `device`; they must have one size.
        workers: Processes that decode them.
        options: Further keyword arguments of a factory of your own.
    """
    check_name("data.name", name, DATASETS, DataError, options=options)
    for key, value, allowed, others in (
        ("randaugment", randaugment, name == "folder" and not in_memory, "a folder without data.in_memory"),
        ("in_memory", in_memory, name in DATASETS, ", ".join(DATASETS)),
        ("erasing", erasing, name in DATASETS, ", ".join(DATASETS)),
    ):
        if value and not allowed:
            raise DataError(f"data.{key} is for {others}. Got data.name = {name!r}; leave data.{key} out.")
    folder = None if root is None else Path(root).expanduser()
    if name == "digits":
        bundle = _load_digits()
    elif name in DATASETS and name != "folder":
        bundle = load_cifar(CIFAR10 if name == "cifar10" else CIFAR100, folder or Path("data"))
    elif name == "folder":
        if folder is None:
            raise DataError("Images in files need their folder's path. Got none; pass --data-dir (`root`).")
        train, test, names = load_folder(
            folder,
            size=image_size,
            seed=seed,
            augment=augment,
            randaugment=randaugment,
            erasing=erasing,
            whole=in_memory,
        )
        augmentation = Augmentation(resize=image_size, flip=True) if in_memory else Augmentation()
        bundle = _bundle(name, (train, test), names, augmentation)
    else:
        offered = {"root": folder, "image_size": image_size, "seed": seed, "augment": augment}
        bundle = _own(name, call_factory(name, "data.name", options or {}, offered, DataError), seed)
    if erasing:
        bundle = replace(bundle, augmentation=replace(bundle.augmentation, erasing=erasing))
    if not augment:
        bundle = replace(bundle, augmentation=Augmentation())
    if holdout:
        bundle = bundle.with_holdout(holdout, seed)
    if in_memory:
        loaded = {key: part for key, part in bundle.parts().items() if isinstance(part, LoadedDataset)}
        kept: Any = {key: keep_on_device(part, device, workers) for key, part in loaded.items()}
        bundle = replace(bundle, **kept)
    return bundle.to(device)


def _bundle(
    name: str, parts: Any, names: tuple[str, ...], augmentation: Augmentation, num_classes: int = 0
) -> DataBundle:
    train, test = parts
    return DataBundle(
        name=name,
        num_classes=num_classes or len(names),
        input_shape=test.shape,
        train=train,
        test=test,
        augmentation=augmentation,
        class_names=names,
    )


# Of the 1,437 training images, in units of the stored values 0 to 16.
_DIGITS_MEAN, _DIGITS_STD = 4.8838, 6.0174


def _load_digits() -> DataBundle:
    """Return 1,437 training and 360 test images of 1 x 8 x 8, always split the same way."""
    with (
        resources.files("softprune.lab.data").joinpath("digits.npz").open("rb") as file,
        np.load(file, allow_pickle=False) as stored,
    ):
        images, labels = stored["images"], stored["labels"]
    index = np.arange(len(labels))
    # A fifth of them, but not every fifth one, since the file repeats the ten digits in order.
    test = (index + index // 10) % 5 == 0
    parts = [
        ArrayDataset.from_arrays(images[chosen], labels[chosen], mean=_DIGITS_MEAN, std=_DIGITS_STD)
        for chosen in (~test, test)
    ]
    return _bundle("digits", parts, tuple("0123456789"), Augmentation(pad=1))  # no flips: a mirrored 2 is no digit


def load_cifar(cifar: Cifar, root: Path) -> DataBundle:
    """Return CIFAR-10 or CIFAR-100 from the official files in ``root``."""
    parts, names = read_cifar(cifar, root)
    return _bundle(
        cifar.name,
        [ArrayDataset.from_arrays(*part, mean=cifar.mean, std=cifar.std) for part in parts],
        names,
        Augmentation(pad=4, flip=True),
    )


def _own(name: str, data: Any, seed: int) -> DataBundle:
    """Return what a factory has returned as a bundle: a pair of torch data sets or of ArrayDatasets, or a bundle."""
    if isinstance(data, DataBundle):
        return data
    if not isinstance(data, tuple | list) or len(data) != 2:  # random_split returns a list
        raise DataError(
            "The factory of data.name must return (train, test), two data sets, or a softprune.lab.data.DataBundle. "
            f"Got a {type(data).__name__} from {name!r}."
        )
    whole = data[0]
    while isinstance(whole, Subset | ConcatDataset) and not {"classes", "num_classes", "targets"} & vars(whole).keys():
        whole = whole.dataset if isinstance(whole, Subset) else whole.datasets[0]  # which knows the classes
    names = tuple(map(str, getattr(whole, "classes", ())))
    labels = whole.labels if isinstance(whole, ArrayDataset) else getattr(whole, "targets", ())
    count = len(names) or getattr(whole, "num_classes", 0) or (1 + int(max(labels)) if len(labels) else 0)
    if not isinstance(count, int) or count < 2:
        raise DataError(
            f"A data set must say how many classes it has, at least 2. Got {count!r} from `classes`, `num_classes` or "
            f"`targets` of {name!r}; set one of them on the training set, or return a DataBundle."
        )
    parts = [
        part if isinstance(part, ArrayDataset | LoadedDataset) else LoadedDataset(part, num_classes=count, seed=seed)
        for part in data
    ]
    return _bundle(name, parts, names, Augmentation(), count)
