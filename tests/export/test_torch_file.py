"""torch.export files compute what the compact network computes, at any batch size."""

from pathlib import Path

import pytest
import torch
from export_networks import compacted
from torch import Tensor, nn

from softprune.errors import ConfigError, ModelError, VerificationError
from softprune.export import to_torch_export


@pytest.mark.parametrize(("name", "fold"), [("residual", False), ("void", False), ("dense", True)])
def test_loads_and_runs_without_the_class(name: str, fold: bool, tmp_path: Path) -> None:
    _, compact, example = compacted(name)
    report = to_torch_export(compact, example, tmp_path / "small.pt2", fold_bn=fold)
    assert report.bytes == (tmp_path / "small.pt2").stat().st_size
    assert (report.folded > 0) == fold
    loaded = torch.export.load(report.path).module()
    batch = torch.randn(7, *example.shape[1:])
    with torch.no_grad():
        expected, got = compact(batch), loaded(batch)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


class FixedBatch(nn.Module):
    """Reshapes to a batch of two, whatever comes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.reshape(2, 8))


@pytest.mark.quick  # the smoke test of the package
def test_a_network_with_a_fixed_batch_says_so_and_exports_without_a_free_one(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="dynamic_batch=False"):
        to_torch_export(FixedBatch(), torch.randn(2, 8), tmp_path / "small.pt2")
    report = to_torch_export(FixedBatch(), torch.randn(2, 8), tmp_path / "small.pt2", dynamic_batch=False)
    assert report.inputs == ("2x8", "2x8")


def test_keyword_arguments_are_exported(tmp_path: Path) -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, *, shift: Tensor) -> Tensor:
            return self.linear(x) + shift

    example = ((torch.randn(2, 4),), {"shift": torch.randn(2, 4)})
    report = to_torch_export(Sum(), example, tmp_path / "small.pt2")
    assert report.max_difference <= 1e-6
    assert "5x4, 5x4" in report.inputs


def test_wrong_files_are_refused_or_dropped(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match=r"must end in \.pt2"):
        to_torch_export(model, torch.randn(2, 4), tmp_path / "small.onnx")
    with pytest.raises(VerificationError):
        to_torch_export(model, torch.randn(2, 4), tmp_path / "small.pt2", tolerance=-1.0)
    assert not list(tmp_path.iterdir())
