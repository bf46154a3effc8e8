"""The channel graph of a network: what `trace` returns and every later step reads."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from torch import Tensor, nn
from torch.fx import Node

from softprune.errors import ModelError
from softprune.graph.builder import GraphBuilder, Opaque, Value, operator_name
from softprune.graph.channels import (
    ConstantOp,
    EqualWidths,
    FreeParameter,
    Frozen,
    IntArray,
    LayerCall,
    LayerOp,
    NormOp,
    Op,
    Reader,
    SelectOp,
    Site,
    UnprovenSize,
)
from softprune.graph.modules import ConstantOutput
from softprune.graph.operators import OPERATORS
from softprune.graph.reader import Example, ExampleLike, ForwardPass, read_passes
from softprune.graph.sites import find_groups, find_sites
from softprune.module_state import first_uninitialised

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class ChannelGraph:
    """Which channels of which modules are one, in the order of execution."""

    example: Example
    """The call that was given, on a few of its samples."""
    sites: tuple[Site, ...]
    frozen: tuple[Frozen, ...]
    ops: tuple[Op, ...]
    equal_widths: tuple[EqualWidths, ...]
    free_parameters: tuple[FreeParameter, ...]
    classes: IntArray
    """Atom -> its class; atoms of one class are kept or cut together."""
    pinned: IntArray
    """Classes that are always kept."""
    outputs: tuple[IntArray, ...]
    """Atoms of the model's outputs."""
    constants: tuple[IntArray, ...]
    """Atoms of constants in forward()."""
    unproven_sizes: tuple[UnprovenSize, ...]
    """What explicit sizes in forward() may fix: a trial cut decides."""
    unreached: tuple[str, ...]
    """Parameters that no operator reads, in evaluation or in training: the example does not lead there."""
    unknown: dict[str, str]
    """Operators without a rule that freeze channels -> one place where they stand."""

    params: dict[str, int]
    """How many numbers each parameter has."""
    layers: tuple[LayerOp, ...]
    """The convolutions and linear layers, each once."""
    norms: tuple[NormOp, ...]
    """The BatchNorms, each once."""

    grouped: tuple[Site, ...] = ()
    """Sites of other kinds that BatchNorms could form; :meth:`with_kinds` chooses among them."""
    attributes_follow: bool = True
    """Whether integers on a module that repeat the width of pieces in its forward() are cut, too."""
    unread_macs: int = 0
    """MACs per sample of operators without a rule, which no cut changes."""
    unread_activations: int = 0
    """What they write per sample."""

    @cached_property
    def readers(self) -> tuple[Reader, ...]:
        """The modules that read channels, in order, once for every call."""
        called = [op.layer if isinstance(op, LayerCall) else op for op in self.ops]
        return tuple(
            Reader(op, self.classes[op.inputs], self.classes[op.outputs])
            for op in called
            if isinstance(op, (LayerOp, NormOp, SelectOp))
        )

    def freeze(self, atoms: IntArray, reason: str) -> ChannelGraph:
        """Return the graph with the classes of `atoms` pinned, and the sites that lose every channel by it frozen."""
        pinned = np.union1d(self.pinned, self.classes[atoms])
        channels = {norm.name: self.classes[norm.outputs] for norm in self.norms}
        lost = {site.name: reason for site in self.sites if np.isin(channels[site.name], pinned).all()}
        return replace(self, pinned=pinned).only(lost)

    def only(self, left_out: Mapping[str, str]) -> ChannelGraph:
        """Return the graph with the sites in `left_out` frozen, each for the reason given there."""
        if not left_out:
            return self
        frozen = [
            Frozen(name, site.width, left_out[site.name])
            for site in self.sites
            if site.name in left_out
            for name in site.members
        ]
        return replace(
            self, sites=tuple(site for site in self.sites if site.name not in left_out), frozen=(*self.frozen, *frozen)
        )

    def with_kinds(self, kinds: Collection[str], *, every_norm: bool = False) -> ChannelGraph:
        """Return the graph with sites of these kinds, too: "sum", "linear", "stream".

        A stream takes its BatchNorms from sums and from sites of one BatchNorm. With `every_norm`, each BatchNorm that
        only what follows it speaks against is a site of its own (activation "none").
        """
        free = {frozen.name for frozen in self.frozen} | {site.name for site in self.sites}
        more: list[Site] = []
        for site in sorted(self.grouped, key=lambda site: site.kind != "stream"):
            if site.kind in kinds and free.issuperset(site.members):
                more.append(site)
                free -= set(site.members)
        if every_norm:
            more += [Site(each.name, each.width, "none") for each in self.frozen if each.maskable and each.name in free]
        taken = {name for site in more for name in site.members}
        order = {norm.name: number for number, norm in enumerate(self.norms)}
        sites = [*(site for site in self.sites if site.name not in taken), *more]
        return replace(
            self,
            sites=tuple(sorted(sites, key=lambda site: order[site.name])) if more else self.sites,
            frozen=tuple(frozen for frozen in self.frozen if frozen.name not in taken),
        )

    def further_kinds(self) -> dict[str, int]:
        """Return the kinds of sites that would mask frozen BatchNorms, and how many of them."""
        frozen = {each.name for each in self.frozen if each.maskable}
        found: dict[str, int] = {}
        for site in self.grouped:
            count = len(frozen.intersection(site.members))
            if count:
                found[site.kind] = found.get(site.kind, 0) + count
        return found

    def member_masks(self, masks: Mapping[str, T]) -> dict[str, T]:
        """Return the masks of sites as masks of their BatchNorms."""
        sites = {site.name: site for site in self.sites}
        return {name: mask for site, mask in masks.items() for name in sites[site].members}

    @property
    def site_of(self) -> dict[str, str]:
        """Return BatchNorm that carries a mask -> its site."""
        return {name: site.name for site in self.sites for name in site.members}

    def feeder(self, name: str) -> str | None:
        """Return the convolution or linear layer whose outputs, and nothing else, the BatchNorm `name` reads."""
        norm = next(norm for norm in self.norms if norm.name == name)
        for layer in self.layers:
            fed = [np.array_equal(use.inputs, source.outputs) for use in norm.uses for source in layer.uses]
            if sum(fed) == len(norm.uses):
                return layer.name
        return None


