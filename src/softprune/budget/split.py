"""What the outputs lose without some channels: measured in forward passes, site by site, and never trained."""

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
"""Shares of a site that are taken away in turn: 1/4, 2/4, 3/4, 4/4. Each round divides again what is left."""
LEAST = 0.05
"""The share of a site that every path passes that goes last, however little the outputs miss it now."""
JOINED = 8
"""Batches of the training that one forward pass measures: without gradients that takes less memory than a step."""
REPORT_SECONDS = 10.0
"""How often a measurement that takes long says how far it is."""

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a forward pass."""


class FirstOrder:
    """Sums the squared first-order change of the loss for every channel over training steps.

    Removing a channel sets shift and scale of its BatchNorms to zero, which changes the loss by about
    ``beta * g_beta + gamma * g_gamma`` (Molchanov et al., CVPR 2019). Tensors change in place only, so that a captured
    step can add to them.
    """

    def __init__(self, masks: Masks) -> None:
        self.masks = masks
        self.row = torch.zeros(masks.layout.channels, device=masks.device)

    @torch.no_grad()
    def add_(self) -> None:
        """Add the gradients at hand."""
        self.row = self.row.to(self.masks.device)
        change = torch.cat([_change(bn) for bn in self.masks.modules[: len(self.masks.columns)]]).to(self.row.device)
        expand = self.masks.layout.expand
        if expand is not None:  # several BatchNorms of one site lose a channel together
            change = torch.zeros_like(self.row).index_add_(0, expand[0], change)
        # A step that a GradScaler skips has infinite gradients.
        self.row.add_(change.square().nan_to_num(0.0, posinf=0.0))

    def scores(self) -> dict[str, Tensor]:
        """Return the sums by site. Before the first step: the squared scales, so that there is an order."""
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
    """Return a score for every channel that can be compared over sites: divergence of the outputs per cost freed.

    With the masks in place, each site in turn (coupled ones together) loses its lowest channels by `importance`, and
    the divergence of the outputs for `inputs` is measured. The lower convex hull of a site's curve, divergence over
    cost freed, gives its channels their scores. Where a whole branch is cheaper to lose than a part of it, the hull is
    one line, and the branch goes at once. The score is -inf where a channel is off, and inf where it must stay.
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
        except Exception as error:  # forward() fixes the size of a batch, or the memory is too small
            logger.debug("inputs are measured batch by batch: %s", error)
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
            order = order[torch.argsort(value[order], stable=True)]  # the lowest first
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
            # Within a level, by importance: a factor that keeps the order of levels.
            score[order] = (score[order] + 1e-15) * (1 + 1e-6 * torch.arange(len(order)) / max(len(order), 1))
            scores |= dict.fromkeys(unit, score)
            if time.monotonic() - said > REPORT_SECONDS:
                said = time.monotonic()
                logger.info("budget: %d of %d sites are measured", number + 1, len(units))
    return scores


def joined(calls: Sequence[Call]) -> list[Call]:
    """Return calls with the batches of up to `JOINED` calls in one, where only the values of tensors differ."""
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
    """Let BatchNorms that are training normalise by each batch, in eval mode too, without a trace.

    The running statistics are those of the network before a cut. They follow within some steps after it, and what
    counts is what the network computes then.
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
    """Return how many channels are taken away at each level: what stays is a multiple of `round_to`."""
    stays = [alive - min(round(level / LEVELS * alive), most) for level in range(1, LEVELS + 1)]
    gone = {alive - math.ceil(stay / round_to) * round_to for stay in stays}
    return sorted(count for count in gone if count > 0)


def _slopes(counts: Sequence[int], divergence: Sequence[float], first: float = 0.0, last: float = 0.0) -> list[float]:
    """Return the slope of the lower convex hull of `divergence` over the cost freed at each level.

    `first` and `last`: what the first and the last level free. In between the cost is a line, since a plan for every
    level would take longer than the forward passes; the last level may free more, a whole branch.
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
    """Return how far outputs are from a reference: KL for class scores, else the relative squared difference."""
    total = torch.zeros((), device=outputs[0].device)
    for out, ref in zip(outputs, reference, strict=True):
        if out.dim() == 2 and out.shape[1] > 1:
            log = F.log_softmax(ref, 1)
            total = total + F.kl_div(F.log_softmax(out, 1), log, log_target=True, reduction="batchmean")
        else:
            total = total + (out - ref).square().sum() / ref.square().sum().clamp(min=1e-12)
    return total.nan_to_num(nan=1e6, posinf=1e6)
