"""BatchNorm folding is exact, and happens only where it can be."""

import copy

import pytest
import torch
import torch.nn.functional as F
from export_networks import Dense, Residual, compacted, randomise_
from torch import Tensor, nn

from softprune.cut import plans_of, save
from softprune.errors import ModelError, PlanError
from softprune.export import fold_batch_norms
from softprune.methods import SoftPruner


def _norms(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]


def _assert_same(left: nn.Module, right: nn.Module, example: Tensor) -> None:
    left, right = copy.deepcopy(left).eval().double(), copy.deepcopy(right).eval().double()
    with torch.no_grad():
        torch.testing.assert_close(left(example.double()), right(example.double()), rtol=1e-5, atol=1e-6)


def test_layers_of_all_kinds_are_folded() -> None:
    model, example = Residual(), torch.randn(2, 3, 8, 8)
    randomise_(model, dead=0)
    folded = fold_batch_norms(model, example)
    assert _norms(folded) == []
    assert not folded.training
    _assert_same(model, folded, example)
    assert len(_norms(model)) == 3


def test_a_shared_stream_is_not_folded() -> None:
    model, example = Dense(), torch.randn(2, 3, 8, 8)
    randomise_(model, dead=0)
    folded = fold_batch_norms(model, example)
    assert _norms(folded) == ["bn1", "bn2"]
    _assert_same(model, folded, example)


@pytest.mark.parametrize("name", ["residual", "void", "dense", "resnet20"])
def test_compact_networks_fold(name: str, tmp_path) -> None:
    _, compact, example = compacted(name)
    folded = fold_batch_norms(compact, example)
    assert len(_norms(folded)) < len(_norms(compact))
    _assert_same(compact, folded, example)
    assert plans_of(compact)
    with pytest.raises(PlanError, match="without a plan"):
        save(folded, tmp_path / "folded")


class Shared(nn.Module):
    """What must stay: layers and BatchNorms called twice, weights that forward() reads, batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.conv, self.norm2 = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.read, self.norm3 = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.plain, self.norm4 = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, track_running_stats=False)
        self.last, self.norm5 = nn.Conv2d(3, 3, 1, bias=False), nn.BatchNorm2d(3, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.twice(x)) + self.twice(x)
        x = self.norm2(self.norm2(self.conv(x)))
        x = self.norm3(self.read(x)) + self.norm3.weight.sum() + self.read.weight.sum()
        x = self.norm4(self.plain(x))
        return F.relu(self.norm5(self.last(x)))


def test_what_is_shared_or_depends_on_the_batch_stays() -> None:
    model, example = Shared().eval(), torch.randn(2, 3, 5, 5)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None:
            module.running_mean.normal_()
    folded = fold_batch_norms(model, example)
    assert _norms(folded) == ["norm", "norm2", "norm3", "norm4"]
    _assert_same(model, folded, example)


def test_timm_norms_keep_their_activation() -> None:
    timm = pytest.importorskip("timm", reason='the "timm" extra is not installed')
    torch.manual_seed(0)
    model = timm.create_model("mobilenetv3_small_050").eval()
    randomise_(model, dead=0)
    example = torch.randn(2, 3, 64, 64)
    folded = fold_batch_norms(model, example)
    assert _norms(folded) == []
    _assert_same(model, folded, example)


def test_a_masked_network_is_refused() -> None:
    model, example = Residual(), torch.randn(2, 3, 8, 8)
    SoftPruner(model, example)
    with pytest.raises(ModelError, match="an export needs a network without masks"):
        fold_batch_norms(model, example)


@pytest.mark.parametrize("kind", ["volumes", "transposed linear", "transposed sequence"])
def test_weights_keep_their_memory_order(kind: str) -> None:
    torch.manual_seed(0)
    if kind == "volumes":
        model, example = nn.Sequential(nn.Conv3d(3, 8, 3), nn.BatchNorm3d(8)), torch.randn(2, 3, 6, 6, 6)
        model.to(memory_format=torch.channels_last_3d)
    elif kind == "transposed linear":
        model, example = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)), torch.randn(4, 6)
        model[0].weight = nn.Parameter(torch.randn(6, 8).t())
    else:
        model, example = nn.Sequential(nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8)), torch.randn(2, 3, 9)
        model[0].weight = nn.Parameter(torch.randn(3, 3, 8).permute(2, 1, 0))
    randomise_(model.eval(), dead=0)
    folded = fold_batch_norms(model, example)
    assert _norms(folded) == []
    assert folded[0].weight.stride() == model[0].weight.stride()
    _assert_same(model, folded, example)


class _WithoutBias(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return F.conv2d(input, self.weight, None, self.stride, self.padding)


def test_a_layer_that_leaves_its_bias_out_keeps_its_norm() -> None:
    torch.manual_seed(0)
    odd = nn.Sequential(_WithoutBias(3, 8, 3, bias=False), nn.BatchNorm2d(8))
    model = nn.Sequential(odd, nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)).eval()
    randomise_(model, dead=0)
    example = torch.randn(2, 3, 16, 16)
    folded = fold_batch_norms(model, example)
    assert _norms(folded) == ["0.1"]
    _assert_same(model, folded, example)
