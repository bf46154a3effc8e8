"""Operators that users register with `torch.library`."""

import runpy
from collections.abc import Callable

import pytest
import torch
from topologies import randomise_
from torch import Tensor, nn

import softprune as sp
from softprune.errors import ConfigError
from softprune.graph import Activation, Operator, add_operator, builder, pointwise
from softprune.graph.operators import OPERATORS, activations

IMAGES = torch.randn(2, 3, 8, 8)


@torch.library.custom_op("softprune_tests::softplus", mutates_args=())
def centred_softplus(x: Tensor) -> Tensor:
    """Zero at zero, and with a left tail that lives."""
    return torch.nn.functional.softplus(x) - 0.6931471805599453


@torch.library.custom_op("softprune_tests::relu", mutates_args=())
def mean_over_channels(x: Tensor) -> Tensor:
    """Not what its name says."""
    return x + x.mean(1, keepdim=True)


centred_softplus.register_fake(torch.empty_like)
mean_over_channels.register_fake(torch.empty_like)


def network(act: Callable[[Tensor], Tensor]) -> nn.Module:
    class Net(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[2](act(self[1](self[0](x))))

    return randomise_(Net(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 2, 1)))


@pytest.mark.usefixtures("same_operators")
def test_an_operator_that_is_added_is_cut_through() -> None:
    model = network(torch.ops.softprune_tests.softplus)
    frozen = sp.inspect(model, IMAGES)
    assert not frozen.sites
    assert "softprune.graph.add_operator adds a rule for a custom operator" in str(frozen)
    (name,) = frozen.unknown_operators
    add_operator(name, Operator(pointwise, activation=Activation()))
    (site,) = sp.inspect(model, IMAGES).sites
    assert site.activation == "softprune_tests::softplus"
    pruner = sp.SoftPruner(model, IMAGES, strength=1e-4)
    with torch.no_grad():
        for parameter in (pruner.norms["1"].weight, pruner.norms["1"].bias):
            parameter[:3] = 0.0
    assert pruner.masks()["1"].tolist() == [False] * 3 + [True] * 5
    compact = pruner.compact().eval()
    assert compact[0].out_channels == 5
    torch.testing.assert_close(compact(IMAGES), model.eval()(IMAGES))


def test_an_operator_is_not_taken_for_one_of_pytorch_with_the_same_name() -> None:
    found = sp.inspect(network(torch.ops.softprune_tests.relu), IMAGES)
    assert not found.sites
    assert list(found.unknown_operators) == ["softprune_tests.relu.default"]


@pytest.mark.usefixtures("same_operators")
def test_a_name_may_be_that_of_torch_library() -> None:
    add_operator("mine::act", Operator(pointwise, activation=Activation()))
    add_operator("mine.act_.default", Operator(pointwise))
    assert "mine::act" not in activations()


def test_names_and_kinds_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"must be namespace::name\. Got 'act'; write 'mine::act'"):
        add_operator("act", Operator(pointwise))
    with pytest.raises(ConfigError, match=r"must be a function\. Got 'pointwise'"):
        add_operator("mine::act", Operator("pointwise"))  # type: ignore[arg-type]


@pytest.mark.usefixtures("same_operators")
def test_a_fault_in_a_rule_is_raised() -> None:
    def faulty(builder: object, node: object, entry: object) -> None:
        raise KeyError("a fault")

    OPERATORS["relu"] = Operator(faulty)
    with pytest.raises(KeyError, match="a fault"):
        sp.inspect(network(torch.relu), IMAGES)


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (nn.LeakyReLU(0.0), "relu"),
        (nn.LeakyReLU(0.1), "leaky_relu"),
        (nn.LeakyReLU(2.0), "leaky_relu*2"),
        (nn.LeakyReLU(-1.5), "leaky_relu*1.5"),
        (nn.ELU(), "elu"),
        (nn.ELU(0.0), "relu"),
        (nn.ELU(3.0), "elu*3"),
        (nn.RReLU().eval(), "rrelu"),
        (nn.RReLU(1.0, 3.0).eval(), "rrelu*2"),
        (nn.SELU(), "selu"),
        (nn.Hardtanh(0, 6, inplace=True), "relu6"),
        (lambda x: x.clamp(0, 1), "relu"),
        (lambda x: x.clamp(-2, 3), "clamp"),
        (lambda x: x.clamp(min=-2), "clamp"),
        (lambda x: x.clamp(min=0.1), None),
        (lambda x: x.clamp(max=-1), None),
    ],
)
def test_arguments_decide_which_activation_an_operator_is(
    act: Callable[[Tensor], Tensor], expected: str | None
) -> None:
    sites = sp.inspect(network(act), IMAGES, site_kinds="sum").sites
    assert [site.activation for site in sites] == [expected] * bool(expected)


def test_the_default_device_at_the_import_does_not_matter() -> None:
    with torch.device("meta"):
        table = runpy.run_path(builder.__file__)
    assert table["_POINTS"].device == torch.device("cpu")
