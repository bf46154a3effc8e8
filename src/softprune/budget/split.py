"""How a budget is split over the sites: measured, by what the outputs lose when a site loses its lowest channels."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from softprune.budget.measures import PrunableNetwork
from softprune.budget.search import units_of
from softprune.masks import SoftMasks
from softprune.module_state import evaluating

LEVELS = 8
"""Shares of a site that are taken away in turn: 1/8, 2/8, ... 8/8."""

LEAST = 0.05
"""The share of a site that every path passes that goes last, however little the outputs miss it now."""

BySite = dict[str, Tensor]


@torch.no_grad()
def split_scores(
    prunable: PrunableNetwork,
    masks: SoftMasks,
    importance: Mapping[str, Tensor],
    inputs: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
    cost: Callable[[Mapping[str, Tensor]], float],
) -> BySite:
    """Return a score for every channel that can be compared over sites: divergence of the outputs per cost freed.

    With the masks in place, each site in turn (coupled ones together) loses its lowest channels by `importance`, and
    the divergence of the outputs is measured; nothing is trained. The lower convex hull of a site's curve, divergence
    over cost freed, gives its channels their scores. Where a whole branch is cheaper to lose than a part of it, the
    hull is one line, and the branch goes at once. Channels that are off already have the score -inf.
    """
    keep = {name: mask.cpu() for name, mask in masks.by_site(masks.hard()).items()}
    network, names = prunable.model, [site.name for site in prunable.graph.sites]
    scores: BySite = {}
    whole = cost(keep)
    with evaluating(network), masks.trial() as trial:
        trial.copy_(masks.row(keep))
        reference = [_outputs(network, call) for call in inputs]
        for unit in units_of(names, prunable.coupled):
            common = torch.stack([keep[name] for name in unit]).all(0)
            value = torch.stack([_relative(importance[name].double().cpu()) for name in unit]).sum(0)
            order = torch.nonzero(common).flatten()
            order = order[torch.argsort(value[order], stable=True)]  # the lowest first
            floor = max(prunable.floors[name] for name in unit)
            most = len(order) - max(floor, math.ceil(LEAST * len(common)) if floor else 0)
            counts = _counts(len(order), most, prunable.round_to)
            divergence, freed = [0.0], [0.0]
            for number, count in enumerate(counts):
                less = dict(keep)
                for name in unit:
                    less[name] = keep[name].index_fill(0, order[:count], False)
                trial.copy_(masks.row(less))
                lost = sum(
                    _divergence(_outputs(network, call), ref) for call, ref in zip(inputs, reference, strict=True)
                )
                divergence.append(max(float(lost) / len(inputs), divergence[-1]))
                last = number == len(counts) - 1
                # In between, the cost is a line: a plan for every level would take longer than the forward passes.
                freed.append(max(whole - cost(less), 0.0) if number == 0 or last else float("nan"))
            slopes = _slopes(np.array([0, *counts]), np.array(divergence), np.array(freed))
            column = torch.full((len(common),), -torch.inf, dtype=torch.float64)
            column[order] = torch.inf
            start = 0
            for count, slope in zip(counts, slopes, strict=True):
                column[order[start:count]] = slope
                start = count
            # Within a level, by importance: a factor that keeps the order of levels.
            place = torch.zeros(len(common), dtype=torch.float64)
            place[order] = torch.arange(len(order), dtype=torch.float64) / len(order)
            for name in unit:
                scores[name] = (column + 1e-15) * (1 + 1e-6 * place)
    return scores


def _relative(value: Tensor) -> Tensor:
    return value / value.mean().clamp(min=1e-30)


def _counts(alive: int, most: int, round_to: int) -> list[int]:
    """Return how many channels are taken away at each level: what stays is a multiple of `round_to`."""
    counts: list[int] = []
    for level in range(1, LEVELS + 1):
        stay = alive - min(round(level / LEVELS * alive), most)
        stay = -(-stay // round_to) * round_to
        if alive - stay > 0 and (not counts or alive - stay > counts[-1]):
            counts.append(alive - stay)
    return counts


def _slopes(counts: np.ndarray, divergence: np.ndarray, freed: np.ndarray) -> list[float]:
    """Return the slope of the lower convex hull of `divergence` over `freed` at each level."""
    if len(counts) == 1:
        return []
    known = ~np.isnan(freed)
    if len(counts) > 2:
        # The last step may free more than its channels, a whole branch: it is not interpolated.
        inner = counts[1:-1] / counts[1] * freed[1]
        freed = np.concatenate([[0.0], np.minimum(inner, freed[-1]), [freed[-1]]])
    assert known[-1]
    freed = np.maximum.accumulate(freed)
    hull = [0]
    for point in range(1, len(counts)):
        while len(hull) > 1 and _slope(divergence, freed, hull[-2], hull[-1]) >= _slope(
            divergence, freed, hull[-1], point
        ):
            hull.pop()
        hull.append(point)
    slopes: list[float] = []
    for first, last in pairwise(hull):
        slopes += [_slope(divergence, freed, first, last)] * (last - first)
    return slopes


def _slope(divergence: np.ndarray, freed: np.ndarray, first: int, last: int) -> float:
    gain = freed[last] - freed[first]
    return float((divergence[last] - divergence[first]) / gain) if gain > 0 else float("inf")


def _outputs(network: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]]) -> list[Tensor]:
    args, kwargs = call
    return [leaf.float() for leaf in tree_leaves(network(*args, **kwargs)) if _is_output(leaf)]


def _is_output(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _divergence(outputs: Sequence[Tensor], reference: Sequence[Tensor]) -> Tensor:
    """Return how far outputs are from a reference: KL for class scores, else the relative squared difference."""
    total = torch.zeros((), dtype=torch.float32, device=outputs[0].device)
    for out, ref in zip(outputs, reference, strict=True):
        if out.dim() == 2 and out.shape[1] > 1:
            log = F.log_softmax(ref, 1)
            total = total + F.kl_div(F.log_softmax(out, 1), log, log_target=True, reduction="batchmean")
        else:
            total = total + (out - ref).square().sum() / ref.square().sum().clamp(min=1e-12)
    return total.nan_to_num(nan=1e6, posinf=1e6)