# --- from operators to channels ------------------------------------------------------------------------------------


def _walk(builder: GraphBuilder, forward: ForwardPass) -> None:
    """Let the rule of each operator relate its channels, in order."""
    builder.training, builder.values = forward.training, {}
    overwritten = _overwritten_by(forward.nodes)
    for node in forward.nodes:
        if node.op == "placeholder":
            builder.values[node] = _placeholder(builder, node)
        elif node.op == "output":
            for value in builder.values_of(node.all_input_nodes):
                builder.outputs.append(value.atoms.ravel())
                builder.table.pin(value.atoms, "they are an output of the model")
        else:
            builder.values[node] = _call(builder, node)
        for stale in overwritten.get(node, ()):
            _overwrite(builder, stale, node)


def _placeholder(builder: GraphBuilder, node: Node) -> Any:
    example = node.meta["val"]
    if "tensor" in node.meta:
        return node  # a parameter: read by the rule that knows what it is
    if "made" not in node.meta:
        return builder.pinned_value(example.shape, f"they are combined with the model's input '{node.name}'")
    # forward() copies the tensors that it makes. One that is stored somewhere may have changed at the cut.
    made = all(operator_name(user) == "lift_fresh_copy" for user in node.users)
    known = made and type(example) is Tensor and example.numel() == 1 and not example.is_meta
    return builder.constant_value(example.shape, example.item() if known else None)


