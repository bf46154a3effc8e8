"""What tests of fused networks ask."""

from collections import Counter

import torch
from torch import Tensor, nn
from torch.fx import GraphModule


def operators(fused: GraphModule) -> Counter[str]:
    """How often each operator is in a fused network."""
    names = [str(node.target) for node in fused.graph.nodes if node.op == "call_function"]
    return Counter(name.split(".")[1] for name in names if "." in name)


def assert_same(model: nn.Module, fused: nn.Module, images: Tensor) -> None:
    """Both give the same, but for rounding."""
    with torch.no_grad():
        want, got = model.eval()(images), fused(images)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))
