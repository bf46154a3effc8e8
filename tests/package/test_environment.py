"""The test environment itself: what conftest arranges must hold where the tests run."""

import pytest


def test_torchvision_and_timm_import_beside_any_torch() -> None:
    torchvision = pytest.importorskip("torchvision", reason='the "vision" extra is not installed')
    timm = pytest.importorskip("timm", reason='the "timm" extra is not installed')
    assert torchvision.models.resnet18().fc.out_features == 1000
    assert "resnet18" in timm.list_models("resnet18")
