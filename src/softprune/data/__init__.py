"""Data sets and batches: the embedded digits, CIFAR-10 and CIFAR-100, images in folders, and their batch pipeline."""

from softprune.data.batches import BatchSource, EpochSampler, make_batches
from softprune.data.datasets import ArrayDataset, Augmentation, DataBundle
from softprune.data.images import FolderDataset, LoadedDataset
from softprune.data.loader import BatchLoader
from softprune.data.registry import DATASETS, DataEntry, load_data

__all__ = [
    "DATASETS",
    "ArrayDataset",
    "Augmentation",
    "BatchLoader",
    "BatchSource",
    "DataBundle",
    "DataEntry",
    "EpochSampler",
    "FolderDataset",
    "LoadedDataset",
    "load_data",
    "make_batches",
]
