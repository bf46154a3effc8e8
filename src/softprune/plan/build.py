"""From hard masks to a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from softprune.errors import PlanError
from softprune.graph import ChannelGraph
from softprune.graph.channels import IntArray
from softprune.graph.ops import ConstantOp, LayerCall, LayerOp, NormOp, SelectOp
from softprune.plan.constants import FloatArray, constants
from softprune.plan.cuts import Indices, ModuleCut, ParameterCut
from softprune.plan.liveness import Liveness, depthwise
from softprune.plan.plan import PrunePlan, class_name, model_shapes


def make_plan(
    graph: ChannelGraph,
    model: nn.Module,
    masks: Mapping[str, Tensor],
    *,
    round_to: int = 1,
    gathers: bool = True,
) -> PrunePlan:
    """Decide what every module keeps, given the hard mask (True = keep) of each site.

    `model` is the dense model with its current weights: a dropped channel behind a second BatchNorm is a constant
    that depends on them. Sites without a mask keep everything. The result is exact: no channel that matters to an
    output goes. Widths are filled up to a multiple of `round_to` by channels that are silent. Without `gathers` no
    layer reads a part of a shared stream through an index: it reads all, and silences what is masked.
    """
    hard = _checked_masks(graph, masks)
    values = constants(graph, model, hard)
    live = Liveness(graph, values, round_to, gathers).settle()
    modules: dict[str, ModuleCut] = {}
    aliases: dict[str, str] = {}
    for record in graph.ops:
        layer = record.layer if isinstance(record, LayerCall) else record
        if isinstance(layer, LayerOp):
            modules[layer.name] = _cut_mix(layer, live, values)
            aliases.update(dict.fromkeys(layer.aliases, layer.name))
        elif isinstance(layer, NormOp):
            modules[layer.name] = _cut_norm(layer, live, hard.get(layer.name))
        elif isinstance(layer, SelectOp):
            modules[layer.name] = _cut_gather(layer, live)
        elif isinstance(layer, ConstantOp):
            modules[layer.name] = _cut_source(layer, live)
    parameters = {
        loose.name: ParameterCut(
            dim=loose.dim, width=len(loose.atoms), kept=_kept(live.is_present(loose.atoms))
        )
        for loose in graph.free_parameters
        if loose.dim >= 0 and not live.is_present(loose.atoms).all()
    }
    return PrunePlan(
        model=class_name(model),
        dense=model_shapes(model),
        sites={name: _kept(mask) for name, mask in hard.items()},
        modules=modules,
        aliases=aliases,
        parameters=parameters,
        macs=sum(_macs(mix, modules[mix.name]) for mix in graph.layers)
        + sum(charge.macs * int(live.is_present(charge.atoms).sum()) for charge in graph.extra_macs)
        + graph.unread_macs,
        dense_macs=dense_macs(graph),
        params=_params(model, graph, modules, parameters),
        dense_params=sum(parameter.numel() for parameter in model.parameters()),
        floored=tuple(dict.fromkeys(live.floored)),
        constants={
            mix.name: values[mix.outputs if modules[mix.name].void else mix.inputs]
            for mix in graph.layers
            if modules[mix.name].void or modules[mix.name].folded
        },
    )


def dense_macs(graph: ChannelGraph) -> int:
    """MACs per sample of the whole network."""
    mixed = sum(_dense_macs(mix) for mix in graph.layers)
    return mixed + sum(charge.macs * len(charge.atoms) for charge in graph.extra_macs) + graph.unread_macs


def _checked_masks(graph: ChannelGraph, masks: Mapping[str, Tensor]) -> dict[str, NDArray[np.bool_]]:
    widths = {site.name: site.width for site in graph.sites}
    hard = {}
    for name, mask in masks.items():
        if name not in widths:
            raise PlanError(
                f"masks must be for sites of the model. Got '{name}'; its sites: {', '.join(widths)}."
            )
        array = np.asarray(mask.detach().cpu()) if isinstance(mask, Tensor) else np.asarray(mask)
        if array.shape != (widths[name],):
            raise PlanError(f"the mask of '{name}' must have shape ({widths[name]},). Got {array.shape}.")
        hard[name] = array.astype(bool)
    return hard


def _kept(flags: NDArray[np.bool_]) -> Indices:
    return tuple(np.flatnonzero(flags).tolist())


def _positions(wanted: IntArray, there: IntArray) -> Indices:
    """Where the channels `wanted` sit in a compact tensor that holds the channels `there`."""
    return tuple(np.searchsorted(there, wanted).tolist())


def _cut_norm(norm: NormOp, live: Liveness, mask: NDArray[np.bool_] | None) -> ModuleCut:
    there, outputs = live.is_present(norm.inputs), live.is_present(norm.outputs)
    kept = np.flatnonzero(outputs)
    come = np.flatnonzero(there)
    selects = len(kept) != len(come)
    zeroed = () if mask is None else tuple(int(i) for i in np.flatnonzero(~mask[kept]))
    return ModuleCut(
        kind="norm",
        width_in=len(norm.inputs),
        width_out=len(norm.outputs),
        inputs=tuple(kept.tolist()),
        outputs=tuple(kept.tolist()),
        select=_positions(kept, come) if selects else None,
        source_width=len(come) if selects else 0,
        zeroed=zeroed,
    )


def _cut_gather(gather: SelectOp, live: Liveness) -> ModuleCut:
    source = np.flatnonzero(live.is_present(gather.source))
    outputs = live.is_present(gather.outputs)
    where = {int(atom): position for position, atom in enumerate(gather.source[source])}
    return ModuleCut(
        kind="select",
        width_in=len(gather.source),
        width_out=len(gather.outputs),
        inputs=tuple(source.tolist()),
        outputs=_kept(outputs),
        select=tuple(where[int(atom)] for atom in gather.inputs[outputs]),
        source_width=len(source),
    )


def _cut_source(source: ConstantOp, live: Liveness) -> ModuleCut:
    kept = _kept(live.is_present(source.outputs))
    width = len(source.outputs)
    return ModuleCut(kind="source", width_in=width, width_out=width, inputs=kept, outputs=kept)


def _cut_mix(mix: LayerOp, live: Liveness, values: FloatArray) -> ModuleCut:
    come = np.flatnonzero(live.is_present(mix.inputs))
    outputs = _kept(live.is_present(mix.outputs))
    widths = {"kind": mix.kind, "width_in": len(mix.inputs), "width_out": len(mix.outputs)}
    if live.is_void(mix):
        return ModuleCut(**widths, inputs=(), outputs=outputs, void=True)  # type: ignore[arg-type]
    groups = 1
    if mix.groups == 1:
        kept = come[~live.can_miss(mix)[come]] if live.selects(mix) else come
        kept = kept if len(kept) else come[:1]  # zeros alone: one of them is enough
        extra = -len(kept) % live.round_to
        if extra and len(kept) < len(come):
            kept = np.sort(np.concatenate([kept, np.setdiff1d(come, kept)[:extra]]))
    elif depthwise(mix):
        multiplier = len(mix.outputs) // len(mix.inputs)
        kept = np.unique(np.array(outputs, dtype=np.int64) // multiplier)
        groups = len(kept)
    else:
        kept, groups = _grouped_inputs(mix, live)
    missing = np.setdiff1d(np.arange(len(mix.inputs)), kept)
    constant = values[mix.inputs[missing]]
    selects = len(kept) != len(come)
    return ModuleCut(
        **widths,  # type: ignore[arg-type]
        inputs=tuple(kept.tolist()),
        outputs=outputs,
        groups=groups,
        select=_positions(kept, come) if selects else None,
        source_width=len(come) if selects else 0,
        folded=mix.groups == 1 and bool((np.nan_to_num(constant) != 0).any()),
    )


def _grouped_inputs(mix: LayerOp, live: Liveness) -> tuple[IntArray, int]:
    """The inputs of a grouped convolution after the cut: equally many in every group that is left."""
    size = len(mix.inputs) // mix.groups
    remaining = live.groups_left(mix)
    present = live.is_present(mix.inputs).reshape(mix.groups, -1)
    count = max(1, *(len(live.group_inputs(mix, group)) for group in remaining))
    kept: list[IntArray] = []
    for group in remaining:
        chosen = live.group_inputs(mix, group)
        spare = np.setdiff1d(np.flatnonzero(present[group]), chosen)
        chosen = np.sort(np.concatenate([chosen, spare[: count - len(chosen)]]))
        kept.append(group * size + chosen)
    return np.concatenate(kept), len(remaining)


def _dense_macs(mix: LayerOp) -> int:
    return mix.positions * mix.kernel * len(mix.inputs) * len(mix.outputs) // mix.groups


def _macs(mix: LayerOp, cut: ModuleCut) -> int:
    return 0 if cut.void else mix.positions * mix.kernel * len(cut.inputs) * len(cut.outputs) // cut.groups


def _params(
    model: nn.Module,
    graph: ChannelGraph,
    modules: Mapping[str, ModuleCut],
    parameters: Mapping[str, ParameterCut],
) -> int:
    total = sum(parameter.numel() for parameter in model.parameters())
    for mix in graph.layers:
        cut, names = modules[mix.name], (mix.name, *mix.aliases)
        layers: list[Any] = [model.get_submodule(name) for name in names]
        biases = {id(layer.bias): layer.bias for layer in layers if layer.bias is not None}
        total -= layers[0].weight.numel() + sum(bias.numel() for bias in biases.values())
        if not cut.void:
            total += mix.kernel * len(cut.inputs) * len(cut.outputs) // cut.groups
            total += len(cut.outputs) * max(len(biases), int(cut.folded))
    for norm in graph.norms:
        if model.get_submodule(norm.name).weight is not None:
            total -= 2 * (len(norm.outputs) - len(modules[norm.name].outputs))
    own = dict(model.named_parameters())
    for name, loose in parameters.items():
        if name in own:
            total -= own[name].numel() - own[name].numel() // loose.width * len(loose.kept)
    return total
