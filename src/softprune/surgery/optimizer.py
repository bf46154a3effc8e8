"""Carry a torch optimizer over a cut, so that training goes on with the smaller network."""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from softprune.errors import PlanError
from softprune.plan import PrunePlan
from softprune.surgery.apply import plans_of
from softprune.surgery.slicing import slice_named

logger = logging.getLogger(__name__)


def remap_optimizer(optimizer: Optimizer, dense: nn.Module, compact: nn.Module) -> None:
    """Let `optimizer` train `compact` instead of `dense`: same groups, momentum cut like the weights. In place.

    State of a parameter's shape (momentum, Adam's moments) is sliced as the parameter was; scalars are kept; a
    parameter that was cut away leaves its group; one that folding added joins its weight's group.
    """
    history = plans_of(compact)
    if not history:
        raise PlanError("`compact` must be a network that softprune cut. Got one without a plan.")
    plan = history[-1]
    names = {id(parameter): name for name, parameter in dense.named_parameters(remove_duplicate=False)}
    successors = dict(compact.named_parameters(remove_duplicate=False))
    moves: list[tuple[Tensor, Tensor | None, dict[str, Any]]] = []
    groups: list[list[Tensor]] = []
    taken: set[int] = set()
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
            taken.add(id(successor))
            moves.append(
                (parameter, successor, _sliced_state(plan, name, parameter, optimizer.state.get(parameter)))
            )
            bias = successors.get(name.removesuffix("weight") + "bias") if name.endswith("weight") else None
            if (
                bias is not None
                and name.removesuffix("weight") + "bias" not in names.values()
                and id(bias) not in taken
            ):
                kept.append(bias)
                taken.add(id(bias))
        groups.append(kept)
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


def _sliced_state(
    plan: PrunePlan, name: str, parameter: Tensor, state: dict[str, Any] | None
) -> dict[str, Any]:
    sliced: dict[str, Any] = {}
    for key, value in (state or {}).items():
        if isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim > 0:
            sliced[key] = slice_named(plan, name, value)
        elif isinstance(value, Tensor) and value.ndim > 0:
            logger.warning("optimizer state '%s' of '%s' has a shape of its own and starts anew", key, name)
        else:
            sliced[key] = value
    return sliced
