"""A cut network is an ordinary module: it has what the dense one had, which is untouched; it compiles and exports."""

import functools
from typing import Any

import pytest
import torch
from comparing import random_masks
from topologies import TOPOLOGIES, Chain, PreActivation, randomise_
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.utils import _pytree as pytree

from softprune.cut import apply_plan, make_plan
from softprune.cut.selection import read_graph
from softprune.graph import ConstantOutput


@functools.cache
def _compact(name: str) -> tuple[nn.Module, nn.Module, tuple[Any, ...]]:
    """(dense, compact, arguments), which no test changes"""
    topology = TOPOLOGIES[name]
    torch.manual_seed(1)
    model, example = randomise_(topology.build()), topology.example()
    graph = read_graph(model, example)
    compact = apply_plan(make_plan(graph, model, random_masks(graph, 1, deaths=0.3)), model)
    return model, compact, example if isinstance(example, tuple) else (example,)


def _close(expected: Any, got: Any) -> None:
    for a, b in zip(pytree.tree_leaves(expected), pytree.tree_leaves(got), strict=True):
        assert (a - b).abs().max() <= 1e-5 * a.abs().max()


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_compact_network_exports(name: str) -> None:
    _, compact, arguments = _compact(name)
    program = torch.export.export(compact, arguments, strict=False)
    with torch.no_grad():
        _close(compact(*arguments), program.module()(*arguments))


def _structure(model: nn.Module) -> list[Any]:
    """Everything about a module tree that a cut might leave behind."""
    return [
        (name, type(m), m.training, sorted(m._buffers), len(m._forward_hooks), len(m._forward_pre_hooks), set(vars(m)))
        for name, m in model.named_modules()
    ]


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_the_dense_network_is_untouched(name: str) -> None:
    topology = TOPOLOGIES[name]
    model, example = randomise_(topology.build()), topology.example()
    model.get_submodule(next(iter(topology.hand.kept))).train()  # a mode that train() or eval() would not put back
    tensors = {key: (id(t), t.clone()) for key, t in model.state_dict(keep_vars=True).items()}
    structure, random_state = _structure(model), torch.get_rng_state()
    graph = read_graph(model, example)
    apply_plan(make_plan(graph, model, random_masks(graph, 0, deaths=0.3)), model)
    assert _structure(model) == structure
    assert torch.equal(torch.get_rng_state(), random_state)
    for key, tensor in model.state_dict(keep_vars=True).items():
        assert id(tensor) == tensors[key][0]
        assert torch.equal(tensor, tensors[key][1])


def test_dtype_mode_gradients_and_memory_format_survive() -> None:
    model = randomise_(PreActivation()).to(torch.float64).to(memory_format=torch.channels_last)
    model.fc.weight.requires_grad_(False)
    model.train()
    model.bn.eval()
    graph = read_graph(model, torch.randn(2, 3, 8, 8))
    compact = apply_plan(make_plan(graph, model, random_masks(graph, 1)), model)
    assert isinstance(compact, PreActivation)
    assert type(compact) is type(model)
    for name, parameter in compact.named_parameters():
        dense = model.get_parameter(name)
        assert isinstance(parameter, nn.Parameter)
        assert (parameter.dtype, parameter.requires_grad) == (dense.dtype, dense.requires_grad), name
    wide = [p for p in compact.parameters() if p.ndim == 4 and min(p.shape[:2]) > 1]
    assert wide
    assert all(p.is_contiguous(memory_format=torch.channels_last) and not p.is_contiguous() for p in wide)
    for name, module in compact.named_modules():
        if not name.endswith("select"):
            assert module.training == model.get_submodule(name).training, name
    assert compact.bn.num_features == len(compact.bn.weight) == len(compact.bn.running_mean)


def test_hooks_of_the_user_survive() -> None:
    model, calls = randomise_(Chain()), []
    model.conv1.register_forward_hook(lambda module, args, output: calls.append(output.shape[1]))
    graph = read_graph(model, torch.randn(2, 3, 8, 8))
    calls.clear()
    apply_plan(make_plan(graph, model, {"bn1": torch.arange(8) < 3}), model)(torch.randn(2, 3, 8, 8))
    assert calls == [3]


# --- the optimizer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [nn.Conv2d(4, 6, 3, stride=2, padding=1), nn.ConvTranspose2d(4, 6, 3)], ids=str)
def test_tools_that_fold_batchnorms_take_what_stands_in_place_of_a_layer(layer: nn.Module) -> None:
    constant = ConstantOutput(layer, torch.randn(6)).eval()
    bn = randomise_(nn.Sequential(nn.BatchNorm2d(6)))[0]  # type: ignore[index]
    fused = fuse_conv_bn_eval(constant, bn, transpose=isinstance(layer, nn.ConvTranspose2d))  # type: ignore[type-var]
    x = torch.randn(2, 4, 9, 9)
    torch.testing.assert_close(fused(x), bn(constant(x)))
    assert list(fused.state_dict()) == ["value"]
