"""The plan: which input and output channels each module keeps. Saved as versioned JSON with a checksum."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from softprune.cut.analyses import BoolArray, Liveness, constants, depthwise
from softprune.errors import PlanError
from softprune.graph import ChannelGraph
from softprune.graph.channels import Branch, ConstantOp, ForwardAnalysis, IntArray, LayerOp, NormOp, SelectOp, Use

FORMAT = "softprune.plan"
VERSION = 2

Indices = tuple[int, ...]
Shapes = dict[str, Indices]
Record = TypeVar("Record")


@dataclass(frozen=True, kw_only=True)
class ModuleCut:
    """The channels that a module keeps, as indices of the dense module's channels."""

    kind: str
    width_in: int
    width_out: int
    inputs: Indices
    outputs: Indices
    groups: int = 1
    """Number of groups of the convolution after the cut."""
    select: Indices | None = None
    """Positions in the compact input tensor that this module gathers; None to read all of it, in order."""
    source_width: int = 0
    """Width of the compact input tensor if `select` is given."""
    constant: bool = False
    """Whether the module is replaced by a constant."""
    folded: bool = False
    """Whether constant inputs are folded into the bias, which is added if the module has none."""
    zeroed: Indices = ()
    """Outputs of a masked BatchNorm that are kept because of shapes, with scale and shift set to zero."""

    @property
    def changes(self) -> bool:
        """Whether the cut changes the module."""
        whole = len(self.inputs) == self.width_in and len(self.outputs) == self.width_out
        return not whole or self.select is not None or self.constant or self.folded or bool(self.zeroed)


@dataclass(frozen=True, kw_only=True)
class ParameterCut:
    """The entries that a parameter outside known modules keeps, along one dimension."""

    dim: int
    width: int
    kept: Indices


@dataclass(frozen=True, kw_only=True)
class PrunePlan:
    """The channels that every module of a network keeps."""

    model: str
    """Class name of the dense model."""
    dense: Shapes
    """Shapes of the parameters and buffers of the dense model, to which alone the plan applies."""
    sites: dict[str, Indices]
    """Channels that the mask of each masked BatchNorm keeps."""
    modules: dict[str, ModuleCut]
    parameters: dict[str, ParameterCut] = field(default_factory=dict)
    macs: int = 0
    dense_macs: int = 0
    """MACs of convolutions and linear layers per sample; `macs` after the cut, `dense_macs` before."""
    params: int = 0
    dense_params: int = 0
    kept_for_shape: tuple[str, ...] = ()
    """Modules that keep one unread channel, since a module cannot be empty."""
    attributes: dict[str, dict[str, int]] = field(default_factory=dict)
    """New values of integer attributes of modules that hold the width of pieces in forward(), such as C2f.c."""
    branches: dict[str, Indices] = field(default_factory=dict)
    """Modules with layers of their own that are replaced by a constant, with the channels of it that are kept."""
    shortcuts: dict[str, str] = field(default_factory=dict)
    """Those of `branches` that add the constant to their input, with the activation of the sum ("" for none)."""
    constants: dict[str, NDArray[np.float64]] = field(default_factory=dict, compare=False, repr=False)
    """Constant inputs of layers that fold them, and outputs of constant modules, for the weights of the planned model.
    Not saved, since the weights of a saved network already contain them."""

    def masks(self) -> dict[str, Tensor]:
        """Return the hard mask of every masked BatchNorm, True for kept channels."""
        masks = {}
        for name, kept in self.sites.items():
            masks[name] = torch.zeros(self.modules[name].width_out, dtype=torch.bool)
            masks[name][list(kept)] = True
        return masks

    def goes(self, name: str) -> bool:
        """Return whether the module `name` is removed as a part of a branch."""
        return f"{name}.".startswith(inside(self.branches))

    def to_json(self) -> str:
        """Return the plan as JSON for :meth:`from_json`."""
        body = asdict(replace(self, constants={}))
        del body["constants"]
        return _compact_json(
            {"format": FORMAT, "version": VERSION, "sha256": _digest(_compact_json(body)), "plan": body}
        )

    @classmethod
    def from_json(cls, text: str) -> PrunePlan:
        """Read a plan written by :meth:`to_json`; raise a PlanError for other or changed text."""
        try:
            document = json.loads(text)
            body = document["plan"] if document["format"] == FORMAT else None
        except (TypeError, ValueError, KeyError, RecursionError) as error:
            raise PlanError(f"a plan must be text written by PrunePlan.to_json(). Got {error!r:.120}.") from error
        if document.get("version") != VERSION:
            raise PlanError(
                f"this softprune reads plans of version {VERSION}. Got version {document.get('version')!r}; "
                "use the softprune that wrote it."
            )
        if not isinstance(body, dict) or document.get("sha256") != _digest(_compact_json(body)):
            raise PlanError("the plan does not match its checksum: it was changed or damaged. Save it again.")
        try:
            modules = {name: _read(ModuleCut, cut) for name, cut in body["modules"].items()}
            parameters = {name: _read(ParameterCut, cut) for name, cut in body["parameters"].items()}
            rows = {key: body[key] for key in ("dense", "sites", "branches")}
            shapes = {key: {name: tuple(row) for name, row in found.items()} for key, found in rows.items()}
            return _read(cls, {**body, **shapes, "modules": modules, "parameters": parameters})
        except (AttributeError, KeyError, TypeError) as error:
            raise PlanError(f"the plan is malformed ({error}). Save it again.") from error

    def check_fits(self, model: nn.Module) -> None:
        """Raise a PlanError unless the plan was made for `model`, the dense model."""
        # The module that defines the class may have another name in another program, such as __main__.
        if type(model).__qualname__.rpartition(".")[2] != self.model.rpartition(".")[2]:
            raise PlanError(
                f"this plan is for {self.model}. Got a model of class {class_name(model)}; "
                "build the network with the class that was pruned."
            )
        shapes = model_shapes(model)
        for key in sorted(self.dense.keys() | shapes.keys()):
            if self.dense.get(key) != shapes.get(key):
                raise PlanError(
                    f"this plan is for a {self.model} whose '{key}' is {self.dense.get(key, 'absent')}. "
                    f"Got {shapes.get(key, 'absent')}; build the model with the arguments it was pruned with."
                )


