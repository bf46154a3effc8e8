"""What every registered method must do, on every network of the table."""

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from method_networks import Chain, Residual, batch, sgd, train
from topologies import TOPOLOGIES, randomise_
from torch import nn
from torch.utils._pytree import tree_leaves

from softprune.cut import PrunePlan, remap_optimizer
from softprune.cut.selection import read_graph
from softprune.lab.train.method import options_of
from softprune.masks import is_masked
from softprune.methods import REGISTRY, Pruner, RandomPruner
from softprune.methods.options import keywords_of

CARDS = Path(__file__).parents[2] / "docs" / "methods"

NETWORKS: dict[str, Callable[[], nn.Module]] = {"chain": Chain, "residual": Residual}

# Settings under which a few steps prune something.
SETTINGS: dict[str, dict[str, Any]] = {
    "scp": {"strength": 0.5},
    "scp-target": {"strength": 0.5, "ratio": 0.5},
    "slimming": {"strength": 0.01, "ratio": 0.5},
    "sfp": {"ratio": 0.5},
    "fpgm": {"ratio_dist": 0.5},
    "sss": {"strength": 2.0},
    "variational": {"mu_below": 0.99},
    "l1": {"ratio": 0.5},
    "random": {"ratio": 0.5},
}

every_method = pytest.mark.parametrize("method", REGISTRY)
VARIED = ["residual", "dense", "depthwise", "grouped", "option-A"]
# The methods differ in how they decide, not in how a network is read: SCP covers all topologies. `make quick` has every
# method on one network.
methods_on_topologies = pytest.mark.parametrize(
    ("method", "topology"),
    [
        pytest.param(method, name, marks=pytest.mark.quick if name == "residual" else pytest.mark.slow)
        for method in REGISTRY
        for name in TOPOLOGIES
        if method == "scp" or name in VARIED
    ],
)


def build(method: str, network: str | Callable[[], nn.Module], example: Any = None, **more: Any) -> Pruner:
    """A pruner at work on the network, always from the same start."""
    make = NETWORKS[network] if isinstance(network, str) else network
    example = batch()[0] if example is None else example
    settings = {**SETTINGS.get(method, {}), **more}
    if method == "scratch":
        settings = {"plan": RandomPruner(make(), example, ratio=0.5).plan()}
    torch.manual_seed(0)
    return REGISTRY[method](make(), example, **settings)


def run(pruner: Pruner, epochs: int = 2, first: int = 0) -> torch.optim.SGD:
    """Train epochs of two steps."""
    optimizer = sgd(pruner)
    for epoch in range(first, first + epochs):
        train(pruner, optimizer, 2, first=2 * epoch)
        pruner.end_epoch(epoch)
    return optimizer


def build_on(method: str, topology: str, **more: Any) -> Pruner:
    """A pruner at work on a network of the table, always from the same start."""
    kind = TOPOLOGIES[topology]
    return build(method, lambda: randomise_(kind.build()), kind.example(), **more)


