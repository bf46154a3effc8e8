"""Shift and scale of a site whose mask is shared by several BatchNorms.

The BatchNorms of one *point* are added up and judged as one channel; a site of several points (a residual stream) is
dead where every point is dead. Shifts and scales of a site have the shape (width,), or (points, width).

Points of a narrower stream that *enters* the site's between zero channels count as well. The zeros are dead channels,
of shift and scale 0.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from softprune.masks.functional import sum_of

Points = tuple[tuple[_BatchNorm, ...], ...]
EnteringPoints = tuple[tuple[int, tuple[_BatchNorm, ...]], ...]
_QUANTILE = 1.645  # of the normal distribution at 0.95, the threshold of SCP


@dataclass(frozen=True)
class GroupedNorms:
    """The BatchNorms of one site in a network without masks, in the place of a masked BatchNorm."""

    group: Points
    entering: EnteringPoints = ()

    @property
    def weight(self) -> Tensor:
        """A parameter of the right width, device and dtype."""
        return self.group[0][0].weight

    @property
    def num_features(self) -> int:
        return self.group[0][0].num_features


def norms_of(
    network: nn.Module, name: str, points: Sequence[Sequence[str]], entering: Iterable[tuple[int, Sequence[str]]] = ()
) -> _BatchNorm:
    """Return what a gate takes for the site `name` of `network`, which may be an unmasked copy."""
    norm = network.get_submodule(name)
    if not points or hasattr(norm, "group"):
        return cast(_BatchNorm, norm)
    return cast(_BatchNorm, GroupedNorms(*modules_of(network, points, entering)))


def modules_of(
    network: nn.Module, points: Iterable[Sequence[str]], entering: Iterable[tuple[int, Sequence[str]]] = ()
) -> tuple[Points, EnteringPoints]:
    """Return the BatchNorms of a site, and those that enter it, for their names."""

    def of(point: Sequence[str]) -> tuple[_BatchNorm, ...]:
        return tuple(cast(_BatchNorm, network.get_submodule(name)) for name in point)

    return tuple(of(point) for point in points), tuple((offset, of(point)) for offset, point in entering)


def site_affine(norm: _BatchNorm) -> tuple[Tensor, Tensor]:
    """Return beta and gamma of the site that `norm` belongs to."""
    group: Points = getattr(norm, "group", ())
    if not group:
        return norm.bias, norm.weight
    placed: EnteringPoints = (*((0, point) for point in group), *cast(Any, norm).entering)
    flat = [affine_in(norm.num_features, offset, each) for offset, point in placed for each in point]
    return join_points(
        [beta for beta, _ in flat], [gamma for _, gamma in flat], tuple(len(point) for _, point in placed)
    )


def affine_in(width: int, offset: int, norm: _BatchNorm) -> tuple[Tensor, Tensor]:
    """Return beta and gamma of `norm`, whose first channel is number `offset` of `width`; those of zeros are 0."""
    around = (offset, width - offset - norm.num_features)
    return (F.pad(norm.bias, around), F.pad(norm.weight, around)) if any(around) else (norm.bias, norm.weight)


def join_points(betas: Sequence[Tensor], gammas: Sequence[Tensor], structure: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the shifts and scales of the points; `structure` says how many BatchNorms each point has."""
    if len(betas) == 1:
        return betas[0], gammas[0]
    sums, start = [], 0
    for count in structure:
        sums.append(sum_of(betas[start : start + count], gammas[start : start + count]))
        start += count
    if len(sums) == 1:
        return sums[0]
    return torch.stack([beta for beta, _ in sums]), torch.stack([gamma for _, gamma in sums])


def deciding_affine(norm: _BatchNorm) -> tuple[Tensor, Tensor]:
    """Return one beta and gamma per channel, of the point where the channel reaches furthest: for display."""
    beta, gamma = (parameter.detach() for parameter in site_affine(norm))
    if beta.dim() == 1:
        return beta, gamma
    furthest = (beta + _QUANTILE * gamma.abs()).argmax(0, keepdim=True)
    return beta.gather(0, furthest)[0], gamma.gather(0, furthest)[0]


def dead_at_every_point(dead: Tensor) -> Tensor:
    """Return the dead probability of a site from those of its points: the smallest one."""
    return dead if dead.dim() == 1 else dead.amin(0)


def alive_at_any_point(alive: Tensor) -> Tensor:
    """Return the alive probability of a site from those of its points: the largest one."""
    return alive if alive.dim() == 1 else alive.amax(0)
