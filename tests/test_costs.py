"""Exact counting: hand-derived MACs, attribution to modules, and a model that stays as it was."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softprune import inspect, models
from softprune.costs import cost
from softprune.errors import ModelError


@pytest.mark.parametrize(
    ("layer", "shape", "macs", "written"),
    [
        (nn.Conv2d(3, 8, 3, padding=1), (1, 3, 10, 12), 10 * 12 * 3 * 8 * 9, 8 * 10 * 12),
        (nn.Conv2d(3, 8, 3, stride=2), (1, 3, 11, 11), 5 * 5 * 3 * 8 * 9, 8 * 5 * 5),
        (nn.Conv2d(3, 8, 3, padding="same", dilation=2), (1, 3, 10, 12), 10 * 12 * 3 * 8 * 9, 8 * 10 * 12),
        (nn.Conv2d(6, 8, (1, 5), groups=2), (2, 6, 7, 9), 7 * 5 * (3 * 8) * 5, 8 * 7 * 5),
        (nn.Conv2d(6, 6, 3, groups=6), (1, 6, 7, 7), 5 * 5 * 6 * 9, 6 * 5 * 5),
        (nn.Conv1d(4, 6, 3), (1, 4, 10), 8 * 4 * 6 * 3, 6 * 8),
        (nn.Conv3d(2, 3, 3), (1, 2, 5, 6, 7), 3 * 4 * 5 * 2 * 3 * 27, 3 * 3 * 4 * 5),
        (nn.ConvTranspose2d(4, 6, 4, stride=2, padding=1), (1, 4, 5, 5), 5 * 5 * 4 * 6 * 16, 6 * 10 * 10),
        (nn.ConvTranspose1d(4, 6, 3, groups=2), (1, 4, 5), 5 * (4 * 3) * 3, 6 * 7),
        (nn.Conv2d(3, 8, 3), (3, 10, 10), 8 * 8 * 3 * 8 * 9, 8 * 8 * 8),  # without a batch
        (nn.Linear(7, 5), (3, 7), 7 * 5, 5),
        (nn.Linear(7, 5, bias=False), (3, 7), 7 * 5, 5),
        (nn.Linear(7, 5), (7,), 7 * 5, 5),
        (nn.Linear(7, 5, bias=False), (7,), 7 * 5, 5),
        (nn.Linear(7, 5), (2, 3, 4, 7), 3 * 4 * 7 * 5, 3 * 4 * 5),
        (nn.Linear(7, 5, bias=False), (2, 3, 7), 3 * 7 * 5, 3 * 5),
        (nn.BatchNorm2d(5), (2, 5, 3, 3), 0, 0),
        (nn.MaxPool2d(2), (2, 5, 4, 4), 0, 0),
    ],
    ids=lambda value: str(value) if isinstance(value, nn.Module) else None,
)
def test_one_layer(layer: nn.Module, shape: tuple[int, ...], macs: int, written: int) -> None:
    found = cost(layer, torch.randn(shape))
    assert (found.macs, found.flops, found.activations) == (macs, 2 * macs, written)
    assert found.params == sum(p.numel() for p in layer.parameters())


def test_activations_of_a_known_network() -> None:
    """11.1 million, as published for ResNet-50 at 224 x 224."""
    assert round(cost(models.build("resnet50", 1000), torch.zeros(1, 3, 224, 224)).activations / 1e6, 1) == 11.1


def test_a_batchnorm_without_parameters_has_channels() -> None:
    found = cost(nn.BatchNorm2d(5, affine=False), torch.randn(2, 5, 3, 3))
    assert (found.channels, found.params) == (5, 0)
    assert found.by_module[""].channels == 5


def test_attention_counts_its_projections_and_not_its_products() -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(3, 5, 8)
    assert cost(attention, (x, x, x)).macs == 4 * (5 * 8 * 8)


class Twice(nn.Module):
    """One convolution used twice, one weight used by two modules, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.again = nn.Sequential(self.conv, nn.ReLU())
        self.norm = nn.BatchNorm2d(4)
        self.left = nn.Linear(4, 6, bias=False)
        self.right = nn.Linear(4, 6)
        self.right.weight = self.left.weight
        self.mix = nn.Parameter(torch.randn(5, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.again(self.conv(x))).mean((2, 3))
        return F.linear(self.left(x) + self.right(x), self.mix)


def test_attribution_of_shared_modules_and_tied_parameters() -> None:
    found = cost(Twice(), torch.randn(2, 4, 5, 5))
    parts = {name: (part.macs, part.params, part.channels) for name, part in found.by_module.items()}
    assert parts == {
        "": (6 * 5, 30, 0),
        "conv": (2 * (25 * 4 * 4 * 9), 144, 0),
        "norm": (0, 8, 4),
        "left": (4 * 6, 24, 0),
        "right": (4 * 6, 6, 0),
    }
    assert found.macs == sum(part.macs for part in found.by_module.values())
    assert found.params == sum(p.numel() for p in Twice().parameters())
    assert found.channels == 4
    assert found.by_module["conv"].kind == "Conv2d"


class Remembers(nn.Module):
    """Keeps what a forward saw: in an attribute, in a buffer, in a running statistic."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout()
        self.calls = 0
        self.last: Tensor | None = None
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        self.last = self.drop(self.norm(self.conv(x)))
        return self.last


def test_the_model_stays_as_it_was() -> None:
    model = Remembers().train()
    model.drop.eval()  # a mode that a plain train() or eval() would not put back
    model.conv.weight.requires_grad_(False)
    forwards: list[nn.Module] = []
    model.conv.register_forward_hook(lambda module, args, out: forwards.append(module))
    state = copy.deepcopy(model.state_dict())
    parameters = list(model.parameters())
    example = torch.randn(2, 3, 4, 4)
    random_state = torch.get_rng_state()

    assert cost(model, example).macs == 16 * 12

    assert [m.training for m in (model, model.conv, model.norm, model.drop)] == [True, True, True, False]
    assert (model.calls, model.last) == (0, None)
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert [p.requires_grad for p in model.parameters()] == [False, True, True, True]
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert model(torch.randn(2, 3, 4, 4)).isfinite().all()  # real tensors again
    assert forwards


def test_lazy_modules_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some versions of torch announce that lazy modules may change
        model.append(nn.LazyLinear(3))
    with pytest.raises(ModelError, match=r"'2\.weight', an uninitialised parameter"):
        cost(model, torch.randn(1, 3, 2, 2))


@pytest.mark.parametrize("batch", [1, 5])
def test_a_sample_costs_the_same_in_any_batch(batch: int) -> None:
    assert cost(models.digits_net(), torch.randn(batch, 1, 8, 8)).macs == 2_379_008


def test_without_a_common_first_dimension_the_whole_call_counts() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 5), nn.Linear(6, 5)

        def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(a), self.b(b)

    assert cost(Two(), (torch.randn(2, 4), torch.randn(3, 6))).macs == 2 * 20 + 3 * 30


@pytest.mark.parametrize("size", [6, 13])
def test_a_convolution_with_weights_of_each_sample_counts_once_per_sample(size: int) -> None:
    class Conditional(nn.Module):
        """As in CondConv: the samples are groups of one convolution."""

        def __init__(self) -> None:
            super().__init__()
            self.norm, self.weights = nn.BatchNorm2d(4), nn.Linear(4, 4 * 9)

        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.norm(x))
            weights = self.weights(x.mean((2, 3))).view(-1, 1, 3, 3)
            return F.conv2d(x.reshape(1, -1, size, size), weights, padding=1, groups=len(weights)).view(x.shape)

    model, example = Conditional(), torch.randn(2, 4, size, size)
    macs = 4 * 4 * 9 + size * size * 4 * 9
    assert cost(model, example).macs == macs
    assert inspect(model, example).macs == macs


@pytest.mark.parametrize("name", ["mobilenetv3_small_050", "convnext_atto"])
def test_timm_networks_agree_with_torchs_own_counter(name: str) -> None:
    timm = pytest.importorskip("timm", reason='the "timm" extra is not installed')
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"):
        model = timm.create_model(name).eval()
        example = torch.empty(1, 3, 64, 64)
        with FlopCounterMode(display=False) as counter:
            model(example)
    assert cost(model, example).flops == counter.get_total_flops()
