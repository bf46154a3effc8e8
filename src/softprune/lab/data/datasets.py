"""Data sets in memory, the bundle of training and test images that training takes, and the embedded digits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any

import numpy as np
import torch
from torch import Tensor

from softprune.errors import DataError, first_line
from softprune.lab.data.images import EncodedDataset, LoadedDataset, normalised
from softprune.rng import hashed_permutation

# Takes the place of a site's number in the hash; far above any of them.
_HOLDOUT = 0x686F6C64


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Random augmentation of training images: a crop, a flip, an erased rectangle."""

    pad: int = 0
    """Zeros added on each side after normalisation (they are the mean colour), before a crop of the old size."""
    resize: int = 0
    """Side of the square that a crop of random area and ratio is resized to, as usual for ImageNet; 0 for none."""
    flip: bool = False
    """Flip images horizontally at random."""
    erasing: float = 0.0
    """Probability that a random rectangle of the image is set to the mean colour."""

    def __post_init__(self) -> None:
        for name in ("pad", "resize"):
            if getattr(self, name) < 0:
                raise DataError(
                    f"Augmentation.{name} must be a number of pixels, 0 or more. Got {getattr(self, name)}."
                )
        if self.pad and self.resize:
            raise DataError(
                f"Crops are either padded or resized. Got pad = {self.pad} and resize = {self.resize}; set one to 0."
            )
        if not 0 <= self.erasing <= 1:
            raise DataError(f"Augmentation.erasing must be a probability from 0 to 1. Got {self.erasing}.")


RENUMBER = "number the classes from 0, or correct `classes` or `num_classes` of the training set"
"""The remedy for labels out of range."""


def check_labels(smallest: int, largest: int, num_classes: int, name: str) -> None:
    """Raise a DataError unless the labels of the data set ``name`` are classes."""
    if smallest < 0 or largest >= num_classes:
        raise DataError(
            f"Labels must be from 0 to {num_classes - 1}, since there are {num_classes} classes. Got "
            f"{smallest} to {largest} from {name!r}; {RENUMBER}."
        )


def class_numbers(labels: Any) -> Tensor:
    """Return labels, or one label, as int64; a DataError unless they are whole numbers."""
    given = torch.as_tensor(labels)
    numbers = given.to(torch.int64)
    others = given[numbers != given]
    if len(others):
        raise DataError(
            f"A label must be the number of a class. Got {others[0].item():g}; number the classes from 0, or train in "
            "a loop of your own for other tasks than classification."
        )
    return numbers


