"""The test environment itself: what conftest arranges must hold where the tests run."""

import subprocess
import sys
from pathlib import Path

import pytest


def test_torchvision_and_timm_import_beside_any_torch() -> None:
    torchvision = pytest.importorskip("torchvision", reason='the "vision" extra is not installed')
    timm = pytest.importorskip("timm", reason='the "timm" extra is not installed')
    assert torchvision.models.resnet18().fc.out_features == 1000
    assert "resnet18" in timm.list_models("resnet18")


def test_trio_may_be_imported_before_hypothesis() -> None:
    """As transformers does: trio then hands its generator to a hypothesis that is imported after the collection."""
    pytest.importorskip("trio", reason="trio, which selenium brings, is not installed")
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "trio", "tests/package/test_pins.py"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
