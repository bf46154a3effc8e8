"""Loads the scripts of benchmarks/gpu, which are no package."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

GPU = Path(__file__).parents[2] / "benchmarks" / "gpu"


def script(name: str) -> ModuleType:
    """Return benchmarks/gpu/NAME.py as a module."""
    spec = importlib.util.spec_from_file_location(f"gpu_{name}", GPU / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module
