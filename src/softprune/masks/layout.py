"""Where the channels of all sites stand in one row."""

from collections.abc import Callable, Iterable, Mapping, Sequence
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
        self._widths = {name: _width(network, name) for name in self.names}
        self.widths = [self._widths[name] for name in self.members]
        self._starts = dict(zip(self.names, np.cumsum([0, *self._widths.values()]).tolist(), strict=False))
        self.slices: dict[str, slice] = {}
        """The channels of each site."""
        self.segments: list[tuple[str, slice]] = []
        """The points of each activation."""
        self._build(kinds)

    def _build(self, kinds: Mapping[str, Sequence[Site]]) -> None:
        rows: list[list[np.ndarray]] = []
        columns: list[np.ndarray] = []
        owners: list[np.ndarray] = []
        column = point = 0
        for activation, sites in kinds.items():
            first = point
            for site in sites:
                here = slice(column, column + site.width)
                self.slices[site.name] = here
                stacked = []
                for offset, members in _points_of(site):
                    rows.append([self._starts[name] + np.arange(self._widths[name]) for name in members])
                    width = len(rows[-1][0])
                    place = np.full(site.width, -1)
                    place[offset or 0 :][:width] = np.arange(point, point + width)[: site.width - (offset or 0)]
                    stacked.append(place)
                    owners.append(np.full(width, -1) if offset is not None else np.arange(here.start, here.stop))
                    point += width
                columns.append(np.stack(stacked, axis=1))
                column = here.stop
            self.segments.append((activation, slice(first, point)))
        self.channels = column
        total = sum(self._widths.values())
        gather = _stacked([np.stack(row, axis=1) for row in rows], total)
        self.gather = _unless_identity(gather, total)
        self.points = _unless_identity(_stacked(columns, point), point)
        self.owner = _unless_identity(np.where((own := np.concatenate(owners)) < 0, column, own)[None], column)
        names = {name: site.name for site in self.sites for name in site.members}
        self.columns = [self.slices[names[name]] for name in self.members]
        """The channels of each member."""
        expand = np.concatenate([np.arange(here.start, here.stop) for here in self.columns])
        self.expand = _unless_identity(expand[None], column)
        sizes = [site.width for site in self.sites]
        self.site_of = torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes))
        self.starts = torch.tensor([0, *np.cumsum(sizes)[:-1].tolist()])

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
        scores = scores.double() if not scores.is_floating_point() else scores
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


def _width(network: nn.Module, name: str) -> int:
    return int(network.get_submodule(name).num_features)  # type: ignore[arg-type]


def _points_of(site: Site) -> list[tuple[int | None, Sequence[str]]]:
    """Return the BatchNorms of each point, with the first channel of those that enter; None for the site's own."""
    own: list[tuple[int | None, Sequence[str]]] = [(None, point) for point in site.points or ((site.name,),)]
    return own + [(offset, point) for offset, inner in site.entering for point in inner]


def _stacked(parts: Sequence[np.ndarray], missing: int) -> np.ndarray:
    """Return index columns side by side, with `missing` below those that are shorter or have -1."""
    most = max(part.shape[1] for part in parts)
    wide = [np.pad(part, ((0, 0), (0, most - part.shape[1])), constant_values=-1) for part in parts]
    found = np.concatenate(wide).T
    return np.where(found < 0, missing, found)


def _unless_identity(index: np.ndarray, size: int) -> Tensor | None:
    if index.shape == (1, size) and np.array_equal(index[0], np.arange(size)):
        return None
    return torch.from_numpy(np.ascontiguousarray(index))
