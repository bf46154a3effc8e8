"""Data sets and batches: digits, CIFAR, images in folders, and data sets of the user's own.

Read `load.py` (`load_data`) first. Images in memory are tensors on the device, which also augments them (`arrays.py`);
the others are items of torch data sets that worker processes load (`files.py`).
"""

from softprune.lab.data.arrays import ArrayBatches as ArrayBatches
from softprune.lab.data.arrays import ArrayDataset as ArrayDataset
from softprune.lab.data.arrays import Augmentation as Augmentation
from softprune.lab.data.arrays import EpochSampler as EpochSampler
from softprune.lab.data.arrays import normalised as normalised
from softprune.lab.data.files import BatchLoader as BatchLoader
from softprune.lab.data.files import LoadedDataset as LoadedDataset
from softprune.lab.data.files import LoaderBatches as LoaderBatches
from softprune.lab.data.load import DATASETS as DATASETS
from softprune.lab.data.load import DataBundle as DataBundle
from softprune.lab.data.load import load_data as load_data
from softprune.lab.data.load import open_data as open_data
