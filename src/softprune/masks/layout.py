"""Layout of the channels of all sites in one vector."""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from softprune.graph.channels import Site
from softprune.masks.functional import raised


class Layout:
    """Vectors of the channels of all sites, and the indices that map between them.

    *Members* are the BatchNorms of the sites. BatchNorms whose outputs are summed form a single *point*. A *site* has
    one mask; its channel is dead if it is dead at all points of the site (a residual stream has several). Points
    of a narrower stream that is zero-padded and added to the site's stream count too. If every site is a single
    BatchNorm, the vectors of members, points and channels are the same, and the indices are None.

    Sites with the same activation are adjacent.
    """

    gather: Tensor | None
    """Positions of the members of each point, (max members, points); one past the end where a point has fewer."""
    points: Tensor | None
    """Points of each channel, (max points, channels); one past the end where a site has fewer."""
    expand: Tensor | None
    """For each position in the vector of members, the channel that gives its mask, (1, members)."""
    owner: Tensor | None
    """For each point, its channel, (1, points); one past the end for points of an entering stream."""

    def __init__(self, sites: Iterable[Site], network: nn.Module) -> None:
        kinds: dict[str, list[Site]] = {}
        for site in sites:
            kinds.setdefault(site.activation, []).append(site)
        self.sites = tuple(site for same in kinds.values() for site in same)
        self.members = tuple(name for site in self.sites for name in site.members)
        entering = (name for site in self.sites for _, inner in site.entering for point in inner for name in point)
        self.names = tuple(dict.fromkeys([*self.members, *entering]))
        """Names of the members, followed by BatchNorms without a mask in streams that enter a site."""
        widths = [int(module.num_features) for module in self.modules(network)]
        self.widths = widths[: len(self.members)]
        self.slices = dict(zip((site.name for site in self.sites), _slices(s.width for s in self.sites), strict=True))
        """Slice of the channels of each site, by name."""
        site_of_member = {name: site.name for site in self.sites for name in site.members}
        self.columns = [self.slices[site_of_member[name]] for name in self.members]
        """Slice of the channels of each member."""
        self.channels = sum(site.width for site in self.sites)
        self.segments: list[tuple[str, slice]] = []
        """(activation, slice of its points)."""
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
        """Return the BatchNorms of `network` with the names in `names`."""
        return tuple(network.get_submodule(name) for name in self.names)

    def at_members(self, row: Tensor) -> Tensor:
        """Expand a vector of channels to a vector of members."""
        return row if self.expand is None else row[self.expand[0]]

    def at_points(self, beta: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
        """Return shift and scale of the points: a sum of BatchNorms has ``N(sum of beta, sum of gamma^2)``.

        This extends the paper to BatchNorms whose outputs are added before the activation, assuming that these are
        independent.
        """
        if self.gather is None:
            return beta, gamma
        betas, gammas = (padded(raised(row))[self.gather] for row in (beta, gamma))
        if len(self.gather) == 1:
            return betas[0], gammas[0]
        # Unlike sqrt, this norm has gradient 0, not NaN, if all scales are 0. A single scale is used without rounding.
        alone = self.gather[1] == len(beta)
        return betas.sum(0), torch.where(alone, gammas[0], torch.linalg.vector_norm(gammas, dim=0))

    def over_points(self, row: Tensor, missing: float, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        """Reduce the values of the points of each channel; `missing` stands for points that a site does not have."""
        return row if self.points is None else reduce(padded(row, missing)[self.points])

    def rank(self, scores: Tensor) -> Tensor:
        """Return the rank of each channel in its site, 0 for the highest score. Ties are ranked by index."""
        order = torch.argsort(scores, descending=True, stable=True)
        order = order[torch.argsort(self.site_of[order], stable=True)]
        position = torch.arange(self.channels, device=scores.device)
        return torch.empty_like(position).scatter(0, order, position) - self.starts[self.site_of]

    def fill_up(self, keep: Tensor, scores: Tensor, round_to: int, floors: Tensor) -> Tensor:
        """Add the channels with the highest scores to `keep` until each site meets its floor and multiple.

        The number of kept channels becomes the smallest multiple of `round_to` that is not below it and the floor, or
        the width of the site. An empty mask stays empty if the floor is 0. Only tensor operations are used.
        """
        counts = torch.zeros_like(floors).index_add(0, self.site_of, keep.to(floors.dtype)).maximum(floors)
        wanted = (counts + (round_to - 1)) // round_to * round_to
        return self.rank(torch.where(keep, torch.inf, scores)) < wanted[self.site_of]


def keep_common(scores: Sequence[Tensor], count: int) -> Tensor:
    """Return a mask of the `count` channels of coupled sites with the largest minimum score over the sites."""
    least = torch.stack([*scores]).amin(0)
    order = torch.argsort(least, descending=True, stable=True)
    position = torch.arange(least.numel(), device=least.device)
    return position.scatter(0, order, position) < count


def padded(row: Tensor, value: float = 0.0) -> Tensor:
    """Append one element to `row`, to which the indices of missing elements point."""
    return torch.cat([row, row.new_full((1,), value)])


def _slices(widths: Iterable[int]) -> list[slice]:
    """Return consecutive slices with these widths."""
    return [slice(start, stop) for start, stop in pairwise(accumulate(widths, initial=0))]


def _points_of(site: Site) -> list[tuple[int | None, Sequence[str]]]:
    """Return (offset, BatchNorms) of each point: the first channel of an entering stream, or None for own points."""
    own: list[tuple[int | None, Sequence[str]]] = [(None, point) for point in site.points or ((site.name,),)]
    return own + [(offset, point) for offset, inner in site.entering for point in inner]


def _index(columns: Sequence[Sequence[int]], size: int) -> Tensor | None:
    """Stack columns of indices, padded with `size`, to (max length, columns); None for the identity on `size`."""
    most = max(len(column) for column in columns)
    index = np.array([[*column, *[size] * (most - len(column))] for column in columns]).T
    return None if np.array_equal(index, np.arange(size)[None]) else torch.from_numpy(np.ascontiguousarray(index))