def _call(builder: GraphBuilder, node: Node) -> Any:
    """Return what an operator gives, by its rule; without one, what reaches it is frozen."""
    name, example = operator_name(node), node.meta["val"]
    if name == "getitem":
        container: Any = builder.values[node.args[0]]  # type: ignore[index]
        return container[node.args[1]] if isinstance(container, list) else container  # type: ignore[index]
    if isinstance(builder.module_of(node), ConstantOutput):
        return _constant_output(builder, node)
    entry = OPERATORS.get(name)
    if entry is not None:
        builder.asked.clear()
        try:
            result = entry.rule(builder, node, entry)
        except Opaque as what:
            return builder.opaque(node, builder.reason(node, what))
        # Kept whole: what the operator reads and its rule asks nothing about, such as the grid to sample at.
        for value in builder.values_of([given for given in node.all_input_nodes if given not in builder.asked]):
            builder.table.pin(value.atoms, builder.reason(node, "reads them beside its data"))
        return result
    if isinstance(example, Tensor) and not node.all_input_nodes:
        return builder.constant_value(example.shape)  # arange, eye, randn
    place = builder.place(node)
    reason = f"they reach {node.target} in {place}, an operator without a rule"
    builder.unknown[reason] = (str(node.target), place)
    return builder.opaque(node, reason)


def _constant_output(builder: GraphBuilder, node: Node) -> Value:
    """Return the constant of a `ConstantOutput`: its last operator gives it the layer's shape."""
    name = builder.module_name(node)
    module = builder.modules[name]
    assert isinstance(module, ConstantOutput)
    shape = tuple(node.meta["val"].shape)
    dim = 1 if len(shape) > 2 else len(shape) - 1
    if shape[dim] != len(module.value):
        return builder.pinned_value(shape, "a ConstantOutput gives them")
    if name not in builder.constant_outputs:
        atoms = builder.constant_outputs[name] = builder.table.fresh(len(module.value))
        builder.ops.append(ConstantOp(name, atoms, module.value.detach().double().cpu()))
    return Value.with_channels(shape, dim, builder.constant_outputs[name])


# --- writes through views ------------------------------------------------------------------------------------------


def _overwrite(builder: GraphBuilder, stale: Node, writer: Node) -> None:
    """Freeze a tensor into whose memory `writer` wrote, and that is read again: what it holds then has no rule."""
    value = builder.values.get(stale)
    if isinstance(value, Value):
        reason = builder.reason(writer, "overwrites a part of them")
        builder.table.pin(value.atoms, reason)
        sources = [value, *builder.values_of([writer])]  # an input may reach it through what was written
        builder.values[stale] = builder.mixed(value.shape, reason, [source.atoms for source in sources])


def _overwritten_by(nodes: Sequence[Node]) -> dict[Node, list[Node]]:
    """Return the tensors that a node changes because they share the memory that it writes, and that are read again.

    The graph follows ``x += y`` and ``relu(x, inplace=True)`` itself: later readers of `x` read the result. It does
    not follow writes through views: after ``x[:, :4] = 0`` later readers of `x` still point at the node before it.
    """
    order = {node: number for number, node in enumerate(nodes)}
    memory: dict[Node, set[Node]] = {}
    """Node -> all that share its memory."""
    found: dict[Node, list[Node]] = {}
    for node, here in order.items():
        schema, first = getattr(node.target, "_schema", None), next(iter(node.args), None)
        shares = schema is not None and any(result.alias_info is not None for result in schema.returns)
        if isinstance(first, Node) and (shares or node.target is operator.getitem):
            memory[node] = memory.setdefault(first, {first})
            memory[node].add(node)
        for parameter, written in zip([] if schema is None else schema.arguments, node.args, strict=False):
            if parameter.alias_info is not None and parameter.alias_info.is_write and isinstance(written, Node):
                earlier = [other for other in memory.get(written, ()) if order[other] < here]
                found[node] = [other for other in earlier if any(order[user] > here for user in other.users)]
    return found


# --- the way from a model to its graph ----------------------------------------------------------------------------


def check_is_module(model: object, name: str = "model") -> None:
    """Raise unless it is a network, built: a class, or arguments in another order, are the usual mistakes."""
    if not isinstance(model, nn.Module):
        got = f"the class {model.__name__}, not an object of it" if isinstance(model, type) else type(model).__name__
        raise ModelError(f"`{name}` must be a torch.nn.Module. Got {got}; build the network and pass it.")


