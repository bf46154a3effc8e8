"""Cut a network and its optimizer: a new module of the same class, with the channels of a plan removed."""

import copy
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.utils import _pytree as pytree

from softprune.cut.analyses import constant_contribution
from softprune.cut.plan import Indices, ModuleCut, PrunePlan, model_shapes
from softprune.errors import ModelError, PlanError
from softprune.graph.channels import FloatArray
from softprune.graph.modules import CHANNELS_LAST, ConstantOutput, Select, Shortcut, select_input
from softprune.log import get_logger
from softprune.masks import unmask_model_

logger = get_logger(__name__)

HISTORY = "_softprune_plans"
"""Attribute of a compact model: the plans that led to it from its dense definition, in order.

The definition is what its class builds, or a compact model that was changed after its cut."""
SHAPES = "_softprune_shapes"
"""Attribute of a compact model: the shapes of its parameters and buffers after the cut."""


def plans_of(model: nn.Module) -> tuple[PrunePlan, ...]:
    """Return the plans that led to `model` from its dense definition; empty for a dense model."""
    return getattr(model, HISTORY, ())


def plain_copy(model: nn.Module, *, share: bool = False) -> nn.Module:
    """Return a deep copy of `model` without masks. Arguments as in :func:`duplicated`."""
    copied = duplicated(model, share=share)
    unmask_model_(copied)
    return copied


def duplicated(model: nn.Module, *, share: bool = False) -> nn.Module:
    """Return a deep copy of `model`.

    With `share` the parameters keep the memory of the originals, for a copy that is only called.
    """
    # Subclasses and tensors of inference mode copy themselves in their own way.
    plain = [p for p in model.parameters() if type(p) is nn.Parameter and p.layout == torch.strided]
    plain = [p for p in plain if not p.is_inference()]
    # Not of p.detach(), with which autograd would count changes of the copy as changes of the original.
    memo: dict[int, Any] = {
        id(p): nn.Parameter(p.data if share else p.data.clone(), requires_grad=p.requires_grad) for p in plain
    }
    # A module has a dozen dictionaries of hooks, which deepcopy would rebuild one by one.
    owned = (value for module in model.modules() for value in vars(module).values())
    memo |= {id(value): type(value)() for value in owned if type(value) in (dict, OrderedDict) and not value}
    # What forward() computed and left on a module, a feature for another loss, say: deepcopy refuses its graph.
    left = pytree.tree_leaves([vars(module) for module in model.modules()])
    memo |= {id(each): each.detach() for each in left if isinstance(each, Tensor) and not each.is_leaf}
    try:
        duplicate: nn.Module = copy.deepcopy(model, memo)
    except Exception as error:
        raise ModelError(
            f"softprune works on copies of a model, so that copy.deepcopy must take it. Got {type(error).__name__} "
            f"from a {type(model).__name__}: {error}. Locks, open files and generators that are "
            "attributes of a module are the usual cause: make them where they are used."
        ) from error
    modes = {name: module.training for name, module in model.named_modules()}
    for name, module in duplicate.named_modules():  # torch.fx's copies of itself come back in training mode
        module.training = modes.get(name, module.training)
    return duplicate


def apply_plan(plan: PrunePlan, model: nn.Module) -> nn.Module:
    """Return a new module of `model`'s class that keeps what `plan` keeps; `model` is left as it was.

    A plan read from a file knows no constants: folded biases then start at zero, for the weights to be loaded.
    """
    plan.check_fits(model)
    compact = plain_copy(model)
    cut_(plan, compact)
    return compact


def cut_(plan: PrunePlan, compact: nn.Module) -> None:
    """Remove what `plan` removes from the modules of `compact`, which has no masks.

    Tensors are replaced and none is written to, so that :func:`softprune.module_state.attributes_kept` undoes it.
    """
    # The earlier plans lead to the network as it was then, not to one with another head, say.
    earlier = plans_of(compact) if changed_since_the_cut(compact) is None else ()
    parents = parents_of(compact)
    # Indices first: the layer that an index belongs to may be replaced, and the index with it.
    for name, cut in sorted(plan.modules.items(), key=lambda item: item[1].kind != "select"):
        if cut.changes and not plan.goes(name):
            _cut_module(compact.get_submodule(name), cut, plan.constants.get(name), parents)
    for name, kept in plan.branches.items():
        _put_constant(compact.get_submodule(name), kept, plan.constants.get(name), parents, plan.shortcuts.get(name))
    for name, loose in plan.parameters.items():
        path, _, attribute = name.rpartition(".")
        owner = compact.get_submodule(path)
        _replace(owner, attribute, take(getattr(owner, attribute), loose.dim, loose.kept))
    for name, attributes in plan.attributes.items():
        vars(compact.get_submodule(name)).update(attributes)
    setattr(compact, HISTORY, (*earlier, plan))
    setattr(compact, SHAPES, model_shapes(compact))