@dataclass(frozen=True)
class ArrayDataset:
    """Images that fit in memory, in one tensor on the device that trains.

    They are kept as stored, one byte per value for CIFAR, and normalised when a batch is gathered. This takes a quarter
    of the memory and bandwidth of floats, and a compiled step fuses the arithmetic into the gather.
    """

    images: Tensor
    """(N, C, H, W), usually uint8."""
    labels: Tensor
    """(N,), int64."""
    mean: Tensor
    """(C, 1, 1), float32, in the units of `images`."""
    std: Tensor
    """(C, 1, 1), float32, in the units of `images`."""

    def __post_init__(self) -> None:
        if self.images.ndim != 4:
            raise DataError(f"Images must be (N, C, H, W). Got a tensor of shape {tuple(self.images.shape)}.")
        if self.labels.shape != self.images.shape[:1] or self.labels.dtype != torch.int64:
            raise DataError(
                f"Labels must be int64, one per image ({len(self.images)}). "
                f"Got {self.labels.dtype} of shape {tuple(self.labels.shape)}."
            )

    @classmethod
    def from_arrays(
        cls, images: Any, labels: Any, *, mean: Any = 0.0, std: Any = 1.0, device: torch.device | str = "cpu"
    ) -> ArrayDataset:
        """Make a data set from anything that torch.as_tensor takes: images (N, C, H, W) or (N, H, W), labels (N,).

        `mean` and `std` have one value per channel, or one for all.
        """
        try:
            pixels, numbers = torch.as_tensor(images), class_numbers(labels)
            constants = {name: torch.as_tensor(x, dtype=torch.float32) for name, x in (("mean", mean), ("std", std))}
        except DataError:
            raise
        except (TypeError, ValueError, RuntimeError) as error:
            kinds = ", ".join(type(given).__name__ for given in (images, labels, mean, std))
            raise DataError(
                f"Images, labels, `mean` and `std` must be arrays of numbers. Got {kinds}: {first_line(error)}; pass "
                "tensors or NumPy arrays."
            ) from error
        if pixels.ndim == 3:
            pixels = pixels.unsqueeze(1)
        channels = pixels.shape[1] if pixels.ndim == 4 else 0
        for name, values in constants.items():
            if values.ndim and values.shape != (channels,):
                raise DataError(f"`{name}` must have one value per channel ({channels}). Got {values.tolist()}.")
        if not bool((constants["std"] > 0).all()):
            raise DataError(f"`std` must be positive. Got {constants['std'].tolist()}; leave out constant channels.")
        columns = (values.expand(channels).clone().to(device).view(-1, 1, 1) for values in constants.values())
        return cls(pixels.to(device).contiguous(), numbers.to(device), *columns)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def device(self) -> torch.device:
        return self.images.device

    def to(self, device: torch.device | str) -> ArrayDataset:
        """Return the data set on a device."""
        return replace(self, **{key: getattr(self, key).to(device) for key in ("images", "labels", "mean", "std")})

    def subset(self, indices: Tensor, *, augment: bool = True) -> ArrayDataset:
        chosen = indices.to(self.device)
        return replace(self, images=self.images[chosen], labels=self.labels[chosen])

    def normalise(self, pixels: Tensor) -> Tensor:
        """Return the network's input, in float32, from stored values (..., C, H, W)."""
        return normalised(pixels, self.mean, self.std)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return normalised images, without augmentation, and labels."""
        return self.normalise(self.images.index_select(0, indices)), self.labels.index_select(0, indices)


@dataclass(frozen=True, kw_only=True)
class DataBundle:
    """A data set: its training and test images, and the usual augmentation."""

    name: str
    num_classes: int
    input_shape: tuple[int, int, int]
    """(channels, height, width) of the network's input."""
    train: ArrayDataset | LoadedDataset
    test: ArrayDataset | LoadedDataset
    augmentation: Augmentation = field(default_factory=Augmentation)
    """For images in memory; images in files have their own (see softprune.lab.data.images)."""
    class_names: tuple[str, ...] = ()
    holdout: ArrayDataset | LoadedDataset | None = None
    """Training images that are left out of training and evaluated after each epoch; None for the test images."""

    def __post_init__(self) -> None:
        for key, part in self._parts().items():
            if not isinstance(part, ArrayDataset | LoadedDataset):
                raise DataError(
                    f"`{key}` of a DataBundle must be a softprune.lab.data.ArrayDataset or LoadedDataset. Got a "
                    f"{type(part).__name__}; return the pair (train, test) for data sets of torch."
                )
            if not len(part):
                raise DataError(f"A data set must have training and test images. Got no `{key}` in {self.name!r}.")
            if not isinstance(part, ArrayDataset):
                continue
            smallest, largest = part.labels.aminmax()
            check_labels(int(smallest), int(largest), self.num_classes, self.name)
            is_cropped = key == "train" and self.augmentation.resize
            if not is_cropped and tuple(part.images.shape[1:]) != tuple(self.input_shape):
                raise DataError(
                    f"Images must have the shape `input_shape`, {tuple(self.input_shape)}. Got "
                    f"{tuple(part.images.shape[1:])} for `{key}` of {self.name!r}; correct one of them."
                )

    def _parts(self) -> dict[str, ArrayDataset | LoadedDataset]:
        parts = {"train": self.train, "test": self.test, "holdout": self.holdout}
        return {key: part for key, part in parts.items() if part is not None}

    def to(self, device: torch.device | str) -> DataBundle:
        """Return the data set with its images in memory, if it has any, on a device."""
        moved = {key: part.to(device) for key, part in self._parts().items() if isinstance(part, ArrayDataset)}
        return replace(self, **moved)  # type: ignore[arg-type]

    @classmethod
    def of_files(
        cls, name: str, parts: Iterable[EncodedDataset], class_names: tuple[str, ...], num_classes: int = 0
    ) -> DataBundle:
        """Return a set of training and test images in files; test images are not augmented.

        `num_classes` counts the classes if they have no names.
        """
        train, test = parts
        test.crops = replace(test.crops, augment=False)
        return cls(
            name=name,
            num_classes=len(class_names) or num_classes,
            input_shape=(3, train.crops.size, train.crops.size),
            train=train,
            test=test,
            class_names=class_names,
        )

    def with_holdout(self, count: int, seed: int) -> DataBundle:
        """Hold ``count`` training images out. Which ones depends only on ``seed`` and the number of images."""
        total = len(self.train)
        if not 0 < count < total:
            raise DataError(
                f"data.holdout must leave at least one of the {total:,} training images. Got {count}; lower it."
            )
        order = hashed_permutation(total, seed, _HOLDOUT, 0)
        held, kept = order[:count].sort().values, order[count:].sort().values
        return replace(self, train=self.train.subset(kept), holdout=self.train.subset(held, augment=False))

    def example(self, batch_size: int = 2, device: torch.device | str = "cpu") -> Tensor:
        """Return zeros of the shape of the network's input."""
        return torch.zeros(batch_size, *self.input_shape, device=device)


# Of the 1,437 training images, in units of the stored values 0 to 16.
_DIGITS_MEAN, _DIGITS_STD = 4.8838, 6.0174


def load_digits() -> DataBundle:
    """Return 1,437 training and 360 test images of 1 x 8 x 8, always split the same way."""
    with (
        resources.files("softprune.lab.data").joinpath("digits.npz").open("rb") as file,
        np.load(file, allow_pickle=False) as stored,
    ):
        images, labels = stored["images"], stored["labels"]
    index = np.arange(len(labels))
    # A fifth of them, but not every fifth one, since the file repeats the ten digits in order.
    test = (index + index // 10) % 5 == 0

    def part(chosen: np.ndarray) -> ArrayDataset:
        return ArrayDataset.from_arrays(images[chosen], labels[chosen], mean=_DIGITS_MEAN, std=_DIGITS_STD)

    return DataBundle(
        name="digits",
        num_classes=10,
        input_shape=(1, 8, 8),
        train=part(~test),
        test=part(test),
        augmentation=Augmentation(pad=1),  # no flips: a mirrored 2 is not a digit
        class_names=tuple("0123456789"),
    )