def check_is_bare(model: nn.Module, name: str, then: str = "") -> None:
    """Raise for a wrapper, whose names and class the compact network and its file would have."""
    inner = "_orig_mod" if "_orig_mod" in model._modules else "module"
    if inner == "_orig_mod" or isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ModelError(
            f"`{name}` must be the network itself, not a wrapper. Got {type(model).__name__}; pass "
            f"{name}.{inner}{then}."
        )


def _check_values(model: nn.Module, example: ExampleLike) -> None:
    """Raise where torch.export would only stumble."""
    missing = first_uninitialised(model)
    if missing is not None and missing[1] == "lazy":
        raise ModelError(f"parameters must have shapes. Got '{missing[0]}', a lazy one; run the model once before.")
    for name, module in model.named_modules():
        if hasattr(module, "fake_quant_enabled"):  # by an attribute, since torch warns where the class is imported
            raise ModelError(
                f"a network prepared for quantisation-aware training cannot be pruned. Got {type(module).__name__} at "
                f"'{name}'; prune first, then prepare the compact network."
            )
    given = Example.of(example)
    if given.batch_size() == 0 or (missing is None and any(tensor.is_meta for tensor in given.tensors())):
        raise ModelError(
            "`example` must hold at least one sample, with values. Got "
            f"{', '.join(f'{tuple(t.shape)} on {t.device}' for t in given.tensors())}; torch.randn(2, ...) will do."
        )


def _keep_shared(builder: GraphBuilder) -> None:
    """Keep modules whole whose parameters another module has, too, or whose parameters forward() reads by itself."""
    owners: dict[int, list[str]] = {}
    for name, module in builder.modules.items():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    free = {id(builder.tensors[name]): read for name, read in builder.free_parameters.items()}
    called: dict[str, LayerOp | NormOp] = {**builder.layers, **builder.norms}
    for key, names in owners.items():
        records, outside = [called[name] for name in names if name in called], free.get(key)
        if len(names) == 1 and not (records and outside):
            continue
        others = " and ".join(map(repr, names[1:])) or "forward()"
        reason = f"parameters of '{names[0]}' are also used outside its module, by {others}"
        if outside:
            builder.table.pin(outside.atoms, reason)
        for record in records:
            builder.table.pin(record.inputs, reason)
            builder.table.pin(record.outputs, reason)
            record.selectable = False
            if isinstance(record, LayerOp):
                record.replaceable = False


def _freezing_operators(builder: GraphBuilder) -> dict[str, str]:
    """Return the operators without a rule that freeze channels of layers or BatchNorms, and where they stand."""
    records: list[LayerOp | NormOp] = [*builder.layers.values(), *builder.norms.values()]
    reasons = set().union(*(builder.table.reasons(record.outputs) for record in records))
    return dict(builder.unknown[reason] for reason in builder.unknown if reason in reasons)


def trace(model: nn.Module, example: ExampleLike) -> ChannelGraph:
    """Record the operators of `model` and relate its channels. The model is left as it was."""
    check_is_module(model)
    check_is_bare(model, "model", ", and wrap or compile the network after the pruner is made")
    _check_values(model, example)
    passes = read_passes(model, example)
    read = passes[0].example
    builder = GraphBuilder(model, batch=read.batch_size() or 1)
    for forward in passes:
        _walk(builder, forward)
    _keep_shared(builder)
    sites, frozen = find_sites(builder)
    return ChannelGraph(
        example=Example.of(example).to_model(model).first(2) if passes[0].any_batch else read,
        sites=sites,
        frozen=frozen,
        grouped=find_groups(builder, sites, frozen),
        ops=tuple(builder.ops),
        params={name: parameter.numel() for name, parameter in model.named_parameters()},
        layers=tuple(builder.layers.values()),
        norms=tuple(builder.norms.values()),
        equal_widths=tuple(builder.equal_widths),
        free_parameters=tuple(builder.free_parameters.values()),
        classes=builder.table.classes(),
        pinned=builder.table.pinned(),
        outputs=tuple(builder.outputs),
        unproven_sizes=tuple(builder.unproven_sizes),
        constants=tuple(builder.constants),
        unreached=tuple(sorted(set.intersection(*(each.parameters_unread(model) for each in passes)))),
        unknown=_freezing_operators(builder),
    )
