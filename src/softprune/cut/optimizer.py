"""Carry a torch optimizer over a cut, so that training continues with the smaller network."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from softprune.cut.apply import plans_of, slice_named
from softprune.cut.plan import PrunePlan
from softprune.errors import PlanError
from softprune.log import get_logger

logger = get_logger(__name__)


def remap_optimizer(optimizer: Optimizer, dense: nn.Module, compact: nn.Module) -> None:
    """Let `optimizer` train `compact` instead of `dense`: same groups, momentum cut like the weights. In place.

    State of a parameter's shape (momentum, Adam's moments) is sliced as the parameter was; scalars are kept; a
    parameter that was cut away leaves its group; one that folding added joins its weight's group. Where some of a
    parameter's state cannot be cut (Adafactor's factors), all of it is reset, which is logged.

    `dense` is the network that the optimizer trains; several cuts may lie between it and `compact`. A pruner that is
    attached to the optimizer stays with `dense`: it counts no more steps.
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
    plans = _plans_since(dense, history)
    names = {id(parameter): name for name, parameter in dense.named_parameters(remove_duplicate=False)}
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
            moves.append((parameter, successor, _sliced_state(plans, name, parameter, optimizer.state.get(parameter))))
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
    compact_names = {id(parameter): name for name, parameter in successors.items()}
    for group, kept in zip(optimizer.param_groups, groups, strict=True):
        if "param_names" in group:
            known = dict(zip(map(id, group["params"]), group["param_names"], strict=True))
            group["param_names"] = [compact_names.get(id(p)) or known[id(p)] for p in kept]
        group["params"] = kept
    for old, new, state in moves:
        optimizer.state.pop(old, None)
        if new is not None and state:
            optimizer.state[new] = state


def _plans_since(dense: nn.Module, history: Sequence[PrunePlan]) -> Sequence[PrunePlan]:
    """The cuts between `dense` and the network that `history` led to; the fewest that fit."""
    for start in reversed(range(len(history))):
        try:
            history[start].check_fits(dense)
            return history[start:]
        except PlanError as error:
            failure = error
    raise PlanError(
        "`dense` must be the network that `compact` was cut from, as it was before the cut. Got one that "
        f"fits none of its {len(history)} plans: {failure} Pass the network that the optimizer trains."
    ) from failure


def _sliced_state(
    plans: Sequence[PrunePlan], name: str, parameter: Tensor, state: dict[str, Any] | None
) -> dict[str, Any]:
    sliced: dict[str, Any] = {}
    for key, value in (state or {}).items():
        if isinstance(value, Tensor) and value.ndim > 0:
            if value.shape != parameter.shape:
                return _reset(name, key)
            for plan in plans:
                value = slice_named(plan, name, value)
            sliced[key] = value
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
