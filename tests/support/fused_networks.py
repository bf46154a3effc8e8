"""What tests of fused networks ask."""

from collections import Counter

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree


def operators(fused: GraphModule) -> Counter[str]:
    """How often each operator is in a fused network."""
    names = [str(node.target) for node in fused.graph.nodes if node.op == "call_function"]
    return Counter(name.split(".")[1] for name in names if "." in name)


class SideBySide(nn.ModuleList):
    """Networks with an input each, fused together: what fusing takes is mostly torch.export's, once for all of them."""

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(network(x) for network, x in zip(self, inputs, strict=True))


def assert_same(model: nn.Module, fused: nn.Module, *images: Tensor) -> None:
    """Both give the same, but for rounding."""
    with torch.no_grad():
        outputs = zip(pytree.tree_leaves(model.eval()(*images)), pytree.tree_leaves(fused(*images)), strict=True)
    for want, got in outputs:
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))
