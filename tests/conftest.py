"""What every test needs before it is collected."""

import importlib.util
import sys
from pathlib import Path

import torch

# pytest's importlib mode puts no test folder on the path; tests of every room read the table of topologies.
sys.path.insert(0, str(Path(__file__).parent))


def _torchvision_library_loads() -> bool:
    """Whether torchvision's C++ operators can be loaded into this torch (True without torchvision)."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return True
    try:
        for library in Path(spec.origin).parent.glob("_C*.so"):
            torch.ops.load_library(library)
    except OSError:
        return False
    return True


# torchvision's x86 wheels on PyPI are built for CUDA. Beside a CPU-only torch their library does not load,
# and the import then fails where it describes operators that nobody defined ("operator torchvision::nms does
# not exist"). Declaring the schemas is enough for the import; no test calls the operators. The Library must
# stay alive: when it is collected, the schemas go with it. A torchvision that fits its torch must not meet
# these schemas, since they would clash with its own.
if torch.version.cuda is None and not _torchvision_library_loads():
    _torchvision_schemas = torch.library.Library("torchvision", "FRAGMENT")
    for _operator in ("nms", "qnms"):  # newer torchvisions have the quantised one too
        _torchvision_schemas.define(f"{_operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

# The tests' tensors are small and the machine is shared, by parallel workers among others: more threads would
# spend their time waiting for each other.
torch.set_num_threads(1)
