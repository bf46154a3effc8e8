"""Decode images in files once, and keep them on the device."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from softprune.errors import DataError, first_line
from softprune.lab.data.datasets import ArrayDataset, Augmentation, DataBundle
from softprune.lab.data.images import BrokenImage, EncodedDataset, LoadedDataset, decode_image, image_tensor
from softprune.lab.data.loader import BatchLoader
from softprune.log import get_logger

logger = get_logger(__name__)

_ROWS = 250
"""Images that a loader process decodes at a time."""


class _WholeImages(LoadedDataset):
    """The images of a data set as they are stored, without crops. All must have the size of the first."""

    def __init__(self, dataset: EncodedDataset) -> None:
        self.dataset, self._shape = dataset, torch.Size()

    def __len__(self) -> int:
        return len(self.dataset)

    def source(self, index: int) -> str:
        return self.dataset.source(index)

    def load(self, index: int, draw: int) -> tuple[Tensor, int]:
        return image_tensor(decode_image(self.dataset.read(index))), int(self.dataset.labels[index])

    def __getitem__(self, item: tuple[int, int]) -> tuple[Tensor, int] | BrokenImage:
        loaded = super().__getitem__(item)
        if isinstance(loaded, BrokenImage):
            return loaded
        if not self._shape:
            first = loaded if item[0] == 0 else super().__getitem__((0, 0))
            if isinstance(first, BrokenImage):
                return first
            self._shape = first[0].shape
        if loaded[0].shape == self._shape:
            return loaded
        sizes = [f"{width} x {height}" for _, height, width in (loaded[0].shape, self._shape)]
        return BrokenImage(
            self.source(item[0]),
            f"it has {sizes[0]} pixels, the first one {sizes[1]}",
            rule="be of one size for data.in_memory",
            remedy="Resize the images to one size, or leave out data.in_memory.",
        )


def keep_in_memory(bundle: DataBundle, device: torch.device, workers: int) -> DataBundle:
    """Return images in files as a data set in memory, decoded by ``workers`` processes.

    Images that are not augmented are stored as the networks see them, the others whole: the device crops them.
    """
    train, augmentation = bundle.train, bundle.augmentation
    assert isinstance(train, EncodedDataset)
    if train.crops.randaugment:
        raise DataError(
            f"data.in_memory must go without data.randaugment, which needs Pillow's images. Got "
            f"data.randaugment = {train.crops.randaugment}; leave out one of the two."
        )
    if train.crops.augment:
        augmentation = Augmentation(resize=train.crops.size, flip=True, erasing=train.crops.erasing)
        train = _WholeImages(train)
    parts = {"train": train, "test": bundle.test, "holdout": bundle.holdout}
    decoded = {name: _decoded(part, device, workers) for name, part in parts.items() if isinstance(part, LoadedDataset)}
    return replace(bundle, augmentation=augmentation, **decoded)  # type: ignore[arg-type]


def _decoded(dataset: LoadedDataset, device: torch.device, workers: int) -> ArrayDataset:
    count = len(dataset)
    rows = F.pad(torch.arange(count), (0, -count % _ROWS)).view(-1, _ROWS)  # the first image fills the last row
    loader = BatchLoader(dataset, workers=min(workers, len(rows)))
    images, labels = torch.empty(0, dtype=dataset.dtype), torch.empty(rows.shape, dtype=torch.int64)
    for number, (pixels, classes) in enumerate(loader.batches(rows, torch.zeros_like(rows))):
        if not number:
            images = _space(count, pixels, device)
        part = images[number * _ROWS : (number + 1) * _ROWS]
        part.copy_(pixels[: len(part)])
        labels[number] = classes
    size = f"{images.nbytes / 1e6:,.0f} MB"
    logger.info("decoded %s images of %d x %d pixels, %s on %s", f"{count:,}", *images.shape[-2:], size, device)
    mean, std = dataset.constants(device)
    return ArrayDataset(images, labels.flatten()[:count].to(device), mean, std)


def _space(count: int, pixels: Tensor, device: torch.device) -> Tensor:
    """Return room for ``count`` images like ``pixels``."""
    try:
        return torch.empty(count, *pixels.shape[1:], dtype=pixels.dtype, device=device)
    except RuntimeError as error:
        size = count * pixels[0].nbytes
        raise DataError(
            f"data.in_memory needs memory for all images on {device}. Got {count:,} images of {size / 1e9:,.1f} GB: "
            f"{first_line(error)}. Leave it out, or resize the images."
        ) from error
