"""Data sets and batches: the embedded digits, CIFAR-10 and CIFAR-100, images in folders, and their batch pipeline.

Read `registry.py` (`load_data`) and `datasets.py` first. Images in memory are batched by `batches.py` on the device;
those in files are decoded by `images.py` in the worker processes of `loader.py`.
"""

from softprune.lab.data.batches import BatchSource as BatchSource
from softprune.lab.data.batches import EpochSampler as EpochSampler
from softprune.lab.data.batches import make_batches as make_batches
from softprune.lab.data.datasets import ArrayDataset as ArrayDataset
from softprune.lab.data.datasets import Augmentation as Augmentation
from softprune.lab.data.datasets import DataBundle as DataBundle
from softprune.lab.data.images import FolderDataset as FolderDataset
from softprune.lab.data.images import LoadedDataset as LoadedDataset
from softprune.lab.data.loader import BatchLoader as BatchLoader
from softprune.lab.data.registry import DATASETS as DATASETS
from softprune.lab.data.registry import DataEntry as DataEntry
from softprune.lab.data.registry import load_data as load_data
