"""Import paths, threads and the fixtures that tests of several packages share."""

import dataclasses
import functools
import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

# pytest's importlib mode puts no folder on the path. Helpers of the tests are in tests/support.
_HERE = Path(__file__).parent
_SUPPORT = _HERE / "support"
sys.path[:0] = [str(_SUPPORT), str(_HERE.parent / "benchmarks")]

from slow_tests import SlowTests  # noqa: E402

if TYPE_CHECKING:
    from softprune.lab.config.settings import RunConfig


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that records CPU times."""
    parser.addoption("--cpu-times", metavar="FILE", help="append the CPU seconds of every test to FILE")


def pytest_configure(config: pytest.Config) -> None:
    """Register the list of slow tests."""
    config.pluginmanager.register(SlowTests(config.getoption("--cpu-times")))


def pytest_collection() -> None:
    """Prepare torch where tests are collected, which the controller of pytest-xdist does not: it starts at once."""
    import torch
    from vision import declare_operators

    declare_operators()
    # The tensors of the tests are small and pytest-xdist runs several workers: more threads would only contend.
    torch.set_num_threads(1)
    # oneDNN compiles a kernel for every new shape: most of the time of a small convolution.
    torch.backends.mkldnn.enabled = False


def pytest_collection_finish() -> None:
    """Spare the garbage collector what was imported, and run it less often: it took a tenth of the tests' time."""
    # It warns of random generators without a referrer, and the garbage collector does not list frozen ones.
    import hypothesis  # noqa: F401

    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that need a GPU where there is none."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU")


@pytest.fixture(autouse=True)
def one_table_of_operators() -> None:
    """Keep torch's tables of operators, which every export makes again: most of a small network's export."""
    module = sys.modules.get("torch.onnx._internal.exporter._registration")
    registry = getattr(module, "ONNXRegistry", None)
    if registry is not None and isinstance(vars(registry).get("from_torchlib"), classmethod):
        registry.from_torchlib = staticmethod(functools.cache(registry.from_torchlib))
    for name in ("torch.export.exported_program", "torch.export.decomp_utils"):
        collect = getattr(sys.modules.get(name), "_collect_all_valid_cia_ops", None)
        if collect is not None and not hasattr(collect, "cache_info"):
            sys.modules[name]._collect_all_valid_cia_ops = functools.cache(collect)  # type: ignore[attr-defined]


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Iterator[Callable[..., RunConfig]]":
    """Return a function that makes the configuration of a tiny run, in a folder that has the network's module."""
    import torch
    from tiny import tiny_config

    threads = torch.get_num_threads()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("softprune.lab.train.evaluate.LATENCY_SECONDS", 1e-9)
    yield lambda *overrides: tiny_config(tmp_path, *overrides)
    torch.set_num_threads(threads)


@pytest.fixture
def onednn() -> Iterator[None]:
    """Compute with oneDNN, as users do: its kernels are others, and its LSTM layers are operators of its own."""
    import torch

    torch.backends.mkldnn.enabled = True
    yield
    torch.backends.mkldnn.enabled = False


@pytest.fixture
def same_operators() -> Iterator[None]:
    """Forget the operators that a test adds."""
    from softprune.graph.operators import OPERATORS

    before = dict(OPERATORS)
    yield
    OPERATORS.clear()
    OPERATORS.update(before)


@pytest.fixture
def forking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the environment of a fork server, which imports the modules of its children from PYTHONPATH."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", f"{_HERE.parent / 'src'}{os.pathsep}{_SUPPORT}")


@pytest.fixture
def smaller_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `digits_net` and torchvision's ResNet-18 have a quarter of their channels, and half of their layers.

    For documents and examples, which name these networks, and whose code is what is tested.
    """
    from torch import nn

    from softprune.models import REGISTRY, VGG

    def digits_net(num_classes: int = 10) -> VGG:
        return VGG([[8], [16], [32]], num_classes, in_channels=1)

    monkeypatch.setattr("softprune.lab.train.evaluate.LATENCY_SECONDS", 1e-9)
    monkeypatch.setitem(REGISTRY, "digits_net", dataclasses.replace(REGISTRY["digits_net"], build=digits_net))
    try:
        from torchvision.models import resnet
    except ImportError:
        return

    class Narrow(resnet.ResNet):
        def _make_layer(self, block: Any, planes: int, *rest: Any, **options: Any) -> nn.Sequential:
            return super()._make_layer(block, planes // 4, *rest, **options)

    def resnet18(*, weights: None = None, num_classes: int = 1000) -> "resnet.ResNet":
        model = Narrow(resnet.BasicBlock, [1, 1, 1, 1])
        model.fc = nn.Linear(128, num_classes)
        return model

    monkeypatch.setattr("torchvision.models.resnet18", resnet18)
