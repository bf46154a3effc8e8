"""Load a data set by name, as a bundle of training, test and held-out images."""

import copy
import os
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from softprune.errors import DataError, first_few, import_optional
from softprune.lab.config.settings import DataConfig
from softprune.lab.data.arrays import ArrayBatches, ArrayDataset, Augmentation, EpochSampler
from softprune.lab.data.cifar import CIFAR10, CIFAR100, Cifar, read_cifar
from softprune.lab.data.files import IMAGENET_MEAN, BatchLoader, LoadedDataset, LoaderBatches, keep_on_device
from softprune.lab.factories import call_factory, check_name
from softprune.rng import hashed_permutation

# Used in place of a site number in the hash, and far above all of them.
_HOLDOUT = 0x686F6C64

DATASETS = ("digits", "cifar10", "cifar100", "folder")


@dataclass(frozen=True, kw_only=True)
class DataBundle:
    """A data set: training images, test images, and the augmentation of images in memory."""

    train: ArrayDataset | LoadedDataset
    test: ArrayDataset | LoadedDataset
    num_classes: int
    class_names: tuple[str, ...] = ()
    augmentation: Augmentation = field(default_factory=Augmentation)
    """Augmentation of images in memory. A LoadedDataset augments its own images."""
    holdout: ArrayDataset | LoadedDataset | None = None
    """Held-out training images, on which each epoch is evaluated; if None, epochs are evaluated on the test images."""

    def __post_init__(self) -> None:
        for key, part in self.parts().items():
            is_cropped = key == "train" and self.augmentation.resize
            if part.shape != self.input_shape and not is_cropped:
                raise DataError(
                    f"All images must have the same shape. Got {part.shape} for `{key}` and {self.input_shape} for "
                    "`test`; resize them."
                )
            if isinstance(part, ArrayDataset):
                smallest, largest = map(int, part.labels.aminmax())
                if smallest < 0 or largest >= self.num_classes:
                    raise DataError(
                        f"Labels must be from 0 to {self.num_classes - 1}, since there are {self.num_classes} classes. "
                        f"Got {smallest} to {largest} in `{key}`; number the classes from 0, or correct `classes` or "
                        "`num_classes` of the training set."
                    )

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape (C, H, W) of the network's input."""
        return self.test.shape

    def parts(self) -> dict[str, ArrayDataset | LoadedDataset]:
        """Return the existing sets of images by name."""
        parts = {"train": self.train, "test": self.test, "holdout": self.holdout}
        return {key: part for key, part in parts.items() if part is not None}

    def with_holdout(self, count: int, seed: int) -> "DataBundle":
        """Hold out ``count`` training images. The choice depends only on ``seed`` and the number of images."""
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
        """Return zeros with the shape of a batch of inputs, (batch_size, C, H, W)."""
        return torch.zeros(batch_size, *self.input_shape, device=device)


def load_data(
    name: str,
    root: str | os.PathLike[str] | None = None,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
    **settings: Any,
) -> DataBundle:
    """Load the data set `name`: one of DATASETS, or your own `module:factory` (docs/data.md).

    `root` is the folder with the files (./data by default for CIFAR), `device` holds data sets in memory, and `seed`
    is for augmentation and held-out images. `settings` are further settings of [data], such as ``image_size``.
    """
    return open_data(DataConfig(name=name, dir=str(root or ""), **settings), seed, device)


def open_data(config: DataConfig, seed: int, device: torch.device | str) -> DataBundle:
    """Load the data set of a recipe."""
    name = config.name
    check_name("data.name", name, DATASETS, DataError, options=config.options)
    root = Path(config.dir).expanduser() if config.dir else None
    if (config.erasing or config.in_memory) and name not in DATASETS:
        raise DataError(
            f"data.erasing and data.in_memory are for {', '.join(DATASETS)}. Got data.name = {name!r}; remove them."
        )
    if name == "digits":
        bundle = _load_digits()
    elif name == "folder":
        bundle = _load_folder(root, config, seed)
    elif name in DATASETS:
        bundle = load_cifar(CIFAR10 if name == "cifar10" else CIFAR100, root or Path("data"))
    else:
        offered = {"root": root, "image_size": config.image_size, "seed": seed, "augment": config.augment}
        bundle = _own(name, call_factory(name, "data.name", config.options, offered, DataError), seed)
    if config.erasing:
        bundle = replace(bundle, augmentation=replace(bundle.augmentation, erasing=config.erasing))
    if not config.augment:
        bundle = replace(bundle, augmentation=Augmentation())
    if config.holdout:
        bundle = bundle.with_holdout(config.holdout, seed)
    moved: dict[str, Any] = {}
    for key, part in bundle.parts().items():
        if isinstance(part, ArrayDataset):
            moved[key] = part.to(device)
        elif config.in_memory:
            moved[key] = keep_on_device(part, device, config.workers)
    return replace(bundle, **moved)


# Over the 1,437 training images, in units of the stored values 0 to 16.
_DIGITS_MEAN, _DIGITS_STD = 4.8838, 6.0174


