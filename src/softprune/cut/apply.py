"""Apply a plan: build a compact network of the same class, and remap an optimizer to it."""

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
"""Attribute of a compact model: the plans applied to its dense definition, in order.

The definition is the network that its class builds, or a compact model that was changed after its cut."""
SHAPES = "_softprune_shapes"
"""Attribute of a compact model: the shapes of its parameters and buffers after the cut."""


def plans_of(model: nn.Module) -> tuple[PrunePlan, ...]:
    """Return the plans that were applied to the dense definition of `model`; empty for a dense model."""
    return getattr(model, HISTORY, ())


def plain_copy(model: nn.Module, *, share: bool = False) -> nn.Module:
    """Return a deep copy of `model` without masks. Arguments as in :func:`duplicated`."""
    copied = duplicated(model, share=share)
    unmask_model_(copied)
    return copied


def duplicated(model: nn.Module, *, share: bool = False) -> nn.Module:
    """Return a deep copy of `model`.

    With `share`, the parameters share memory with the originals, for a copy that is only called.
    """
    # Leave subclasses of Parameter and inference tensors to deepcopy.
    plain = [p for p in model.parameters() if type(p) is nn.Parameter and p.layout == torch.strided]
    plain = [p for p in plain if not p.is_inference()]
    # p.data rather than p.detach(), with which changes of the copy would bump the version of the original.
    memo: dict[int, Any] = {
        id(p): nn.Parameter(p.data if share else p.data.clone(), requires_grad=p.requires_grad) for p in plain
    }
    # A module has about a dozen empty dictionaries of hooks, which are slow to deepcopy.
    owned = (value for module in model.modules() for value in vars(module).values())
    memo |= {id(value): type(value)() for value in owned if type(value) in (dict, OrderedDict) and not value}
    # Tensors that forward() stored on a module, such as features for an auxiliary loss: deepcopy rejects non-leaves.
    left = pytree.tree_leaves([vars(module) for module in model.modules()])
    memo |= {id(each): each.detach() for each in left if isinstance(each, Tensor) and not each.is_leaf}
    try:
        duplicate: nn.Module = copy.deepcopy(model, memo)
    except Exception as error:
        raise ModelError(
            f"softprune works on copies of a model, so copy.deepcopy must support it. Got {type(error).__name__} "
            f"from a {type(model).__name__}: {error}. Usual causes are locks, open files and generators as attributes "
            "of a module: create them where they are used."
        ) from error
    modes = {name: module.training for name, module in model.named_modules()}
    for name, module in duplicate.named_modules():  # copies of a torch.fx.GraphModule are in training mode
        module.training = modes.get(name, module.training)
    return duplicate


def apply_plan(plan: PrunePlan, model: nn.Module) -> nn.Module:
    """Return a compact network of the same class as `model`, cut by `plan`. `model` is not changed.

    A plan read from a file has no constants. Folded biases are then zero until weights are loaded.
    """
    plan.check_fits(model)
    compact = plain_copy(model)
    cut_(plan, compact)
    return compact


def cut_(plan: PrunePlan, compact: nn.Module) -> None:
    """Cut `compact`, a network without masks, by `plan`, in place.

    Tensors are replaced, not written to, so that :func:`softprune.module_state.attributes_kept` can undo the cut.
    """
    # Earlier plans do not describe a network that was changed after its cut, for example by a new head.
    earlier = plans_of(compact) if changed_since_the_cut(compact) is None else ()
    parents = parents_of(compact)
    # Cut Select modules first, since the layer that contains one may be replaced.
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
    """Describe how the shapes of a compact network have changed since its cut; None if they have not."""
    now = model_shapes(compact)
    before: dict[str, tuple[int, ...]] = getattr(compact, SHAPES, now)
    for name in sorted(now.keys() | before.keys()):
        if before.get(name) != now.get(name):
            return f"'{name}' was {before.get(name, 'absent')} and is {now.get(name, 'absent')}"
    return None


Parents = dict[nn.Module, list[tuple[nn.Module, str]]]
"""Maps a module to the (parent, attribute) pairs under which it is registered."""


def parents_of(model: nn.Module) -> Parents:
    """Return the parents of every module; several for a shared module."""
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
            if part.shape != tensor.shape:  # an uncut tensor may be shared with another module
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
            raise PlanError(f"a {type(module).__name__} already has a Select, which should have been cut itself.")
        module.add_module("select", Select(torch.tensor(cut.select, device=device), cut.source_width))
        module.register_forward_pre_hook(select_input, with_kwargs=True)


def _replace(owner: nn.Module, attribute: str, tensor: Tensor) -> None:
    """Replace a parameter or buffer by `tensor`."""
    if attribute in owner._parameters:
        tensor = nn.Parameter(tensor, requires_grad=owner._parameters[attribute].requires_grad)  # type: ignore[union-attr]
    setattr(owner, attribute, tensor)


def _describe(module: nn.Module, cut: ModuleCut) -> None:
    """Update the width attributes of a module, such as out_channels."""
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
    """Replace `module` by a constant or, if `activation` is given, by the sum of the constant and its input."""
    weight = next(module.parameters())
    # Channels that are kept only because of shapes are not read and have no constant.
    kept = np.zeros(len(outputs)) if constants is None else np.nan_to_num(constants)[list(outputs)]
    value = torch.from_numpy(kept).to(weight.device, weight.dtype)
    replacement = ConstantOutput(module, value) if activation is None else Shortcut(module, value, activation)
    replacement.train(module.training)
    for parent, attribute in parents[module]:
        parent._modules[attribute] = replacement


