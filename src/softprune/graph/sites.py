"""Which BatchNorms can be masked: those whose every reader is an activation that keeps zero at zero."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.fx import Node

from softprune.graph.link import Linker, operator_name

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
TIMM_BATCH_NORMS = ("BatchNormAct2d", "SyncBatchNormAct")
"""timm's BatchNorm with the activation inside, known by name so that timm stays optional."""

# fmt: off
ACTIVATIONS = frozenset([
    "relu", "relu6", "hardswish", "silu", "gelu", "mish", "leaky_relu", "prelu", "elu", "selu", "celu",
    "hardtanh",
])
# fmt: on
"""Activations f with f(0) = 0 that a dropped channel passes as zero."""
NOT_SILENT = {"sigmoid": 0.5, "hardsigmoid": 0.5, "softplus": 0.69, "exp": 1.0, "log_sigmoid": -0.69}
# fmt: off
PASSES_ZERO = frozenset([
    "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "dropout",
    "feature_dropout", "alpha_dropout", "clone", "to", "contiguous", "detach", "getitem", "cat", "view",
    "reshape", "flatten", "permute", "transpose", "upsample_nearest2d", "upsample_bilinear2d", "chunk",
    "adaptive_avg_pool2d", "adaptive_max_pool2d", "pad", "squeeze", "unsqueeze",
])
# fmt: on


@dataclass(frozen=True)
class Site:
    """A BatchNorm whose channels can be masked, and the activation that reads it."""

    name: str
    width: int
    activation: str


@dataclass(frozen=True)
class Frozen:
    """A BatchNorm that stays whole, and why."""

    name: str
    width: int
    reason: str
    maskable: bool = False
    """Whether only what follows it speaks against it: a method that does not ask about the activation may mask it."""


def activation_after(node: Node) -> tuple[str | None, str]:
    """(activation, "") if every reader of `node` is the same activation; otherwise (None, the reason)."""
    found: set[str] = set()
    queue, seen = list(node.users), set()
    while queue:
        reader = queue.pop()
        if reader in seen:
            continue
        seen.add(reader)
        name = operator_name(reader) if reader.op == "call_function" else reader.op
        if name in ACTIVATIONS:
            found.add(_variant(name, reader))
        elif name in PASSES_ZERO:
            queue.extend(reader.users)
        elif name in NOT_SILENT:
            return (
                None,
                f"{name} follows, and {name}(0) = {NOT_SILENT[name]}: a dropped channel would not be silent",
            )
        elif reader.op == "output":
            return None, "it is an output of the model"
        else:
            return None, f"{name} reads it with no activation in between"
    if not found:
        return None, "nothing reads it"
    if len(found) > 1:
        return None, f"different activations read it ({', '.join(sorted(found))})"
    return found.pop(), ""


def _variant(name: str, reader: Node) -> str:
    if name == "hardtanh":
        low = reader.args[1] if len(reader.args) > 1 else reader.kwargs.get("min_val", -1.0)
        high = reader.args[2] if len(reader.args) > 2 else reader.kwargs.get("max_val", 1.0)
        return "relu6" if low == 0 and high == 6 else "relu" if low == 0 else "hardtanh"
    return name


def find_sites(linker: Linker) -> tuple[tuple[Site, ...], tuple[Frozen, ...]]:
    """Every BatchNorm of the model, as a site or frozen with its reason, in the order of the model."""
    sites: list[Site] = []
    frozen: list[Frozen] = []
    for name, module in linker.model.named_modules():
        kind = type(module).__name__
        known = type(module) in BATCH_NORMS or kind in TIMM_BATCH_NORMS
        if not known and "BatchNorm" not in kind:
            continue
        width = int(getattr(module, "num_features", 0))
        unusable = _unusable_because(linker, name, module, known)
        reason = unusable or _unheard_because(linker, name)
        if reason is None:
            activation = activation_after(linker.norm_nodes[name][0])[0]
            assert activation is not None
            sites.append(Site(name, width, activation))
        else:
            maskable = unusable is None and _bound_because(linker, name) is None
            frozen.append(Frozen(name, width, reason, maskable))
    return tuple(sites), tuple(frozen)


def _unusable_because(linker: Linker, name: str, module: nn.Module, known: bool) -> str | None:
    """Why the module cannot carry a mask at all."""
    if not known:
        return f"{type(module).__name__} is not among the BatchNorm classes that softprune knows"
    if name not in linker.norms:
        return "the forward pass does not use it, or its parameters are shared with another module"
    if getattr(module, "weight", None) is None or getattr(module, "bias", None) is None:
        return "it has no learned scale and shift (affine=False)"
    if not getattr(module, "track_running_stats", True):
        return "it keeps no running statistics, so its output in evaluation depends on the batch"
    return None


def _unheard_because(linker: Linker, name: str) -> str | None:
    """Why nobody would hear a channel fall silent: by what follows, or because nothing could be cut."""
    names = {activation_after(node) for node in linker.norm_nodes[name]}
    for activation, reason in sorted(names, key=str):
        if activation is None:
            return reason
    if len(names) > 1:
        return "different activations read it in its different uses"
    return _bound_because(linker, name)


def _bound_because(linker: Linker, name: str) -> str | None:
    """Why none of its channels can be cut."""
    reasons = [linker.table.pinned_because(atom) for atom in linker.norms[name].outputs.tolist()]
    return f"its channels cannot be cut: {reasons[0]}" if all(reasons) else None