def take_steps(pruner: Pruner, optimizer: torch.optim.Optimizer, topology: str, steps: range) -> None:
    """Steps of epochs of two."""
    for step in steps:
        pruner.model.train()
        outputs = _call(pruner.model, TOPOLOGIES[topology].example(4, seed=step))
        loss = pruner.loss(torch.stack([(output - 1).square().mean() for output in outputs]).sum())
        assert torch.isfinite(loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 2:
            pruner.end_epoch(step // 2)


@methods_on_topologies
def test_it_trains_and_its_cut_is_the_masked_network(method: str, topology: str) -> None:
    kind = TOPOLOGIES[topology]
    pruner = build_on(method, topology)
    model = pruner.model
    before = copy.deepcopy(model.state_dict())
    take_steps(pruner, sgd(pruner), topology, range(4))
    assert any(not value.equal(before[name]) for name, value in model.state_dict().items())
    masks = pruner.decide()
    assert pruner.decided
    # Where both tails live (PReLU), shift and scale must both vanish before SCP lets go: not in four steps.
    assert any(not mask.all() for mask in masks.values()) or (topology == "prelu" and "scp" in method)
    model.eval()
    example = kind.example(3, seed=9)
    compact = pruner.compact().eval()  # verified in float64, or it raises
    for masked, cut in zip(_call(model, example), _call(compact, example), strict=True):
        torch.testing.assert_close(cut, masked, rtol=1e-3, atol=1e-4)
    plan = pruner.plan()
    assert PrunePlan.from_json(plan.to_json()) == plan
    assert plan.macs <= plan.dense_macs
    assert sum(parameter.numel() for parameter in compact.parameters()) == plan.params
    assert str(pruner.summary())
    assert repr(pruner).startswith(f"{type(pruner).__name__}({type(model).__name__}, {len(pruner.sites)} sites, ")


def _call(model: nn.Module, example: Any) -> list[torch.Tensor]:
    return tree_leaves(model(*example) if isinstance(example, tuple) else model(example))


@pytest.fixture(autouse=True)
def known_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks are read once each, not once for each method; what is read does not depend on the weights."""

    def read(model: nn.Module, example: Any, **options: Any) -> Any:
        key = (type(model), str(model), *sorted(options.items()))
        if key not in _GRAPHS:
            _GRAPHS[key] = read_graph(model, example, **options)
        return _GRAPHS[key]

    monkeypatch.setattr("softprune.methods.pruner.read_graph", read)


_GRAPHS: dict[Any, Any] = {}


@pytest.mark.parametrize(
    ("method", "topology"),
    [
        pytest.param(method, name, marks=() if name == "residual" else pytest.mark.slow)
        for method in REGISTRY
        for name in (VARIED if method == "scp" else ("residual", "depthwise", "dense"))
    ],
)
def test_it_repeats_from_the_seed_and_resumes_exactly(method: str, topology: str) -> None:
    whole = build_on(method, topology)
    take_steps(whole, sgd(whole), topology, range(4))
    # Stopped behind a step in mid-epoch, everything through a file.
    first = build_on(method, topology)
    optimizer = sgd(first)
    take_steps(first, optimizer, topology, range(1))
    file = io.BytesIO()
    torch.save([first.model.state_dict(), optimizer.state_dict(), first.state_dict()], file)
    file.seek(0)
    model_state, optimizer_state, state = torch.load(file, weights_only=True)
    again = build_on(method, topology, seed=3)
    again.model.load_state_dict(model_state)
    again.load_state_dict(state)
    optimizer = sgd(again)
    optimizer.load_state_dict(optimizer_state)
    take_steps(again, optimizer, topology, range(1, 4))
    for name, value in whole.model.state_dict().items():
        assert value.equal(again.model.state_dict()[name]), name
    assert again.plan().to_json() == whole.plan().to_json()
    assert {name: mask.tolist() for name, mask in again.decide().items()} == {
        name: mask.tolist() for name, mask in whole.decide().items()
    }


@every_method
def test_outside_training_the_loss_is_the_tasks(method: str) -> None:
    pruner = build(method, "chain")
    task = torch.tensor(1.25)
    with torch.no_grad():
        assert pruner.loss(task) is task
    pruner.model.eval()
    assert pruner.loss(task) is task


@every_method
def test_detach_gives_a_plain_model_back(method: str) -> None:
    pruner = build(method, "residual")
    keys = list(pruner.model.state_dict())
    optimizer = run(pruner, 1)
    model = pruner.detach()
    assert not any(is_masked(module) for module in model.modules())
    assert list(model.state_dict()) == keys == list(Residual().state_dict())
    images, labels = batch()
    F.cross_entropy(model.train()(images), labels).backward()
    optimizer.step()  # nothing of the method rides on it any more


@every_method
def test_floors_and_multiples_hold(method: str) -> None:
    if "round_to" not in keywords_of(REGISTRY[method]):
        pytest.skip("its widths come from elsewhere")
    pruner = build(method, "chain", round_to=4, min_channels=2)
    run(pruner)
    masks = pruner.decide()
    assert all(int(mask.sum()) % 4 == 0 and mask.any() for mask in masks.values())
    images, _ = batch(3)
    torch.testing.assert_close(pruner.compact().eval()(images), pruner.model.eval()(images))


@pytest.mark.parametrize(
    ("method", "option"),
    [("slimming", "ratio"), ("sfp", "ratio"), ("fpgm", "ratio_dist"), ("l1", "ratio"), ("random", "ratio")],
)
@pytest.mark.parametrize("ratio", [0.0, 0.55])
def test_a_ratio_is_met_within_a_channel(method: str, option: str, ratio: float) -> None:
    """Slimming's over the network, the others' in every layer; SCP's own target has a test with a real run."""
    images, _ = batch()
    pruner = REGISTRY[method](Chain(20, 30), images, **{option: ratio})
    run(pruner, 1)
    masks = pruner.decide()
    groups = [torch.cat(list(masks.values()))] if method == "slimming" else list(masks.values())
    for mask in groups:
        assert abs(int((~mask).sum()) - ratio * len(mask)) < 1


@every_method
def test_nothing_waits_for_the_device_around_a_step(method: str) -> None:
    """What a CUDA graph could not hold: a number that Python looks at."""
    pruner = build(method, "chain")
    optimizer = sgd(pruner)
    train(pruner, optimizer, 1)
    images, labels = batch()
    objective = pruner.loss(F.cross_entropy(pruner.model(images), labels))
    objective.backward()
    assert pruner.capturable
    with _nobody_looks():
        pruner.before_step()
        pruner.after_step()
        pruner.loss(objective.detach())


@pytest.mark.parametrize("method", ["scp", "scp-target", "slimming", "fpgm", "sss", "variational"])
def test_a_step_compiles_whole(method: str) -> None:
    pruner = build(method, "chain")
    optimizer = sgd(pruner)
    images, labels = batch()
    train(pruner, optimizer, 1)

    def objective() -> torch.Tensor:
        return pruner.loss(F.cross_entropy(pruner.model(images), labels))

    clock = copy.deepcopy(pruner.clock.state_dict())
    eager = objective().detach()
    pruner.clock.load_state_dict(clock)
    torch._dynamo.reset()  # another method's compilation of this function must not count as recompiling
    compiled = torch.compile(objective, backend="eager", fullgraph=True)()
    torch.testing.assert_close(compiled.detach(), eager)
    compiled.backward()
    optimizer.step()


@every_method
def test_it_is_documented(method: str) -> None:
    pruner = REGISTRY[method]
    card = (CARDS / f"{method}.md").read_text(encoding="utf-8")
    assert pruner.description
    arguments = (pruner.__doc__ or "").partition("Args:")[2]
    for option in options_of(pruner):
        assert f"{option}:" in arguments
        assert f"`{option}`" in card


@contextmanager
def _nobody_looks() -> Iterator[None]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a number was read from the device")

    names = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy", "nonzero")
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(torch.Tensor, name, refuse)
        yield


@pytest.mark.parametrize("method", ["scp", "fpgm", "sss"])
def test_the_optimizer_goes_on_with_the_cut_network_alone(method: str) -> None:
    pruner = build(method, "residual")
    optimizer = run(pruner)
    pruner.decide()
    compact = pruner.compact()
    remap_optimizer(optimizer, pruner.model, compact)
    before, step = [tensor.clone() for tensor in pruner.model.parameters()], int(pruner.clock.step)
    for number in range(2):
        images, labels = batch(number)
        optimizer.zero_grad()
        F.cross_entropy(compact(images), labels).backward()
        optimizer.step()
    assert int(pruner.clock.step) == step
    assert all(map(torch.equal, before, pruner.model.parameters()))
