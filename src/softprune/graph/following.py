"""Who reads a BatchNorm: the activation that a dropped channel passes as zero, if every reader is the same one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from softprune.graph.builder import argument, operator_name

# fmt: off
ACTIVATIONS = frozenset([
    "relu", "relu6", "hardswish", "silu", "gelu", "mish", "leaky_relu", "prelu", "rrelu", "elu", "selu", "celu",
    "hardtanh", "tanh", "softsign", "tanhshrink", "softshrink", "hardshrink",
])
"""Activations f with f(0) = 0 that a dropped channel passes as zero."""
CLIPS = frozenset(["hardtanh", "clamp", "clamp_min"])
"""Operators that are an activation or not, depending on their bounds."""
NOT_SILENT = {"sigmoid": 0.5, "hardsigmoid": 0.5, "softplus": 0.69, "exp": 1.0, "log_sigmoid": -0.69}
PASSES_ZERO = frozenset([
    "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "dropout",
    "feature_dropout", "alpha_dropout", "clone", "alias", "to", "contiguous", "detach", "getitem", "cat", "view",
    "reshape", "flatten", "permute", "transpose", "upsample_nearest2d", "upsample_bilinear2d", "chunk",
    "split", "split_with_sizes", "slice", "adaptive_avg_pool2d", "adaptive_max_pool2d", "pad", "squeeze",
    "unsqueeze",
])
# fmt: on

Written = Callable[[Tensor], Tensor]
WRITTEN_OUT: dict[str, Written] = {
    "silu": F.silu,
    "hardswish": F.hardswish,
    "mish": F.mish,
    "gelu": F.gelu,
    "relu": F.relu,
    "relu6": F.relu6,
}
"""Activations that forward() may write out in arithmetic, such as x * sigmoid(x)."""
LARGEST_FORMULA = 12
"""Operators that a written-out activation has at most (GELU in its tanh form has nine)."""


def activation_after(node: Node) -> tuple[str | None, str]:
    """(activation, "") if every reader of `node` is the same activation; otherwise (None, the reason)."""
    found: set[str] = set()
    queue: list[tuple[Node, Node]] = [(node, reader) for reader in node.users]
    seen: set[Node] = set()
    while queue:
        source, reader = queue.pop()
        if reader in seen:
            continue
        seen.add(reader)
        name = operator_name(reader) if reader.op == "call_function" else reader.op
        activation = _activation(name, reader)
        if activation is not None:
            found.add(activation)
        elif name in PASSES_ZERO:
            queue.extend((reader, further) for further in reader.users)
        else:
            formula = _written_out(source)
            if formula is None:
                return None, _refusal(name, reader)
            found.add(formula)
            seen.update(source.users)
    if not found:
        return None, "nothing reads it"
    if len(found) > 1:
        return None, f"different activations read it ({', '.join(sorted(found))})"
    return found.pop(), ""


def _refusal(name: str, reader: Node) -> str:
    if reader.op == "output":
        return "it is an output of the model"
    if name in NOT_SILENT:
        return f"{name} follows, and {name}(0) = {NOT_SILENT[name]}: a dropped channel would not be silent"
    return f"{name} reads it with no activation in between"


def _activation(name: str, reader: Node) -> str | None:
    if name not in CLIPS:
        return name if name in ACTIVATIONS else None
    low, high = _bounds(name, reader)
    if any(isinstance(bound, Node) for bound in (low, high)):
        return None
    if low == 0:
        return "relu6" if high == 6 else "relu"
    return "hardtanh" if low is not None and high is not None and low < 0 < high else None


def _bounds(name: str, reader: Node) -> tuple[Any, Any]:
    first, second = ("min_val", "max_val") if name == "hardtanh" else ("min", "max")
    default = (-1.0, 1.0) if name == "hardtanh" else (None, None)
    return argument(reader, 1, first, default[0]), argument(reader, 2, second, default[1])


def _written_out(source: Node) -> str | None:
    """The activation that the arithmetic behind `source` spells out, found by its values."""
    points = torch.linspace(-8.0, 8.0, 321, dtype=torch.float64)
    values: dict[Node, Any] = {source: points}
    node = source
    while (node := node.next).op != "root":
        if not any(argument in values for argument in node.all_input_nodes):
            continue
        if node.op != "call_function" or not all(argument in values for argument in node.all_input_nodes):
            return None
        try:
            values[node] = node.target(*_filled(node.args, values), **_filled(node.kwargs, values))  # type: ignore[operator]
        except Exception:
            return None
        if not isinstance(values[node], Tensor) or values[node].shape != points.shape:
            return None
        inner = set(values) - {node}
        if all(user in values for member in inner for user in member.users):
            for name, function in WRITTEN_OUT.items():
                if torch.allclose(values[node], function(points), atol=1e-3, rtol=0):
                    return name
        if len(values) > LARGEST_FORMULA:
            return None
    return None


def _filled(arguments: Any, values: dict[Node, Any]) -> Any:
    """`arguments` with nodes replaced by copies of their values, since operators may write in place."""
    return torch.fx.node.map_arg(arguments, lambda node: values[node].clone())
