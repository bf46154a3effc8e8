"""The activation that follows a BatchNorm, if every reader is the same one."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from softprune.graph.rules.registry import ACTIVATIONS, OPERATORS, activation_of, operator_name

WRITTEN_OUT = tuple(name for name, activation in ACTIVATIONS.items() if activation.left_tail_dies)
"""Activations that forward() may write out in arithmetic, such as x * sigmoid(x)."""
LARGEST_FORMULA = 12
"""Operators that a written-out activation has at most (GELU in its tanh form has nine)."""


def activation_after(node: Node) -> tuple[str | None, str]:
    """Return (activation, "") if every reader of `node` is the same activation, otherwise (None, the reason)."""
    found: set[str] = set()
    queue: list[tuple[Node, Node]] = [(node, reader) for reader in node.users]
    seen: set[Node] = set()
    while queue:
        source, reader = queue.pop()
        if reader in seen:
            continue
        seen.add(reader)
        name = operator_name(reader) if reader.op == "call_function" else reader.op
        activation = activation_of(reader) if reader.op == "call_function" else None
        if activation is not None:
            found.add(activation)
        elif name in OPERATORS and OPERATORS[name].transparent:
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
    if name in OPERATORS and OPERATORS[name].kind == "pointwise" and OPERATORS[name].at_zero:
        return f"{name} follows, and {name}(0) = {OPERATORS[name].at_zero}: a dropped channel would not be dead"
    return f"{name} reads it with no activation in between"


def _written_out(source: Node) -> str | None:
    """Return the activation that the arithmetic after `source` spells out, found by its values."""
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
            for name in WRITTEN_OUT:
                if torch.allclose(values[node], getattr(F, name)(points), atol=1e-3, rtol=0):
                    return name
        if len(values) > LARGEST_FORMULA:
            return None
    return None


def _filled(arguments: Any, values: dict[Node, Any]) -> Any:
    """Replace nodes in `arguments` by copies of their values, since operators may write in place."""
    return torch.fx.node.map_arg(arguments, lambda node: values[node].clone())
