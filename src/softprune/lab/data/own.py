"""Data sets of the user's own: a factory that returns torch data sets, or a DataBundle."""

import random
from collections.abc import Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from softprune.errors import DataError
from softprune.factories import call_factory
from softprune.lab.data.datasets import RENUMBER, ArrayDataset, DataBundle, check_labels, class_numbers
from softprune.lab.data.images import LoadedDataset, byte_constants, image_tensor, seeded


class TorchDataset(LoadedDataset):
    """Adapts a map-style torch data set whose items are (image, label).

    An image is a tensor (C, H, W), an array (H, W, C) or a PIL image. Bytes are normalised with ImageNet's constants if
    they have three channels, else to [-1, 1]; floats are used as they are. Random transforms are seeded by (seed,
    draw), so that a resumed run sees the same images.
    """

    num_classes = 0
    """Labels must be below this, once it is known."""
    input_shape: tuple[int, ...] = ()
    """Shape of the first image, once it is known, and of all others."""

    def __init__(self, dataset: Any, *, seed: int = 0) -> None:
        self.dataset, self.seed = dataset, seed
        image = self.load(0, 0)[0]
        self.input_shape, self.dtype = tuple(image.shape), image.dtype
        channels = len(image)
        self.mean, self.std = byte_constants(channels)
        if self.dtype != torch.uint8:
            self.mean, self.std = (0.0,) * channels, (1.0,) * channels

    def __len__(self) -> int:
        return len(self.dataset)

    def source(self, index: int) -> str:
        return f"item {index} of {type(self.dataset).__name__}"

    def load(self, index: int, draw: int) -> tuple[Tensor, int]:
        with seeded(random.Random((self.seed << 64) + draw).getrandbits(63)):
            item = self.dataset[index]
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise DataError(f"An item of a data set must be (image, label). Got {_described(item)}.")
        image, label = item
        if not isinstance(image, Tensor):
            if getattr(image, "mode", "") == "P":
                raise DataError(
                    "A PIL image must have the values of its channels. Got mode P, numbers of colours; return "
                    'image.convert("RGB").'
                )
            image = image_tensor(image)
        if image.ndim != 3 or (image.dtype != torch.uint8 and not image.is_floating_point()):
            raise DataError(
                "An image must be a tensor (C, H, W) or an array (H, W, C) of bytes or floats, or a PIL image. "
                f"Got {image.dtype} of shape {tuple(image.shape)}."
            )
        if self.input_shape and (image.shape, image.dtype) != (self.input_shape, self.dtype):
            raise DataError(
                "The images of a data set must all have one shape and type. Got "
                f"{_typed(image.shape, image.dtype)}, and {_typed(self.input_shape, self.dtype)} of the first one; "
                "resize and convert them in the data set's transform."
            )
        try:
            number = int(label if isinstance(label, int | str) else class_numbers(label))
        except DataError:
            raise
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(
                f"A label must be the number of a class. Got {_described(label)}; for other tasks than classification "
                "train in a loop of your own."
            ) from error
        if self.num_classes and not 0 <= number < self.num_classes:
            raise DataError(
                f"A label must be from 0 to {self.num_classes - 1}, since there are {self.num_classes} classes. "
                f"Got {number}; {RENUMBER}."
            )
        return image, number


def load_own(
    name: str, options: Mapping[str, Any], *, root: Path | None, image_size: int, seed: int, augment: bool
) -> DataBundle:
    """Call the factory ``name`` and return its data as a bundle.

    The factory gets ``options``, and those of the keywords `root`, `image_size`, `seed` and `augment` that it has. It
    returns a pair (train, test) of torch data sets or of ArrayDatasets, or a DataBundle.
    """
    offered = {"root": root, "image_size": image_size, "seed": seed, "augment": augment}
    data = call_factory(name, "data.name", options, offered, DataError)
    if isinstance(data, DataBundle):
        return data
    if not isinstance(data, tuple | list) or len(data) != 2:  # random_split returns a list
        raise DataError(
            "The factory of data.name must return (train, test), two data sets, or a softprune.lab.data.DataBundle. "
            f"Got {_described(data)} from {name!r}."
        )
    return _bundle(name, data, seed)


def _bundle(name: str, data: Sequence[Any], seed: int) -> DataBundle:
    parts = []
    for part in data:
        if not isinstance(part, ArrayDataset | LoadedDataset):
            try:
                part = TorchDataset(part, seed=seed)
            except (TypeError, ValueError, IndexError, KeyError, NotImplementedError, DataError) as error:
                raise DataError(
                    "A data set must have a length and items (image, label), the first of which can be loaded; it is "
                    f"no DataLoader and no IterableDataset. Got {type(part).__name__} from {name!r}: {error}"
                ) from error
        parts.append(part)
    train, test = parts
    shapes = [_shape(part) for part in parts]
    if shapes[0] != shapes[1]:
        raise DataError(
            f"Training and test images must have one shape. Got {shapes[0]} and {shapes[1]} from {name!r}; resize them "
            "in the data set's transform."
        )
    whole = [_whole(part) for part in data]
    classes = tuple(map(str, getattr(whole[0], "classes", ())))
    count = len(classes) or getattr(whole[0], "num_classes", 0) or _label_range(whole[0])[1] + 1
    if not isinstance(count, Integral) or count < 2:
        raise DataError(
            f"A data set must say how many classes it has, at least 2. Got {count!r} from `classes`, `num_classes` or "
            f"`targets` of {name!r}; set one of them on the training set, or return a DataBundle."
        )
    count = int(count)
    for part, given in zip(parts, whole, strict=True):
        if isinstance(part, TorchDataset):
            part.num_classes = count
        if getattr(given, "target_transform", None) is None:
            check_labels(*_label_range(given), count, name)
    return DataBundle(name=name, num_classes=count, input_shape=shapes[0], train=train, test=test, class_names=classes)


def _whole(data: Any) -> Any:
    """Return the data set that a subset or a concatenation is of, which knows the classes."""
    while isinstance(data, Subset | ConcatDataset) and not {"classes", "num_classes", "targets"} & vars(data).keys():
        data = data.dataset if isinstance(data, Subset) else data.datasets[0]
    return data


def _described(value: Any) -> str:
    """Return type and size of what a factory or a data set has returned."""
    if isinstance(value, dict):
        return f"a dict with the keys {', '.join(map(str, value))}"
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}{f' of {len(value)}' if isinstance(value, tuple | list) else ''}"


def _typed(shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"{'x'.join(map(str, shape))} of {str(dtype).removeprefix('torch.')}"


def _shape(part: ArrayDataset | LoadedDataset) -> tuple[int, int, int]:
    shape: Sequence[int]
    if isinstance(part, ArrayDataset):
        shape = part.images.shape[1:]
    else:
        shape = part.input_shape if isinstance(part, TorchDataset) else part.load(0, 0)[0].shape
    channels, height, width = shape
    return channels, height, width


def _label_range(data: Any) -> tuple[int, int]:
    """Return the smallest and the largest label, as far as they can be told without loading images."""
    known = data.tensors[-1] if isinstance(data, TensorDataset) else ()
    labels = data.labels if isinstance(data, ArrayDataset) else getattr(data, "targets", known)
    try:
        known = torch.as_tensor(labels)
        return (int(known.min()), int(known.max())) if known.numel() else (0, -1)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # annotations of some other kind
        return 0, -1