def changed_since_the_cut(compact: nn.Module) -> str | None:
    """Return what of a compact network was changed since its cut, in words; None if nothing was."""
    now = model_shapes(compact)
    before: dict[str, tuple[int, ...]] = getattr(compact, SHAPES, now)
    for name in sorted(now.keys() | before.keys()):
        if before.get(name) != now.get(name):
            return f"'{name}' was {before.get(name, 'absent')} and is {now.get(name, 'absent')}"
    return None


Parents = dict[nn.Module, list[tuple[nn.Module, str]]]
"""Module -> the modules that it is registered in, with its name there."""


def parents_of(model: nn.Module) -> Parents:
    """Return where every module is registered: at several places if it has several names."""
    parents: Parents = {}
    for parent in model.modules():
        for attribute, child in parent._modules.items():
            if child is not None:
                parents.setdefault(child, []).append((parent, attribute))
    return parents


def _cut_module(module: nn.Module, cut: ModuleCut, constants: FloatArray | None, parents: Parents) -> None:
    if cut.constant:
        _put_constant(module, cut.outputs, constants, parents)
        return
    if cut.kind == "select":
        assert isinstance(module, Select)
        assert cut.select is not None
        module.index = torch.tensor(cut.select, device=module.index.device)
        module.source_width = cut.source_width
        return
    correction = _folded(module, cut, constants) if cut.folded else None
    for attribute, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:
            part = slice_tensor(cut, attribute, tensor)
            if part.shape != tensor.shape:  # what stays whole may be another module's as well
                _replace(module, attribute, part)
    if correction is not None:
        _add_bias(module, correction)
    _describe(module, cut)
    for attribute in ("weight", "bias") if cut.zeroed else ():
        old: Tensor = getattr(module, attribute)
        _replace(module, attribute, old.detach().index_fill(0, torch.tensor(cut.zeroed, device=old.device), 0))
    if cut.select is not None:
        device = next((t.device for t in (*module.parameters(), *module.buffers())), torch.device("cpu"))
        if isinstance(getattr(module, "select", None), nn.Module):
            raise PlanError(f"a {type(module).__name__} has a Select, which its own cut should have shortened.")
        module.add_module("select", Select(torch.tensor(cut.select, device=device), cut.source_width))
        module.register_forward_pre_hook(select_input, with_kwargs=True)


def _replace(owner: nn.Module, attribute: str, tensor: Tensor) -> None:
    """Put `tensor` in place of a parameter or buffer."""
    if attribute in owner._parameters:
        tensor = nn.Parameter(tensor, requires_grad=owner._parameters[attribute].requires_grad)  # type: ignore[union-attr]
    setattr(owner, attribute, tensor)


def _describe(module: nn.Module, cut: ModuleCut) -> None:
    """Bring the module's own numbers in line with its tensors."""
    widths = {
        "in_channels": len(cut.inputs),
        "out_channels": len(cut.outputs),
        "in_features": len(cut.inputs),
        "out_features": len(cut.outputs),
        "num_features": len(cut.outputs),
    }
    for attribute, width in widths.items():
        if hasattr(module, attribute):
            setattr(module, attribute, width)
    if hasattr(module, "groups"):
        module.groups = cut.groups  # type: ignore[assignment]


def _put_constant(
    module: nn.Module, outputs: Indices, constants: FloatArray | None, parents: Parents, activation: str | None = None
) -> None:
    """Put a constant in the place of `module`, or with an `activation` its sum with the module's input."""
    weight = next(module.parameters())
    # Channels that stay for the shapes' sake only have no constant; no layer reads them.
    kept = np.zeros(len(outputs)) if constants is None else np.nan_to_num(constants)[list(outputs)]
    value = torch.from_numpy(kept).to(weight.device, weight.dtype)
    replacement = ConstantOutput(module, value) if activation is None else Shortcut(module, value, activation)
    replacement.train(module.training)
    for parent, attribute in parents[module]:
        parent._modules[attribute] = replacement


