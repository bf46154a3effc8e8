"""Make a plan from hard masks."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from softprune.cut.constants import constants
from softprune.cut.liveness import Liveness, depthwise
from softprune.cut.plan import Indices, ModuleCut, ParameterCut, PrunePlan, class_name, model_shapes
from softprune.errors import PlanError
from softprune.graph import ChannelGraph
from softprune.graph.channels import IntArray
from softprune.graph.ops import ConstantOp, ForwardAnalysis, LayerOp, NormOp, SelectOp, Use


def make_plan(
    graph: ChannelGraph, model: nn.Module, masks: Mapping[str, Tensor], *, round_to: int = 1, gathers: bool = True
) -> PrunePlan:
    """Decide what every module keeps, given the hard mask (True = keep) of each site; without one it keeps everything.

    The plan is exact: it removes no channel that affects an output. It holds for the weights that `model` has now: a
    dropped channel after a second BatchNorm is a constant that depends on them. Widths are filled up to multiples of
    `round_to` with dead channels. Without `gathers` a layer reads the whole of a shared stream, and masked channels
    are zeroed.
    """
    hard = _checked_masks(graph, masks)
    values = constants(graph, model, hard)
    live = Liveness(graph, values, round_to, gathers).solve()
    cuts = _Cuts(live, hard)
    cuts.forward(graph.ops)
    modules = cuts.modules
    parameters = {
        each.name: ParameterCut(dim=each.dim, width=len(each.atoms), kept=_kept(live.is_present(each.atoms)))
        for each in graph.free_parameters
        if not live.is_present(each.atoms).all()
    }
    return PrunePlan(
        model=class_name(model),
        dense=model_shapes(model),
        sites={name: _kept(mask) for name, mask in hard.items()},
        modules=modules,
        aliases=cuts.aliases,
        parameters=parameters,
        macs=sum(layer.positions * _weights(layer, modules[layer.name]) for layer in graph.layers)
        + sum(extra.macs * int(live.is_present(extra.atoms).sum()) for extra in graph.extra_macs)
        + graph.unread_macs,
        dense_macs=dense_macs(graph),
        params=_params(model, graph, modules, parameters),
        dense_params=sum(parameter.numel() for parameter in model.parameters()),
        kept_for_shape=tuple(dict.fromkeys(live.kept_for_shape)),
        constants={
            layer.name: values[layer.outputs if modules[layer.name].constant else layer.inputs]
            for layer in graph.layers
            if modules[layer.name].constant or modules[layer.name].folded
        },
    )


class _Cuts(ForwardAnalysis):
    """What every module keeps."""

    def __init__(self, live: Liveness, masks: Mapping[str, NDArray[np.bool_]]) -> None:
        super().__init__()
        self.live, self.masks = live, masks
        self.modules: dict[str, ModuleCut] = {}
        self.aliases: dict[str, str] = {}

    def layer(self, op: LayerOp, use: Use) -> None:
        self.modules[op.name] = _cut_layer(op, self.live)
        self.aliases.update(dict.fromkeys(op.aliases, op.name))

    def norm(self, op: NormOp, use: Use) -> None:
        come, kept = (np.flatnonzero(self.live.is_present(atoms)) for atoms in (op.inputs, op.outputs))
        self.modules[op.name] = ModuleCut(
            kind="norm",
            width_in=len(op.inputs),
            width_out=len(op.outputs),
            inputs=tuple(kept.tolist()),
            outputs=tuple(kept.tolist()),
            zeroed=_kept(~self.masks[op.name][kept]) if op.name in self.masks else (),
            **_selection(kept, come),
        )

    def select(self, op: SelectOp) -> None:
        source = np.flatnonzero(self.live.is_present(op.source))
        outputs = self.live.is_present(op.outputs)
        where = {int(atom): position for position, atom in enumerate(op.source[source])}
        self.modules[op.name] = ModuleCut(
            kind="select",
            width_in=len(op.source),
            width_out=len(op.outputs),
            inputs=tuple(source.tolist()),
            outputs=_kept(outputs),
            select=tuple(where[int(atom)] for atom in op.inputs[outputs]),
            source_width=len(source),
        )

    def constant(self, op: ConstantOp) -> None:
        kept, width = _kept(self.live.is_present(op.outputs)), len(op.outputs)
        self.modules[op.name] = ModuleCut(kind="constant", width_in=width, width_out=width, inputs=kept, outputs=kept)


def dense_macs(graph: ChannelGraph) -> int:
    """Return the MACs per sample of the whole network."""
    layers = sum(
        layer.positions * layer.kernel * len(layer.inputs) * len(layer.outputs) // layer.groups
        for layer in graph.layers
    )
    return layers + sum(extra.macs * len(extra.atoms) for extra in graph.extra_macs) + graph.unread_macs


def _checked_masks(graph: ChannelGraph, masks: Mapping[str, Tensor]) -> dict[str, NDArray[np.bool_]]:
    widths = {site.name: site.width for site in graph.sites}
    hard = {}
    for name, mask in masks.items():
        if name not in widths:
            raise PlanError(f"masks must be for sites of the model. Got '{name}'; its sites: {', '.join(widths)}.")
        array = np.asarray(mask.detach().cpu()) if isinstance(mask, Tensor) else np.asarray(mask)
        if array.shape != (widths[name],):
            raise PlanError(f"the mask of '{name}' must have shape ({widths[name]},). Got {array.shape}.")
        hard[name] = array.astype(bool)
    return graph.member_masks(hard)


def _kept(flags: NDArray[np.bool_]) -> Indices:
    return tuple(np.flatnonzero(flags).tolist())


def _selection(kept: IntArray, come: IntArray) -> dict[str, Any]:
    """Return how a module reads the channels `kept` of a compact tensor that holds the channels `come`."""
    if len(kept) == len(come):
        return {}
    return {"select": tuple(np.searchsorted(come, kept).tolist()), "source_width": len(come)}


def _cut_layer(layer: LayerOp, live: Liveness) -> ModuleCut:
    come = np.flatnonzero(live.is_present(layer.inputs))
    outputs = _kept(live.is_present(layer.outputs))
    widths = {"kind": layer.kind, "width_in": len(layer.inputs), "width_out": len(layer.outputs)}
    if live.is_constant(layer):
        return ModuleCut(**widths, inputs=(), outputs=outputs, constant=True)  # type: ignore[arg-type]
    groups = 1
    if layer.groups == 1:
        kept = come[~live.dispensable(layer)[come]] if live.selects(layer) else come
        kept = kept if len(kept) else come[:1]  # all of them are zero: one is enough
        extra = -len(kept) % live.round_to
        if extra:
            kept = np.sort(np.concatenate([kept, np.setdiff1d(come, kept)[:extra]]))
    elif depthwise(layer):
        multiplier = len(layer.outputs) // len(layer.inputs)
        kept = np.flatnonzero(live.is_present(layer.outputs).reshape(-1, multiplier).any(axis=1))
        groups = len(kept)
    else:
        kept, groups = _grouped_inputs(layer, live)
    missing = np.ones(len(layer.inputs), dtype=bool)
    missing[kept] = False
    folded = layer.groups == 1 and bool((np.abs(live.values[layer.inputs[missing]]) > 0).any())  # NaN is not
    return ModuleCut(
        **widths,  # type: ignore[arg-type]
        inputs=tuple(kept.tolist()),
        outputs=outputs,
        groups=groups,
        folded=folded,
        **_selection(kept, come),
    )


def _grouped_inputs(layer: LayerOp, live: Liveness) -> tuple[IntArray, int]:
    """Return the inputs of a grouped convolution after the cut, equally many in every remaining group."""
    size = len(layer.inputs) // layer.groups
    remaining = live.groups_left(layer)
    present = live.is_present(layer.inputs).reshape(layer.groups, -1)
    count = max(1, *(len(live.group_inputs(layer, group)) for group in remaining))
    kept: list[IntArray] = []
    for group in remaining:
        chosen = live.group_inputs(layer, group)
        spare = np.setdiff1d(np.flatnonzero(present[group]), chosen)
        chosen = np.sort(np.concatenate([chosen, spare[: count - len(chosen)]]))
        kept.append(group * size + chosen)
    return np.concatenate(kept), len(remaining)


def _weights(layer: LayerOp, cut: ModuleCut) -> int:
    return layer.kernel * len(cut.inputs) * len(cut.outputs) // cut.groups


def _params(
    model: nn.Module, graph: ChannelGraph, modules: Mapping[str, ModuleCut], parameters: Mapping[str, ParameterCut]
) -> int:
    own = dict(model.named_parameters())
    submodules: dict[str, Any] = dict(model.named_modules(remove_duplicate=False))
    sizes: dict[object, int] = {id(parameter): parameter.numel() for parameter in own.values()}
    layers = [(layer, name) for layer in graph.layers for name in (layer.name, *layer.aliases)]
    records: list[tuple[LayerOp | NormOp, str]] = [*layers, *((norm, norm.name) for norm in graph.norms)]
    for _, name in records:
        sizes.pop(id(submodules[name].weight), None)
        sizes.pop(id(submodules[name].bias), None)
    for record, name in records:
        cut, module = modules[record.name], submodules[name]
        if cut.constant:
            continue
        if isinstance(record, LayerOp):
            sizes[id(module.weight)] = _weights(record, cut)
        elif module.weight is not None:
            sizes[id(module.weight)] = len(cut.outputs)
        if cut.folded or module.bias is not None:  # a bias that two share is one, unless the cut changes its values
            sizes[name if cut.folded or cut.zeroed else id(module.bias)] = len(cut.outputs)
    total = sum(sizes.values())
    for name, parameter in parameters.items():
        if name in own:
            total -= own[name].numel() - own[name].numel() // parameter.width * len(parameter.kept)
    return total