def _load_digits() -> DataBundle:
    """Return 1,437 training and 360 test images (1, 8, 8), always with the same split."""
    with (
        resources.files("softprune.lab.data").joinpath("digits.npz").open("rb") as file,
        np.load(file, allow_pickle=False) as stored,
    ):
        images, labels = stored["images"], stored["labels"]
    index = np.arange(len(labels))
    # A fifth of the images, but not every fifth one, since the file repeats the ten digits in order.
    test = (index + index // 10) % 5 == 0
    parts = {
        key: ArrayDataset.from_arrays(images[chosen], labels[chosen], mean=_DIGITS_MEAN, std=_DIGITS_STD)
        for key, chosen in {"train": ~test, "test": test}.items()
    }
    crops = Augmentation(pad=1)  # no flips: a mirrored 2 is not a digit
    return DataBundle(**parts, num_classes=10, class_names=tuple("0123456789"), augmentation=crops)


def load_cifar(cifar: Cifar, root: Path) -> DataBundle:
    """Return CIFAR-10 or CIFAR-100 from the official files in ``root``."""
    *parts, names = read_cifar(cifar, root)
    train, test = (ArrayDataset.from_arrays(*part, mean=cifar.mean, std=cifar.std) for part in parts)
    crops = Augmentation(pad=4, flip=True)
    return DataBundle(train=train, test=test, num_classes=len(names), class_names=names, augmentation=crops)


def read_image(path: str) -> Any:
    """Decode an image file, with these decoders only: Pillow's EPS decoder runs an external program."""
    from PIL import Image

    with Image.open(path, formats=("JPEG", "PNG", "BMP", "WEBP", "PPM", "TIFF")) as image:
        return image.convert("RGB")


def _load_folder(root: Path | None, config: DataConfig, seed: int) -> DataBundle:
    """Return training and test images of a folder in the ImageNet layout.

    With ``in_memory``, augmented training images are cropped later, on the device.
    """
    if root is None:
        raise DataError('The data set "folder" needs the path of its folder. Got none; pass --data-dir (`root`).')
    import_optional("torchvision", "data.name = folder", error=DataError)
    from torchvision.datasets.folder import IMG_EXTENSIONS, ImageFolder
    from torchvision.transforms import v2

    def is_image(path: str) -> bool:  # archives made on macOS contain hidden files "._NAME.jpg"
        return path.lower().endswith(IMG_EXTENSIONS) and not os.path.basename(path).startswith(".")

    size, erasing = config.image_size, config.erasing
    centre = v2.Compose([v2.Resize(round(size * 256 / 224)), v2.CenterCrop(size), v2.PILToTensor()])
    try:
        plain, test = (
            ImageFolder(str(root / part), centre, loader=read_image, is_valid_file=is_image)
            for part in ("train", "val")
        )
    except (OSError, ValueError) as error:  # a ValueError if the path has a NUL byte
        raise DataError(
            f'The data set "folder" needs {root}/train and {root}/val, each with a folder of images per class '
            f"({', '.join(IMG_EXTENSIONS)}). Got {str(error).strip()}"
        ) from error
    if plain.classes != test.classes:
        differing = sorted(set(plain.classes) ^ set(test.classes))
        raise DataError(
            f"{root}/train and {root}/val must have the same class folders. Got {first_few(differing)} in only one of "
            "them; add images of each class to both, or remove the class."
        )
    train = plain
    if config.augment:
        train = copy.copy(plain)  # shares the list of files
        erase = [v2.RandomErasing(erasing, value=[round(value) for value in IMAGENET_MEAN])] if erasing else []
        crop = [v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), v2.PILToTensor(), *erase]
        train.transform = v2.PILToTensor() if config.in_memory else v2.Compose(crop)
    classes = tuple(plain.classes)
    return DataBundle(
        train=LoadedDataset(train, num_classes=len(classes), seed=seed, plain=plain),
        test=LoadedDataset(test, num_classes=len(classes), seed=seed),
        num_classes=len(classes),
        class_names=classes,
        augmentation=Augmentation(resize=size, flip=True) if config.in_memory else Augmentation(),
    )


def _own(name: str, data: Any, seed: int) -> DataBundle:
    """Convert the result of a user's factory, (train, test) or a bundle, to a bundle."""
    if isinstance(data, DataBundle):
        return data
    if not isinstance(data, tuple | list) or len(data) != 2:  # random_split returns a list
        raise DataError(
            "The factory of data.name must return two data sets (train, test) or a softprune.lab.data.DataBundle. "
            f"Got a {type(data).__name__} from {name!r}."
        )
    whole = data[0]
    while isinstance(whole, Subset) and not {"classes", "num_classes", "targets"} & vars(whole).keys():
        whole = whole.dataset  # the class names are on the full data set
    names = tuple(map(str, getattr(whole, "classes", ())))
    labels = whole.labels if isinstance(whole, ArrayDataset) else getattr(whole, "targets", ())
    count = len(names) or getattr(whole, "num_classes", 0) or (1 + int(max(labels)) if len(labels) else 0)
    if not isinstance(count, int) or count < 2:
        raise DataError(
            f"A data set must have at least 2 classes. Got {count!r} from `classes`, `num_classes` or "
            f"`targets` of {name!r}; set one of them on the training set, or return a DataBundle."
        )
    train, test = (
        part if isinstance(part, ArrayDataset | LoadedDataset) else LoadedDataset(part, num_classes=count, seed=seed)
        for part in data
    )
    return DataBundle(train=train, test=test, num_classes=count, class_names=names)
