"""torchvision and timm for benchmarks and tests, beside whatever torch is installed."""

import importlib.util
import logging
from pathlib import Path
from types import ModuleType

import torch

_schemas: list[torch.library.Library] = []


def declare_operators() -> None:
    """Make `import torchvision` work beside a torch that its compiled operators do not fit.

    Most of torchvision's wheels on PyPI are built for CUDA. Beside a CPU-only torch their library does not load and the
    import fails where it describes undefined operators; declaring their schemas is enough, since nothing here
    calls them. A torchvision that fits must not meet these schemas: they would clash with its own.
    """
    if not _schemas and torch.version.cuda is None and not _library_loads():
        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):  # newer torchvisions have the quantised one too
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _schemas.append(library)  # the schemas live as long as their Library


def import_torchvision() -> ModuleType:
    """torchvision, beside whatever torch is installed."""
    declare_operators()
    import torchvision

    return torchvision


def import_timm() -> ModuleType:
    """timm, which needs torchvision."""
    import_torchvision()
    import timm

    logging.getLogger("timm").setLevel(logging.ERROR)
    return timm


def _library_loads() -> bool:
    """Whether torchvision's operators can be loaded into this torch (True without torchvision)."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return True
    try:
        for library in Path(spec.origin).parent.glob("_C*.so"):
            torch.ops.load_library(library)
    except OSError:
        return False
    return True
