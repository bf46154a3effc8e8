"""Data sets and batches: digits, CIFAR, images in folders, and data sets of the user's own.

Read `load.py` (`load_data`) first. Images in memory are tensors on the device, which also augments them (`arrays.py`);
the others are items of torch data sets that worker processes load (`files.py`). `batches.py` orders both.
"""

from softprune.lab.data.arrays import ArrayDataset as ArrayDataset
from softprune.lab.data.arrays import Augmentation as Augmentation
from softprune.lab.data.arrays import Mixing as Mixing
from softprune.lab.data.arrays import mixed as mixed
from softprune.lab.data.arrays import normalised as normalised
from softprune.lab.data.batches import BatchSource as BatchSource
from softprune.lab.data.batches import EpochSampler as EpochSampler
from softprune.lab.data.batches import make_batches as make_batches
from softprune.lab.data.files import BatchLoader as BatchLoader
from softprune.lab.data.files import LoadedDataset as LoadedDataset
from softprune.lab.data.load import DATASETS as DATASETS
from softprune.lab.data.load import DataBundle as DataBundle
from softprune.lab.data.load import load_data as load_data
