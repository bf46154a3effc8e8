"""Score channels by how much the outputs change without them, measured in forward passes site by site."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from softprune.budget.limit import PrunableNetwork, by_block
from softprune.log import get_logger
from softprune.masks import Masks, SoftMasks
from softprune.module_state import evaluating

logger = get_logger(__name__)

LEVELS = 4
"""Number of measurements per site, which remove 1/4, 2/4, 3/4 and 4/4 of its remaining channels."""
LEAST = 0.05
"""Share of the channels of a site with a floor above 0 that is never scored, and so removed last."""
JOINED = 8
"""Number of training batches per forward pass: without gradients, these need less memory than a training step."""
REPORT_SECONDS = 10.0
"""Interval between progress messages of a long measurement."""

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a forward pass."""


class FirstOrder:
    """Accumulates the squared first-order change of the loss by removing each channel, over training steps.

    Removing a channel sets shift and scale of its BatchNorms to zero, which changes the loss by approximately
    ``beta * g_beta + gamma * g_gamma`` (Molchanov et al., CVPR 2019). Tensors are changed in place only, so that this
    works in a captured step.
    """

    def __init__(self, masks: Masks) -> None:
        self.masks = masks
        self.row = torch.zeros(masks.layout.channels, device=masks.device)

    @torch.no_grad()
    def add_(self) -> None:
        """Add the changes computed from the current gradients."""
        self.row = self.row.to(self.masks.device)
        change = torch.cat([_change(bn) for bn in self.masks.modules[: len(self.masks.columns)]]).to(self.row.device)
        expand = self.masks.layout.expand
        if expand is not None:  # the BatchNorms of a site lose a channel together
            change = torch.zeros_like(self.row).index_add_(0, expand[0], change)
        # Gradients are infinite in a step that a GradScaler skips.
        self.row.add_(change.square().nan_to_num(0.0, posinf=0.0))

    def scores(self) -> dict[str, Tensor]:
        """Return the sums by site; before the first step, return the squared BatchNorm scales instead."""
        if bool(self.row.any()):
            return self.masks.by_site(self.row)
        members = self.masks.members
        return {site.name: members[site.name].weight.detach().float().square() for site in self.masks.sites}


def _change(bn: Any) -> Tensor:
    terms = [p.float() * p.grad.float() for p in (bn.weight, bn.bias) if p.grad is not None]
    return sum(terms, torch.zeros_like(bn.weight, dtype=torch.float32))


@torch.no_grad()
def split_scores(
    prunable: PrunableNetwork,
    masks: SoftMasks,
    importance: Mapping[str, Tensor],
    inputs: Sequence[Call],
    cost: Callable[[Mapping[str, Tensor]], float],
) -> dict[str, Tensor]:
    """Return scores of the channels that are comparable across sites: output divergence per cost saved.

    Starting from the current masks, each site in turn (coupled ones together) loses its least important channels, and
    the divergence of the outputs on `inputs` is measured. The scores are the slopes of the lower convex hull of the
    curve of divergence over cost saved. If a whole branch is cheaper to remove than a part of it, the hull is a single
    line, and the branch is removed at once. The score is -inf for channels that are off, inf for those that must stay.
    """
    keep = {name: mask.cpu() for name, mask in masks.by_site(masks.hard()).items()}
    network, units = prunable.model, prunable.units()
    scores: dict[str, Tensor] = {}
    whole, said = cost(keep), time.monotonic()
    with batch_statistics(network), evaluating(network), masks.trial() as trial:
        trial.copy_(masks.row(keep))
        try:
            calls = joined(inputs)
            reference = [_outputs(network, call) for call in calls]
        except Exception as error:  # forward() may require a fixed batch size, or memory may be exhausted
            logger.debug("measuring batch by batch: %s", error)
            calls = [*inputs]
            reference = [_outputs(network, call) for call in calls]

        def divergence(less: Mapping[str, Tensor]) -> float:
            trial.copy_(masks.row(less))
            found = [_divergence(_outputs(network, call), ref) for call, ref in zip(calls, reference, strict=True)]
            return float(sum(found)) / len(found)

        for number, (unit, block) in enumerate(units.items()):
            common = torch.stack([keep[name] for name in unit]).all(0)
            value = torch.stack([_relative(importance[name].double().cpu()) for name in unit]).sum(0)
            value = torch.from_numpy(by_block(value.numpy(), block))
            order = torch.nonzero(common).flatten()
            order = order[torch.argsort(value[order], stable=True)]  # the least important first
            floor = max(prunable.floors[name] for name in unit)
            most = len(order) - max(floor, math.ceil(LEAST * len(common)) if floor else 0)
            counts = _counts(len(order), most, math.lcm(prunable.round_to, block))
            cuts = [keep | {name: keep[name].index_fill(0, order[:count], False) for name in unit} for count in counts]
            curve = [divergence(cut) for cut in cuts]
            slopes = _slopes(counts, curve, *(max(whole - cost(cut), 0.0) for cut in (*cuts[:1], *cuts[-1:])))
            score = torch.full((len(common),), -torch.inf, dtype=torch.float64)
            score[order] = torch.inf
            for (start, stop), slope in zip(pairwise([0, *counts]), slopes, strict=True):
                score[order[start:stop]] = slope
            # Within a level, rank channels by importance, with a factor too small to change the order of levels.
            score[order] = (score[order] + 1e-15) * (1 + 1e-6 * torch.arange(len(order)) / max(len(order), 1))
            scores |= dict.fromkeys(unit, score)
            if time.monotonic() - said > REPORT_SECONDS:
                said = time.monotonic()
                logger.info("budget: measured %d of %d sites", number + 1, len(units))
    return scores


