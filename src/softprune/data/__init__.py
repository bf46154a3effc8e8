"""Data sets: the embedded digits, CIFAR-10 and CIFAR-100, and images in folders."""

from softprune.data.bundle import ArrayDataset, Augmentation, DataBundle
from softprune.data.folder import FolderDataset
from softprune.data.loader import FolderLoader
from softprune.data.registry import DATASETS, DataEntry, load_data

__all__ = [
    "DATASETS",
    "ArrayDataset",
    "Augmentation",
    "DataBundle",
    "DataEntry",
    "FolderDataset",
    "FolderLoader",
    "load_data",
]
