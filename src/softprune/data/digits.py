"""The digits included in softprune: small enough to train on in seconds. DIGITS.md names their source."""

from importlib import resources

import numpy as np
import torch

from softprune.data.datasets import ArrayDataset, Augmentation, DataBundle

# Of the 1,437 training images, in units of the stored values 0 to 16.
MEAN, STD = 4.8838, 6.0174


def load_digits(device: torch.device | str = "cpu") -> DataBundle:
    """Return 1,437 training and 360 test images of 1 x 8 x 8, always split the same way."""
    with (
        resources.files("softprune.data").joinpath("digits.npz").open("rb") as file,
        np.load(file, allow_pickle=False) as stored,
    ):
        images, labels = stored["images"], stored["labels"]
    index = np.arange(len(labels))
    # A fifth of them, but not every fifth one, since the file repeats the ten digits in order.
    test = (index + index // 10) % 5 == 0

    def part(chosen: np.ndarray) -> ArrayDataset:
        return ArrayDataset.from_arrays(images[chosen], labels[chosen], mean=(MEAN,), std=(STD,), device=device)

    return DataBundle(
        name="digits",
        num_classes=10,
        input_shape=(1, 8, 8),
        train=part(~test),
        test=part(test),
        augmentation=Augmentation(pad=1),  # no flips: a mirrored 2 is not a digit
        class_names=tuple("0123456789"),
    )
