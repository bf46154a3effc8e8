"""Data sets and batches: digits, CIFAR, image folders, and user-defined data sets.

Start with `load_data` in `load.py`. Data sets in memory are tensors on the device, which also augments them
(`arrays.py`); all others are map-style torch data sets loaded by worker processes (`files.py`).
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
