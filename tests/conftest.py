"""What every test needs before it is collected."""

import sys
from pathlib import Path

import torch

# pytest's importlib mode puts no folder on the path. Tests of every room read the table of topologies, and the
# benchmarks' scripts are tested, too.
_HERE = Path(__file__).parent
sys.path[:0] = [str(_HERE), str(_HERE.parent / "benchmarks")]

from vision import declare_operators  # noqa: E402

declare_operators()

# The tests' tensors are small and the machine is shared, by parallel workers among others: more threads would
# spend their time waiting for each other.
torch.set_num_threads(1)
