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
Names = Sequence[Sequence[str]]
EnteringPoints = tuple[tuple[int, Points], ...]
Slopes = tuple[tuple[nn.Module, str], ...]
"""Parameters that are slopes of activations, by the module that has them and their name there."""
_QUANTILE = 1.645  # of the normal distribution at 0.95, the threshold of SCP


@dataclass(frozen=True)
class GroupedNorms:
    """The BatchNorms of one site in a network without masks, in the place of a masked BatchNorm."""

    group: Points
    entering: EnteringPoints = ()
    slopes: Slopes = ()

    @property
    def weight(self) -> Tensor:
        """A parameter of the right width, device and dtype."""
        return self.group[0][0].weight

    @property
    def num_features(self) -> int:
        return self.group[0][0].num_features


def norms_of(
    network: nn.Module, name: str, points: Names, entering: Iterable[tuple[int, Names]] = (), slopes: Sequence[str] = ()
) -> _BatchNorm:
    """Return what a gate takes for the site `name` of `network`, which may be an unmasked copy."""
    norm = network.get_submodule(name)
    if not (points or slopes) or hasattr(norm, "group"):
        return cast(_BatchNorm, norm)
    group = modules_of(network, points or [[name]], entering)
    return cast(_BatchNorm, GroupedNorms(*group, slopes_of(network, slopes)))


def slopes_of(network: nn.Module, names: Iterable[str]) -> Slopes:
    """Return the parameters of these names where they are."""
    parts = (name.rpartition(".") for name in names)
    return tuple((network.get_submodule(path), attribute) for path, _, attribute in parts)


def steepness(norm: _BatchNorm) -> Tensor | None:
    """Return the largest learned slope of the activation after a site, at least 1; None where none is learned."""
    slopes = [getattr(*each).detach().abs().amax() for each in getattr(norm, "slopes", ())]
    return torch.stack(slopes).amax().clamp(min=1.0) if slopes else None


def modules_of(
    network: nn.Module, points: Names, entering: Iterable[tuple[int, Names]]
) -> tuple[Points, EnteringPoints]:
    """Return the BatchNorms of a site, and those that enter it, for their names."""

    def of(points: Names) -> Points:
        return tuple(tuple(cast(_BatchNorm, network.get_submodule(name)) for name in point) for point in points)

    return of(points), tuple((offset, of(inner)) for offset, inner in entering)


def site_affine(norm: _BatchNorm) -> tuple[Tensor, Tensor]:
    """Return beta and gamma of the site that `norm` belongs to."""
    group: Points = getattr(norm, "group", ())
    if not group:
        return norm.bias, norm.weight
    return with_entering(*_affine_of(group), cast(Any, norm).entering)


def _affine_of(points: Points) -> tuple[Tensor, Tensor]:
    flat = [each for point in points for each in point]
    structure = tuple(len(point) for point in points)
    return join_points([each.bias for each in flat], [each.weight for each in flat], structure)


def with_entering(beta: Tensor, gamma: Tensor, entering: EnteringPoints) -> tuple[Tensor, Tensor]:
    """Return shifts and scales of a site's points, followed by those of the streams that enter it, between zeros."""
    if not entering:
        return beta, gamma
    width, betas, gammas = beta.shape[-1], [torch.atleast_2d(beta)], [torch.atleast_2d(gamma)]
    for offset, points in entering:
        shifts, scales = (torch.atleast_2d(each) for each in _affine_of(points))
        around = (offset, width - offset - shifts.shape[-1])
        betas.append(F.pad(shifts, around))
        gammas.append(F.pad(scales, around))
    return torch.cat(betas), torch.cat(gammas)


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
