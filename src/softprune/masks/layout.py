"""Where the channels of all sites stand in one row."""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from softprune.graph.channels import Site
from softprune.masks.functional import raised


class Layout:
    """The channels of some sites in rows, and the indices that lead from one row to the next.

    *Members* are the BatchNorms of the sites. BatchNorms whose outputs are added up are judged together, as one
    *point*. A *site* has one mask; it is dead where all of its points are dead (a residual stream has several). Points
    of a narrower stream that is added to the site's between zero channels count, too. Where every site is a BatchNorm
    of its own, the three rows are the same, and the indices None.

    The row begins with the sites of the first activation, so that those of one activation are neighbours.
    """

    gather: Tensor | None
    """Member rows of each point, of shape (most members, points); one past the end where a point has fewer."""
    points: Tensor | None
    """Points of each channel, of shape (most points, channels); one past the end where a site has fewer."""
    expand: Tensor | None
    """The channel whose mask each row of the members gets."""
    owner: Tensor | None
    """The channel of the site that each point is of; one past the end for a stream that enters."""

    def __init__(self, sites: Iterable[Site], network: nn.Module) -> None:
        kinds: dict[str, list[Site]] = {}
        for site in sites:
            kinds.setdefault(site.activation, []).append(site)
        self.sites = tuple(site for same in kinds.values() for site in same)
        self.members = tuple(name for site in self.sites for name in site.members)
        entering = (name for site in self.sites for _, inner in site.entering for point in inner for name in point)
        self.names = tuple(dict.fromkeys([*self.members, *entering]))
        """The members, and BatchNorms of streams that enter a site but have no mask."""
        widths = [int(module.num_features) for module in self.modules(network)]
        self.widths = widths[: len(self.members)]
        self.slices = dict(zip((site.name for site in self.sites), _slices(s.width for s in self.sites), strict=True))
        """The channels of each site."""
        site_of_member = {name: site.name for site in self.sites for name in site.members}
        self.columns = [self.slices[site_of_member[name]] for name in self.members]
        """The channels of each member."""
        self.channels = sum(site.width for site in self.sites)
        self.segments: list[tuple[str, slice]] = []
        """The points of each activation."""
        rows = dict(zip(self.names, _slices(widths), strict=True))
        gather: list[Sequence[int]] = []
        points: list[list[int]] = [[] for _ in range(self.channels)]
        owner: list[int] = []
        for activation, same in kinds.items():
            first = len(gather)
            for site in same:
                start = self.slices[site.name].start
                for offset, members in _points_of(site):
                    stacked = zip(*(range(rows[name].start, rows[name].stop) for name in members), strict=True)
                    for place, added_up in enumerate(stacked, offset or 0):
                        owner.append(start + place if offset is None else self.channels)
                        if place < site.width:
                            points[start + place].append(len(gather))
                        gather.append(added_up)
            self.segments.append((activation, slice(first, len(gather))))
        self.gather = _index(gather, sum(widths))
        self.points = _index(points, len(gather))
        self.owner = _index([(channel,) for channel in owner], self.channels)
        self.expand = _index([(row,) for here in self.columns for row in range(here.start, here.stop)], self.channels)
        self.starts = torch.tensor([here.start for here in self.slices.values()])
        sizes = torch.tensor([site.width for site in self.sites])
        self.site_of = torch.repeat_interleave(torch.arange(len(sizes)), sizes)

    def to(self, device: torch.device) -> None:
        for name in ("gather", "points", "expand", "owner", "site_of", "starts"):
            value = getattr(self, name)
            setattr(self, name, None if value is None else value.to(device))

    def modules(self, network: nn.Module) -> tuple[Any, ...]:
        """Return the BatchNorms that `network` has under `names`."""
        return tuple(network.get_submodule(name) for name in self.names)

    def at_members(self, row: Tensor) -> Tensor:
        """Return what each row of the members gets from its channel."""
        return row if self.expand is None else row[self.expand[0]]

    def at_points(self, beta: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
        """Return shift and scale of the points, from those of the BatchNorms: ``N(sum of beta, sum of gamma^2)``.

        Beyond the paper, for BatchNorms whose outputs are added before the activation. The channels are taken as
        independent.
        """
        if self.gather is None:
            return beta, gamma
        betas, gammas = (padded(raised(row))[self.gather] for row in (beta, gamma))
        if len(self.gather) == 1:
            return betas[0], gammas[0]
        # The gradient of this norm is 0, not NaN, where all scales are 0; of one scale it would be rounded twice.
        alone = self.gather[1] == len(beta)
        return betas.sum(0), torch.where(alone, gammas[0], torch.linalg.vector_norm(gammas, dim=0))

    def over_points(self, row: Tensor, missing: float, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        """Return one value for each channel from those of its points; `missing` where a site has fewer points."""
        return row if self.points is None else reduce(padded(row, missing)[self.points])

    def rank(self, scores: Tensor) -> Tensor:
        """Return the rank of each channel in its site, 0 for the highest score; of equals the lower index is first."""
        order = torch.argsort(scores, descending=True, stable=True)
        order = order[torch.argsort(self.site_of[order], stable=True)]
        position = torch.arange(self.channels, device=scores.device)
        return torch.empty_like(position).scatter(0, order, position) - self.starts[self.site_of]

    def fill_up(self, keep: Tensor, scores: Tensor, round_to: int, floors: Tensor) -> Tensor:
        """Keep the channels with the highest scores until the count of every site fits; tensor operations only.

        The count becomes the next multiple of `round_to` that is at least the site's floor, or the whole width where
        there is none. A kept channel stays kept. With a floor of 0 an empty mask stays empty.
        """
        counts = torch.zeros_like(floors).index_add(0, self.site_of, keep.to(floors.dtype)).maximum(floors)
        wanted = (counts + (round_to - 1)) // round_to * round_to
        return self.rank(torch.where(keep, torch.inf, scores)) < wanted[self.site_of]


def keep_common(scores: Sequence[Tensor], count: int) -> Tensor:
    """Return `count` channels that all coupled sites keep: those whose smallest score is the largest."""
    least = torch.stack([*scores]).amin(0)
    order = torch.argsort(least, descending=True, stable=True)
    position = torch.arange(least.numel(), device=least.device)
    return position.scatter(0, order, position) < count


def padded(row: Tensor, value: float = 0.0) -> Tensor:
    """Return `row` with one more element, which indices of what is missing point to."""
    return torch.cat([row, row.new_full((1,), value)])


def _slices(widths: Iterable[int]) -> list[slice]:
    """Return the places of parts of these widths, one behind the other."""
    return [slice(start, stop) for start, stop in pairwise(accumulate(widths, initial=0))]


def _points_of(site: Site) -> list[tuple[int | None, Sequence[str]]]:
    """Return the BatchNorms of each point, with the first channel of those that enter; None for the site's own."""
    own: list[tuple[int | None, Sequence[str]]] = [(None, point) for point in site.points or ((site.name,),)]
    return own + [(offset, point) for offset, inner in site.entering for point in inner]


def _index(columns: Sequence[Sequence[int]], size: int) -> Tensor | None:
    """Return columns of indices side by side, with `size` below shorter ones; None if they are 0 to `size` - 1."""
    most = max(len(column) for column in columns)
    index = np.array([[*column, *[size] * (most - len(column))] for column in columns]).T
    return None if np.array_equal(index, np.arange(size)[None]) else torch.from_numpy(np.ascontiguousarray(index))