def inside(modules: Iterable[str]) -> tuple[str, ...]:
    """Return the prefixes of the names of everything inside `modules`."""
    return tuple(f"{module}." for module in modules)


def class_name(model: nn.Module) -> str:
    """Return the qualified class name of a model."""
    return f"{type(model).__module__}.{type(model).__qualname__}"


def model_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all parameters and buffers by name, by which a plan identifies its model."""
    shapes: dict[str, tuple[int, ...]] = {}
    waiting = [("", model)]
    while waiting:  # several times faster than named_parameters(), and called for every plan
        prefix, module = waiting.pop()
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                shapes[prefix + name] = tuple(tensor.shape)
        waiting += [(f"{prefix}{name}.", child) for name, child in module._modules.items() if child is not None]
    return shapes


def _read(record: type[Record], values: dict[str, Any]) -> Record:
    """Return a record from JSON values, with lists converted to tuples."""
    return record(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def _compact_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# --- from masks to a plan ---------------------------------------------------------------------------------------------


def make_plan(
    graph: ChannelGraph, model: nn.Module, masks: Mapping[str, Tensor], *, round_to: int = 1, gathers: bool = True
) -> PrunePlan:
    """Plan the cut by the hard masks (True = keep) of the sites. A site without a mask keeps all channels.

    The plan is exact: it removes only channels that do not affect the outputs. It is valid for the current weights of
    `model`, since dropped channels may become constants that depend on them, for example after another BatchNorm.
    Widths are filled up to multiples of `round_to` with dead channels. Without `gathers`, layers read the whole of a
    shared tensor, and masked channels are set to zero.
    """
    hard = _checked_masks(graph, masks)
    values = constants(graph, model, hard)
    live = Liveness(graph, values, round_to, gathers).solve()
    cuts = _Cuts(live, hard).forward(graph.ops)
    modules, branches = cuts.modules, _constant_branches(graph, live)
    added = {name: branch.outputs if branch.added is None else branch.added for name, branch in branches.items()}
    gone = inside(branches)
    parameters = {
        each.name: ParameterCut(dim=each.dim, width=len(each.atoms), kept=cuts.kept(cuts.present[each.atoms]))
        for each in graph.free_parameters.values()
        if not cuts.present[each.atoms].all() and not each.name.startswith(gone)
    }
    attributes = _attributes(graph, model, live) if graph.attributes_follow else {}
    layers = [layer for layer in graph.layers if not layer.name.startswith(gone)]
    return PrunePlan(
        model=class_name(model),
        dense=model_shapes(model),
        sites={name: cuts.kept(mask) for name, mask in hard.items()},
        modules=modules,
        parameters=parameters,
        macs=graph.unread_macs + sum(each.positions * _weights(each, modules[each.name]) for each in layers),
        dense_macs=dense_macs(graph),
        params=_params(graph, modules, parameters, gone),
        dense_params=sum(graph.params.values()),
        kept_for_shape=tuple(dict.fromkeys(name for name in live.kept_for_shape if not name.startswith(gone))),
        attributes={name: new for name, new in attributes.items() if not f"{name}.".startswith(gone)},
        branches={name: cuts.kept(live.is_present(branch.outputs)) for name, branch in branches.items()},
        shortcuts={name: branch.activation for name, branch in branches.items() if branch.added is not None},
        constants={name: values[atoms] for name, atoms in added.items()}
        | {
            layer.name: values[layer.outputs if modules[layer.name].constant else layer.inputs]
            for layer in graph.layers
            if modules[layer.name].constant or modules[layer.name].folded
        },
    )


def _constant_branches(graph: ChannelGraph, live: Liveness) -> dict[str, Branch]:
    """Return the branches whose kept channels are all constant, or a constant added to their input.

    Branches inside another such branch are left out.
    """

    def is_constant(atoms: IntArray, outputs: IntArray) -> bool:
        return not np.isnan(live.values[atoms[live.is_present(outputs)]]).any()

    found: dict[str, Branch] = {}
    for branch in graph.branches:
        if is_constant(branch.outputs, branch.outputs):
            branch = replace(branch, added=None)
        elif branch.added is None or not is_constant(branch.added, branch.outputs):
            continue
        layers = (layer for layer in graph.layers if layer.name.startswith(inside([branch.name])))
        if not branch.name.startswith(inside(found)) and all(layer.replaceable for layer in layers):
            found[branch.name] = branch
    return found


def _attributes(graph: ChannelGraph, model: nn.Module, live: Liveness) -> dict[str, dict[str, int]]:
    """Return the new values of integer attributes of modules that hold the width of pieces in their forward()."""
    widths: dict[tuple[str, int], set[int]] = {}
    for each in graph.equal_widths:
        counts = {int(live.is_present(piece).sum()) for piece in each.pieces}
        widths.setdefault((each.module, len(each.pieces[0])), set()).update(counts)
    found: dict[str, dict[str, int]] = {}
    for (name, dense), after in widths.items():
        for attribute, value in vars(model.get_submodule(name)).items():
            if type(value) is int and value == dense and after != {dense} and len(after) == 1:
                found.setdefault(name, {})[attribute] = min(after)
    return found


class _Cuts(ForwardAnalysis):
    """Computes the ModuleCut of every module."""

    def __init__(self, live: Liveness, masks: Mapping[str, BoolArray]) -> None:
        super().__init__()
        self.live, self.masks = live, masks
        self.present = live.present[live.graph.classes]
        self.modules: dict[str, ModuleCut] = {}
        self._indices: dict[bytes, Indices] = {}

    def kept(self, flags: BoolArray) -> Indices:
        """Return the indices where `flags` are true, cached since consecutive modules often keep the same channels."""
        key = flags.tobytes()
        if key not in self._indices:
            self._indices[key] = tuple(np.flatnonzero(flags).tolist())
        return self._indices[key]

    def _selection(self, kept: BoolArray, come: BoolArray) -> dict[str, Any]:
        """Return `select` and `source_width` for reading the channels `kept` of a tensor with the channels `come`."""
        positions = kept[come]
        return {} if positions.all() else {"select": self.kept(positions), "source_width": len(positions)}

    def layer(self, op: LayerOp, use: Use) -> None:
        live, present, outputs = self.live, self.present[op.inputs], self.present[op.outputs]
        widths: dict[str, Any] = {"kind": op.kind, "width_in": len(op.inputs), "width_out": len(op.outputs)}
        if live.is_constant(op):
            self.modules[op.name] = ModuleCut(**widths, inputs=(), outputs=self.kept(outputs), constant=True)
            return
        kept, groups = live.read(op), 1
        if depthwise(op):
            kept = np.any(outputs.reshape(op.groups, -1), axis=1)
            groups = int(np.count_nonzero(kept))
        elif op.groups > 1:
            left = live.groups_left(op)
            kept, groups = _filled(kept, present, left, 1), int(np.count_nonzero(left))
        elif live.round_to > 1 or not kept.any():
            kept = _filled(kept, present, np.array([True]), live.round_to)
        self.modules[op.name] = ModuleCut(
            **widths,
            inputs=self.kept(kept),
            outputs=self.kept(outputs),
            groups=groups,
            folded=op.groups == 1 and bool((np.abs(live.values[op.inputs[~kept]]) > 0).any()),  # NaN is not
            **self._selection(kept, present),
        )

    def norm(self, op: NormOp, use: Use) -> None:
        kept = self.present[op.outputs]
        self.modules[op.name] = ModuleCut(
            kind="norm",
            width_in=len(op.inputs),
            width_out=len(op.outputs),
            inputs=self.kept(kept),
            outputs=self.kept(kept),
            zeroed=self.kept(~self.masks[op.name][kept]) if op.name in self.masks else (),
            **self._selection(kept, self.present[op.inputs]),
        )

    def select(self, op: SelectOp) -> None:
        source, outputs = self.present[op.source], self.present[op.outputs]
        where = {int(atom): position for position, atom in enumerate(op.source[source])}
        self.modules[op.name] = ModuleCut(
            kind="select",
            width_in=len(op.source),
            width_out=len(op.outputs),
            inputs=self.kept(source),
            outputs=self.kept(outputs),
            select=tuple(where[int(atom)] for atom in op.inputs[outputs]),
            source_width=len(where),
        )

    def constant(self, op: ConstantOp) -> None:
        kept, width = self.kept(self.present[op.outputs]), len(op.outputs)
        self.modules[op.name] = ModuleCut(kind="constant", width_in=width, width_out=width, inputs=kept, outputs=kept)


def _filled(read: BoolArray, present: BoolArray, left: BoolArray, multiple: int) -> BoolArray:
    """Return the inputs that a layer keeps: those that it reads, with the same number, at least 1, per group."""
    kept, spare = (flags.reshape(len(left), -1) & left[:, None] for flags in (read, present & ~read))
    counts = kept.sum(axis=1, keepdims=True)
    most = -(-max(1, int(counts.max())) // multiple) * multiple
    if (counts < most).any():
        kept |= spare & (spare.cumsum(axis=1) <= most - counts)
    return kept.ravel()


def dense_macs(graph: ChannelGraph) -> int:
    """Return the MACs per sample of the dense network."""
    return graph.unread_macs + sum(
        layer.positions * layer.kernel * len(layer.inputs) * len(layer.outputs) // layer.groups
        for layer in graph.layers
    )


def written(graph: ChannelGraph, plan: PrunePlan) -> int:
    """Return the number of activations per sample that the layers of the compact network write."""
    cuts = plan.modules
    layers = (each for each in graph.layers if not cuts[each.name].constant and not plan.goes(each.name))
    return graph.unread_activations + sum(each.written * len(cuts[each.name].outputs) for each in layers)


def _checked_masks(graph: ChannelGraph, masks: Mapping[str, Tensor]) -> dict[str, BoolArray]:
    widths = {site.name: site.width for site in graph.sites}
    hard = {}
    for name, mask in masks.items():
        if name not in widths:
            raise PlanError(f"masks must be for sites of the model. Got '{name}'; sites are {', '.join(widths)}.")
        array = np.asarray(mask.detach().cpu()) if isinstance(mask, Tensor) else np.asarray(mask)
        if array.shape != (widths[name],):
            raise PlanError(f"the mask of '{name}' must have shape ({widths[name]},). Got {array.shape}.")
        hard[name] = array.astype(bool)
    return graph.member_masks(hard)


def _weights(layer: LayerOp, cut: ModuleCut) -> int:
    return layer.kernel * len(cut.inputs) * len(cut.outputs) // cut.groups


def _params(
    graph: ChannelGraph, modules: Mapping[str, ModuleCut], parameters: Mapping[str, ParameterCut], gone: tuple[str, ...]
) -> int:
    sizes: dict[str, int] = dict(graph.params)
    for record in (*graph.layers, *graph.norms):
        cut = modules[record.name]
        weight, bias = f"{record.name}.weight", f"{record.name}.bias"
        if weight in sizes:
            sizes[weight] = _weights(record, cut) if isinstance(record, LayerOp) else len(cut.outputs)
        if bias in sizes or cut.folded:
            sizes[bias] = 0 if cut.constant else len(cut.outputs)
    total = sum(size for name, size in sizes.items() if not name.startswith(gone))
    for name, parameter in parameters.items():
        if name in graph.params:
            total -= graph.params[name] - graph.params[name] // parameter.width * len(parameter.kept)
    return total