def _folded(module: nn.Module, cut: ModuleCut, constants: FloatArray | None) -> Tensor:
    """Return what the dropped constant inputs add to the kept outputs."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    if constants is None:
        return torch.zeros(len(cut.outputs), device=weight.device, dtype=weight.dtype)
    total = constant_contribution(weight, np.array(cut.inputs, dtype=np.int64), constants)
    return total[list(cut.outputs)].to(weight.device, weight.dtype)


def _add_bias(module: nn.Module, correction: Tensor) -> None:
    """Add `correction` to the bias of `module`, which may have none so far."""
    old: nn.Parameter | None = module.bias  # type: ignore[assignment]
    trains = (module.weight if old is None else old).requires_grad
    bias = correction if old is None else old.detach() + correction
    module.bias = nn.Parameter(bias, requires_grad=trains)  # type: ignore[arg-type]


def take(tensor: Tensor, dim: int, kept: Sequence[int]) -> Tensor:
    """Return the entries `kept` of `tensor` along `dim` as a new tensor."""
    part = _part(tensor, dim, kept)
    # A view of a tensor of inference mode does not know that it is one.
    return part.clone() if part._is_view() or part.is_inference() else part


def _part(tensor: Tensor, dim: int, kept: Sequence[int]) -> Tensor:
    """Return the entries `kept` of `tensor` along `dim`, a view where they are a range."""
    size = len(kept)
    if size and kept[-1] - kept[0] + 1 == size and tuple(kept) == tuple(range(kept[0], kept[0] + size)):
        return tensor.detach().narrow(dim, kept[0], size)
    index = torch.from_numpy(np.fromiter(kept, np.int64, size))  # torch.tensor takes several times as long
    return tensor.detach().index_select(dim, index.to(tensor.device))


def slice_tensor(cut: ModuleCut, attribute: str, tensor: Tensor) -> Tensor:
    """Return the part of a module's own parameter or buffer that stays, in its memory format."""
    if cut.kind in ("norm", "constant") and tensor.shape[:1] == (cut.width_out,):
        return take(tensor, 0, cut.outputs)
    if attribute == "weight":
        return _as_before(tensor, _slice_weight(cut, tensor))
    if attribute == "bias":
        return take(tensor, 0, cut.outputs)
    return tensor.detach().clone()


