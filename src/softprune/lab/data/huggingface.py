"""Image classification sets of the Hugging Face Hub, or saved with `datasets`, through the package datasets."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from softprune.errors import DataError, first_line
from softprune.factories import import_optional
from softprune.lab.data.datasets import DataBundle
from softprune.lab.data.images import Crops, EncodedDataset

_TEST_SPLITS = ("validation", "val", "valid", "test")
"""Names of the test images, best first: the split `test` of some sets has no labels."""


class HubDataset(EncodedDataset):
    """One split. Arrow files are mapped into memory, and an image is decoded when its batch is due."""

    def __init__(self, table: Any, column: str, labels: Tensor, crops: Crops) -> None:
        super().__init__(np.arange(len(labels)), labels, crops)
        self._table, self._column = table, column

    def read(self, index: int) -> bytes:
        image = self._table[int(self.rows[index])][self._column]
        return image["bytes"] if image["bytes"] is not None else Path(image["path"]).read_bytes()

    def source(self, index: int) -> str:
        return f"row {self.rows[index]}, column {self._column!r}"


def load_huggingface(repo: str, crops: Crops, cache: Path | None, *, download: bool) -> DataBundle:
    """Return the set `repo`: a name on the Hub such as "uoft-cs/cifar10", or a folder that `save_to_disk` wrote.

    Its features must have one image column and one ClassLabel column. `datasets` stores downloads in `cache`.
    """
    datasets = import_optional("datasets", 'data.name = "huggingface"', error=DataError)
    if not repo:
        raise DataError('data.name = "huggingface" needs data.repo, such as "uoft-cs/cifar10". Got none.')
    try:
        if (Path(repo).expanduser() / "dataset_dict.json").is_file():
            splits = datasets.load_from_disk(str(Path(repo).expanduser()))
        else:
            splits = datasets.load_dataset(
                repo,
                cache_dir=None if cache is None else str(cache),
                download_config=datasets.DownloadConfig(local_files_only=not download),
            )
    except Exception as error:  # of the network, the Hub, or files in any format
        raise DataError(
            f"data.repo must be an image set of the Hugging Face Hub, or a folder that save_to_disk wrote. Got "
            f"{repo!r}: {first_line(error)}. Check the name, and set data.download = true to fetch it."
        ) from error
    test = next((name for name in _TEST_SPLITS if name in splits), None)
    if "train" not in splits or test is None:
        raise DataError(
            f"A data set must have the split train, and one of {', '.join(_TEST_SPLITS)}. Got {', '.join(splits)} in "
            f"{repo!r}."
        )
    image, label = _columns(datasets, splits["train"].features, repo)
    parts = []
    for name in ("train", test):
        table = splits[name].cast_column(image, datasets.Image(decode=False))
        labels = torch.tensor([-1 if each is None else each for each in table[label][:]], dtype=torch.int64)
        if not len(labels) or int(labels.min()) < 0:
            raise DataError(f"Every image must have a label. Got the split {name} of {repo!r} without them.")
        parts.append(HubDataset(table.select_columns([image]), image, labels, crops))
    return DataBundle.of_files("huggingface", parts, tuple(splits["train"].features[label].names))


def _columns(datasets: Any, features: Any, repo: str) -> tuple[str, str]:
    """Return the columns of images and labels. Of several label columns, "label" or "fine_label" is taken."""
    images = [name for name, kind in features.items() if isinstance(kind, datasets.Image)]
    labels = [name for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
    preferred = [name for name in ("label", "fine_label") if name in labels]
    if len(images) != 1 or not (len(labels) == 1 or preferred):
        raise DataError(
            f"A data set must have one column of images and one of class labels. Got {repo!r} with the columns "
            f"{', '.join(features)}; write a factory of your own (data.name = 'module:factory') for it."
        )
    return images[0], (preferred or labels)[0]
