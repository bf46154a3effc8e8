"""The walk over operators: order, dispatch, and facts that follow channels."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from softprune.graph import trace
from softprune.graph.channels import (
    BinaryOp,
    ChannelwiseOp,
    ConstantOp,
    ForwardAnalysis,
    LayerCall,
    LayerOp,
    NormOp,
    OpaqueOp,
    SelectOp,
    Use,
    all_in_group,
    any_in_group,
    per_group,
)


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


USE = Use(ids(1, 2, 3, 4), ids(5, 6), positions=1)
GROUPED = LayerOp("conv", "conv", groups=2, kernel=1, padded=False, selectable=True, uses=[USE])
OPS = (
    LayerCall(GROUPED, USE),
    LayerCall(NormOp("bn", selectable=True), Use(ids(5, 6), ids(7, 8), positions=0)),
    ChannelwiseOp(ids(7, 8), ids(9, 10), None),
    BinaryOp(ids(9, 10), ids(5, 6), ids(11, 12), torch.add, absorbs_zero=False),
    SelectOp("select", ids(12, 11), ids(11, 12), ids(13, 14)),
    ConstantOp("constant", ids(15), torch.zeros(1)),
    OpaqueOp((ids(13, 14),), ids(16)),
)
KINDS = ["layer", "norm", "channelwise", "binary", "select", "constant", "opaque"]


def recorder() -> tuple[ForwardAnalysis, list[str]]:
    seen: list[str] = []
    methods = {kind: lambda self, *args, kind=kind: seen.append(kind) for kind in KINDS}
    return type("Recorder", (ForwardAnalysis,), methods)(), seen


def test_every_kind_of_operator_reaches_its_own_method():
    visitor, seen = recorder()
    visitor.forward(OPS)
    assert seen == KINDS


def test_facts_follow_channels_through_channelwise_operators_and_selections():
    fact = np.zeros(17)
    fact[[7, 8]] = 1.0, 2.0
    fact[[11, 12]] = 3.0, 4.0
    ForwardAnalysis(fact).forward(OPS)
    assert fact[[9, 10]].tolist() == [1.0, 2.0]
    assert fact[[13, 14]].tolist() == [4.0, 3.0]
    assert fact[[5, 6, 15, 16]].tolist() == [0.0] * 4


def test_outputs_of_a_group_share_what_its_inputs_give():
    assert per_group(GROUPED, USE, lambda inputs: inputs.tolist()) == [[1, 2], [3, 4]]
    fact = np.array([False, True, True, True, False, False, False])
    assert any_in_group(GROUPED, USE, fact).tolist() == [True, True]
    assert all_in_group(GROUPED, USE, fact).tolist() == [True, False]


def test_a_traced_network_is_visited_in_order_of_execution():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
    visitor, seen = recorder()
    visitor.forward(trace(model, torch.randn(2, 3, 2, 2)).ops)
    assert seen == ["layer", "norm", "channelwise", "layer"]