def joined(calls: Sequence[Call]) -> list[Call]:
    """Concatenate the batches of up to `JOINED` calls into one, if the calls differ only in the values of tensors."""
    found: list[Call] = []
    for start in range(0, len(calls), JOINED):
        group = calls[start : start + JOINED]
        leaves, specs = zip(*map(tree_flatten, group), strict=True)
        kinds = [[each.shape if isinstance(each, Tensor) else id(each) for each in row] for row in leaves]
        batch = {each.shape[:1] for each in leaves[0] if isinstance(each, Tensor)}
        if len(batch) == 1 and all(kind == kinds[0] for kind in kinds) and all(spec == specs[0] for spec in specs):
            columns = zip(*leaves, strict=True)
            whole = [torch.cat(column) if isinstance(column[0], Tensor) else column[0] for column in columns]
            found.append(tree_unflatten(whole, specs[0]))
        else:
            found += group
    return found


@contextmanager
def batch_statistics(network: nn.Module) -> Iterator[None]:
    """Let BatchNorms in training mode use batch statistics in eval mode too, and restore them on exit.

    Running statistics describe the network before a cut. They adapt within some steps after it, and the scores should
    reflect the outputs then.
    """
    norms = [bn for bn in network.modules() if isinstance(bn, _BatchNorm) and bn.training]
    statistics = [(bn.running_mean, bn.running_var) for bn in norms]
    for bn in norms:
        bn.running_mean = bn.running_var = None
    try:
        yield
    finally:
        for bn, (mean, var) in zip(norms, statistics, strict=True):
            bn.running_mean, bn.running_var = mean, var


def _relative(value: Tensor) -> Tensor:
    return value / value.mean().clamp(min=1e-30)


def _counts(alive: int, most: int, round_to: int) -> list[int]:
    """Return how many channels each level removes, at most `most`, so that a multiple of `round_to` remains."""
    stays = [alive - min(round(level / LEVELS * alive), most) for level in range(1, LEVELS + 1)]
    gone = {alive - math.ceil(stay / round_to) * round_to for stay in stays}
    return sorted(count for count in gone if count > 0)


def _slopes(counts: Sequence[int], divergence: Sequence[float], first: float = 0.0, last: float = 0.0) -> list[float]:
    """Return the slope of the lower convex hull of `divergence` over cost saved, for each level.

    `first` and `last` are the costs saved by the first and the last level. Levels in between are extrapolated from the
    first, since planning each would take longer than the forward passes. The last may save more: a whole branch.
    """
    points = [(0.0, 0.0)]
    for count, lost in zip(counts, divergence, strict=True):
        freed = last if count == counts[-1] else min(count / counts[0] * first, last)
        points.append((max(freed, points[-1][0]), max(lost, points[-1][1])))
    hull = [0]
    for point in range(1, len(points)):
        while len(hull) > 1 and _slope(points, hull[-2], hull[-1]) >= _slope(points, hull[-1], point):
            hull.pop()
        hull.append(point)
    return [slope for a, b in pairwise(hull) for slope in [_slope(points, a, b)] * (b - a)]


def _slope(points: Sequence[tuple[float, float]], first: int, last: int) -> float:
    (freed, lost), (more_freed, more_lost) = points[first], points[last]
    return (more_lost - lost) / (more_freed - freed) if more_freed > freed else math.inf


def _outputs(network: nn.Module, call: Call) -> list[Tensor]:
    args, kwargs = call
    leaves = tree_leaves(network(*args, **kwargs))
    return [leaf.float() for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _divergence(outputs: Sequence[Tensor], reference: Sequence[Tensor]) -> Tensor:
    """Return the divergence of outputs from a reference: KL for (batch, classes), else the relative squared error."""
    total = torch.zeros((), device=outputs[0].device)
    for out, ref in zip(outputs, reference, strict=True):
        if out.dim() == 2 and out.shape[1] > 1:
            log = F.log_softmax(ref, 1)
            total = total + F.kl_div(F.log_softmax(out, 1), log, log_target=True, reduction="batchmean")
        else:
            total = total + (out - ref).square().sum() / ref.square().sum().clamp(min=1e-12)
    return total.nan_to_num(nan=1e6, posinf=1e6)
