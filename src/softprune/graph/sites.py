"""Which BatchNorms can be masked: those whose every reader is an activation that keeps zero at zero."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node
from torch.nn.modules.batchnorm import _BatchNorm

from softprune.graph.builder import GraphBuilder, operator_name
from softprune.graph.elementwise import pointwise
from softprune.graph.groups import find_groups
from softprune.graph.modules import is_known_batch_norm
from softprune.graph.operators import OPERATORS, activations
from softprune.graph.ops import Frozen, Site

KINDS = ("sum", "linear", "stream")
"""Kinds of sites beside ``"activated"``, a BatchNorm that an activation reads; see :mod:`softprune.graph.groups`."""
DEFAULT_KINDS = ("sum",)
WRITTEN_OUT = tuple(name for name, activation in activations().items() if activation.left_tail_dies)
"""Activations that forward() may write out in arithmetic, such as x * sigmoid(x)."""
LARGEST_FORMULA = 12
"""Operators that a written-out activation has at most (GELU in its tanh form has nine)."""


def find_sites(builder: GraphBuilder) -> tuple[tuple[Site, ...], tuple[Frozen, ...]]:
    """Return every BatchNorm of the model, as a site or frozen with its reason, in the order of the model."""
    sites: list[Site] = []
    frozen: list[Frozen] = []
    for name, module in builder.model.named_modules():
        known = is_known_batch_norm(type(module))
        if not known and not isinstance(module, _BatchNorm) and not _named_batch_norm(module):
            continue
        width = int(getattr(module, "num_features", 0))
        unusable = _unusable_because(builder, name, module, known)
        reason = unusable or _ineffective_because(builder, name)
        if reason is None:
            activation = activation_after(builder.norm_nodes[name][0])[0]
            assert activation is not None
            sites.append(Site(name, width, activation, slopes=_slopes(builder, activation, [name])))
        else:
            maskable = unusable is None and _uncuttable_because(builder, name) is None
            frozen.append(Frozen(name, width, reason, maskable))
    return tuple(sites), tuple(frozen)


def _named_batch_norm(module: nn.Module) -> bool:
    """Whether an unknown class calls itself BatchNorm and has tensors of its own: a module around one has none."""
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return "BatchNorm" in type(module).__name__ and (bool(own) or next(module.children(), None) is None)


def find_grouped_sites(builder: GraphBuilder, sites: Sequence[Site], frozen: Sequence[Frozen]) -> tuple[Site, ...]:
    """Return the sites of other kinds that BatchNorms could form; see :meth:`ChannelGraph.with_kinds`."""
    single = {site.name for site in sites}
    usable = single | {norm.name for norm in frozen if norm.maskable}
    widths = {name: len(norm.outputs) for name, norm in builder.norms.items() if name in usable and len(norm.uses) == 1}
    groups = find_groups(builder.ops, len(builder.table), widths, single)
    return tuple(replace(site, slopes=_slopes(builder, site.activation, site.members)) for site in groups)


def _slopes(builder: GraphBuilder, activation: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the learned slopes of an activation on channels of these BatchNorms, or on channels tied to them."""
    if activation != "prelu":
        return ()
    find = builder.table.find
    own = find(np.concatenate([builder.norms[name].outputs for name in names]))
    return tuple(dict.fromkeys(slope for slope, read in builder.slopes if np.isin(find(read), own).any()))


def _unusable_because(builder: GraphBuilder, name: str, module: nn.Module, known: bool) -> str | None:
    """Why the module cannot carry a mask at all."""
    if not known:
        return (
            f"{type(module).__name__} is not among the BatchNorm classes that softprune knows; those of torch.nn "
            "are, and weights of a FrozenBatchNorm2d load into them"
        )
    if name in builder.shared_norms:
        return "its parameters are shared with another module"
    if name not in builder.norms:
        return "the forward pass does not call it as a whole, or not at all"
    if getattr(module, "weight", None) is None or getattr(module, "bias", None) is None:
        return "it has no learned scale and shift (affine=False)"
    if not all(parameter.requires_grad for parameter in module.parameters(recurse=False)):
        return "its scale and shift do not both train (requires_grad=False)"
    if not getattr(module, "track_running_stats", True):
        return "it keeps no running statistics, so its output in evaluation depends on the batch"
    return None


def _ineffective_because(builder: GraphBuilder, name: str) -> str | None:
    """Why masking this BatchNorm would have no effect, by what follows or because nothing can be cut."""
    names = {activation_after(node) for node in builder.norm_nodes[name]}
    for activation, reason in sorted(names, key=str):
        if activation is None:
            return reason
    if len(names) > 1:
        return "different activations read it in its different uses"
    return _uncuttable_because(builder, name)


def _uncuttable_because(builder: GraphBuilder, name: str) -> str | None:
    """Why none of its channels can be cut."""
    reason = builder.table.pinned_because(builder.norms[name].outputs)
    return None if reason is None else f"its channels cannot be cut: {reason}"


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
        activation = OPERATORS[name].activation_of(reader) if name in OPERATORS else None
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
    if name in OPERATORS and OPERATORS[name].rule is pointwise and OPERATORS[name].at_zero:
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
        except (RuntimeError, IndexError):  # it needs dimensions
            return None
        if not isinstance(values[node], Tensor) or values[node].shape != points.shape:
            return None
        inner = set(values) - {node}
        if all(user in values for member in inner for user in member.users):
            equal = (n for n in WRITTEN_OUT if torch.allclose(values[node], getattr(F, n)(points), atol=1e-3, rtol=0))
            name = next(equal, None)
            if name is not None:
                return name
        if len(values) > LARGEST_FORMULA:
            return None
    return None


def _filled(arguments: Any, values: dict[Node, Any]) -> Any:
    """Replace nodes in `arguments` by copies of their values, since operators may write in place."""
    return torch.fx.node.map_arg(arguments, lambda node: values[node].clone())