def _folded(module: nn.Module, cut: ModuleCut, constants: FloatArray | None) -> Tensor:
    """Return the contribution of the removed constant inputs to the kept outputs."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    if constants is None:
        return torch.zeros(len(cut.outputs), device=weight.device, dtype=weight.dtype)
    total = constant_contribution(weight, np.array(cut.inputs, dtype=np.int64), constants)
    return total[list(cut.outputs)].to(weight.device, weight.dtype)


def _add_bias(module: nn.Module, correction: Tensor) -> None:
    """Add `correction` to the bias of `module`; create the bias if it has none."""
    old: nn.Parameter | None = module.bias  # type: ignore[assignment]
    trains = (module.weight if old is None else old).requires_grad
    bias = correction if old is None else old.detach() + correction
    module.bias = nn.Parameter(bias, requires_grad=trains)  # type: ignore[arg-type]


def take(tensor: Tensor, dim: int, kept: Sequence[int]) -> Tensor:
    """Return the entries `kept` of `tensor` along `dim` as a new tensor."""
    part = _part(tensor, dim, kept)
    # is_inference() is False for a view of an inference tensor.
    return part.clone() if part._is_view() or part.is_inference() else part


def _part(tensor: Tensor, dim: int, kept: Sequence[int]) -> Tensor:
    """Return the entries `kept` of `tensor` along `dim`, as a view if they are contiguous."""
    size = len(kept)
    if size and kept[-1] - kept[0] + 1 == size and tuple(kept) == tuple(range(kept[0], kept[0] + size)):
        return tensor.detach().narrow(dim, kept[0], size)
    index = torch.from_numpy(np.fromiter(kept, np.int64, size))  # several times faster than torch.tensor
    return tensor.detach().index_select(dim, index.to(tensor.device))


def slice_tensor(cut: ModuleCut, attribute: str, tensor: Tensor) -> Tensor:
    """Return the kept part of a parameter or buffer of a module, in its memory format."""
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
    if column_size == 1:  # each kept group keeps its single column
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
    """Return the kept part of the dense parameter `name` or a tensor of its shape; None if it is removed."""
    if name in plan.parameters:
        return take(tensor, plan.parameters[name].dim, plan.parameters[name].kept)
    path, _, attribute = name.rpartition(".")
    cut = plan.modules.get(path)
    if cut is None:
        return tensor.detach().clone()
    return None if cut.constant else slice_tensor(cut, attribute, tensor)


def remap_optimizer(optimizer: Optimizer, dense: nn.Module, compact: nn.Module) -> None:
    """Change `optimizer` in place to train `compact` instead of `dense`, with its state cut like the weights.

    State with the shape of a parameter (momentum, Adam's moments) is cut like the parameter, and scalars are kept.
    Removed parameters leave their group. Biases added by folding join the group of their weight. If any state of a
    parameter cannot be cut (Adafactor's factors), all of its state is reset and a warning is logged.

    `dense` is the network that the optimizer trains and that `compact` was cut from. The hooks of an attached pruner
    are removed, since it belongs to `dense`.
    """
    if not isinstance(optimizer, Optimizer):
        raise PlanError(
            f"`remap_optimizer` takes a torch.optim.Optimizer first. Got {type(optimizer).__name__}; for a wrapper, "
            "pass the wrapped optimizer."
        )
    if isinstance(optimizer, LBFGS):
        raise PlanError(
            "the state of an optimizer must be stored per parameter to be cut. Got LBFGS, whose history spans all "
            "parameters; create a new optimizer for the compact network."
        )
    history = plans_of(compact)
    if not history:
        raise PlanError("`compact` must be a network cut by softprune. Got one without a plan.")
    plan = history[-1]
    try:
        plan.check_fits(dense)
    except PlanError as error:
        raise PlanError(
            f"`dense` must be the network that `compact` was cut from: {error} Pass the network that the optimizer "
            "trains; with several cuts, call remap_optimizer after each."
        ) from error
    names = {id(parameter): name for name, parameter in dense.named_parameters()}  # first names, as in plans
    successors = dict(compact.named_parameters(remove_duplicate=False))
    reached = {id(successors[name]) for name in names.values() if name in successors}
    moves: list[tuple[Tensor, Tensor | None, dict[str, Any]]] = []
    groups: list[list[Tensor]] = []
    for group in optimizer.param_groups:
        kept: list[Tensor] = []
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is None:
                kept.append(parameter)  # not of the model, but for example of a loss
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
            "the optimizer must train `dense`. Got one without any of its parameters; pass the network that it was "
            "created for, or create a new optimizer for the compact one."
        )
    # Change the optimizer last, when nothing can fail any more.
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
            del hooks[key]  # of a pruner, which belongs to `dense`


def _sliced_state(plan: PrunePlan, name: str, parameter: Tensor, state: dict[str, Any] | None) -> dict[str, Any]:
    sliced: dict[str, Any] = {}
    for key, value in (state or {}).items():
        if isinstance(value, Tensor) and value.ndim > 0:
            if value.shape != parameter.shape:
                return _reset(name, key)
            sliced[key] = slice_named(plan, name, value)
        elif isinstance(value, list | tuple | dict):  # may contain tensors of any shape
            return _reset(name, key)
        else:
            sliced[key] = value
    return sliced


def _reset(name: str, key: str) -> dict[str, Any]:
    # Reset all of it, since optimizers expect a state to be complete.
    logger.warning(
        "softprune: reset the optimizer state of '%s', since its '%s' cannot be cut like the weight", name, key
    )
    return {}