def _slice_weight(cut: ModuleCut, weight: Tensor) -> Tensor:
    transposed = cut.kind == "conv_transpose"
    rows, columns = (cut.inputs, cut.outputs) if transposed else (cut.outputs, cut.inputs)
    columns_wide = cut.width_out if transposed else cut.width_in
    groups = columns_wide // weight.shape[1]
    if groups == 1:
        return take(_part(weight, 0, rows), 1, columns)
    row_size, column_size = weight.shape[0] // groups, weight.shape[1]
    if column_size == 1:  # a group that stays keeps its one column
        return take(weight, 0, rows)
    own_rows: dict[int, list[int]] = {}
    for row in rows:
        own_rows.setdefault(row // row_size, []).append(row)
    own_columns: dict[int, list[int]] = {group: [] for group in own_rows}
    for column in columns:
        own_columns[column // column_size].append(column % column_size)
    return torch.cat([take(_part(weight, 0, own_rows[group]), 1, own_columns[group]) for group in own_rows])


def _as_before(before: Tensor, after: Tensor) -> Tensor:
    """Return `after` in the memory format of `before`."""
    last = CHANNELS_LAST.get(before.ndim)
    if last is not None and not before.is_contiguous() and before.is_contiguous(memory_format=last):
        return after.contiguous(memory_format=last)
    return after.contiguous()


def slice_named(plan: PrunePlan, name: str, tensor: Tensor) -> Tensor | None:
    """Return what stays of the dense model's parameter `name`, or of a tensor of its shape; None if it goes."""
    if name in plan.parameters:
        return take(tensor, plan.parameters[name].dim, plan.parameters[name].kept)
    path, _, attribute = name.rpartition(".")
    cut = plan.modules.get(path)
    if cut is None:
        return tensor.detach().clone()
    return None if cut.constant else slice_tensor(cut, attribute, tensor)


def remap_optimizer(optimizer: Optimizer, dense: nn.Module, compact: nn.Module) -> None:
    """Let `optimizer` train `compact` instead of `dense`: same groups, momentum cut like the weights. In place.

    State of a parameter's shape (momentum, Adam's moments) is sliced as the parameter was; scalars are kept; a
    parameter that was cut away leaves its group; one that folding added joins its weight's group. Where some of a
    parameter's state cannot be cut (Adafactor's factors), all of it is reset, which is logged.

    `dense` is the network that the optimizer trains and that `compact` was cut from. A pruner that is attached to the
    optimizer stays with `dense`: it counts no more steps.
    """
    if not isinstance(optimizer, Optimizer):
        raise PlanError(
            f"`remap_optimizer` takes a torch.optim.Optimizer first. Got {type(optimizer).__name__}; of a wrapper, "
            "pass the optimizer inside."
        )
    if isinstance(optimizer, LBFGS):
        raise PlanError(
            "an optimizer must keep its state by parameter for it to be cut with them. Got LBFGS, whose memory "
            "spans them all; make a new one for the compact network."
        )
    history = plans_of(compact)
    if not history:
        raise PlanError("`compact` must be a network that softprune cut. Got one without a plan.")
    plan = history[-1]
    try:
        plan.check_fits(dense)
    except PlanError as error:
        raise PlanError(
            f"`dense` must be the network that `compact` was cut from, as it was before the cut: {error} "
            "Pass the network that the optimizer trains; over several cuts, call remap_optimizer after each."
        ) from error
    names = {id(parameter): name for name, parameter in dense.named_parameters()}  # the first, as plans name modules
    successors = dict(compact.named_parameters(remove_duplicate=False))
    reached = {id(successors[name]) for name in names.values() if name in successors}
    moves: list[tuple[Tensor, Tensor | None, dict[str, Any]]] = []
    groups: list[list[Tensor]] = []
    for group in optimizer.param_groups:
        kept: list[Tensor] = []
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is None:
                kept.append(parameter)  # not the model's: a loss's own weights, say
                continue
            successor = successors.get(name)
            if successor is None:
                moves.append((parameter, None, {}))
                continue
            kept.append(successor)
            moves.append((parameter, successor, _sliced_state(plan, name, parameter, optimizer.state.get(parameter))))
            bias = successors.get(name.removesuffix("weight") + "bias") if name.endswith("weight") else None
            if bias is not None and id(bias) not in reached:
                kept.append(bias)
                reached.add(id(bias))
        groups.append(kept)
    if not moves:
        raise PlanError(
            "the optimizer must train `dense`. Got one that holds none of its parameters; pass the network that it was "
            "made for, or make a new optimizer for the compact one."
        )
    # Everything that can fail has been done: only now is the optimizer touched.
    compact_names = {id(parameter): name for name, parameter in compact.named_parameters()}
    for group, kept in zip(optimizer.param_groups, groups, strict=True):
        if "param_names" in group:
            known = dict(zip(map(id, group["params"]), group["param_names"], strict=True))
            group["param_names"] = [compact_names.get(id(p)) or known[id(p)] for p in kept]
        group["params"] = kept
    for old, new, state in moves:
        optimizer.state.pop(old, None)
        if new is not None and state:
            optimizer.state[new] = state
    for hooks in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks):
        for key in [key for key, hook in hooks.items() if getattr(hook, "network", None) is dense]:
            del hooks[key]  # of a pruner, which stays with `dense`


def _sliced_state(plan: PrunePlan, name: str, parameter: Tensor, state: dict[str, Any] | None) -> dict[str, Any]:
    sliced: dict[str, Any] = {}
    for key, value in (state or {}).items():
        if isinstance(value, Tensor) and value.ndim > 0:
            if value.shape != parameter.shape:
                return _reset(name, key)
            sliced[key] = slice_named(plan, name, value)
        elif isinstance(value, list | tuple | dict):  # tensors inside, whose shapes are unknown
            return _reset(name, key)
        else:
            sliced[key] = value
    return sliced


def _reset(name: str, key: str) -> dict[str, Any]:
    # No part of it is kept: an optimizer takes a state that is there for a whole one.
    logger.warning(
        "softprune: the optimizer state of '%s' is reset, since its '%s' cannot be cut like the weight", name, key
    )
    return {}
