"""A model whose sites are masked in place, and the checks that it still is what was masked."""

from collections.abc import Iterator, Mapping

from torch import nn

from softprune.errors import ModelError
from softprune.graph import Site
from softprune.masks import Clock, Gate, MaskedBatchNorm, mask_, mask_group_
from softprune.masks.sampling import hook_root_, unmask_model_
from softprune.masks.sites import modules_of, slopes_of


class MaskedModel:
    """The model of a pruner, whose BatchNorms are masked in place, with a gate on every site.

    Of the sites in `coupled`, only the channels that all of them keep remain.
    """

    def __init__(
        self, model: nn.Module, gates: Mapping[Site, Gate], coupled: Mapping[str, tuple[str, ...]], clock: Clock
    ) -> None:
        self.model = model
        self.norms = {site.name: _mask_site_(model, site, gate) for site, gate in gates.items()}
        self.members = {name: bn for site in gates for name, bn in _members(site, self.norms[site.name])}
        for name, bn in self.norms.items():
            bn.coupled = tuple(self.norms[other] for other in coupled.get(name, ()))
        self._paths = {name: name.split(".") if name else [] for name in self.members}
        self.hooks = hook_root_(model, clock, self.members.values())
        self._shapes = _shapes(model)
        self._detached = False

    def detach(self) -> nn.Module:
        """Remove masks and hooks and return the plain model."""
        unmask_model_(self.model)
        self._detached = True
        return self.model

    def check_in_place(self) -> None:
        """Raise a ModelError unless the masked BatchNorms are still part of the model."""
        if self._detached:
            raise ModelError("a pruner cannot be used after detach(). Got a call after it; make a new pruner.")
        for name, bn in self.members.items():
            # Runs in every step for every site: get_submodule would take a millisecond for a hundred sites.
            here: nn.Module | None = self.model
            for part in self._paths[name]:
                here = None if here is None else here._modules.get(part)
            if here is not bn or not isinstance(here, MaskedBatchNorm):
                raise ModelError(
                    f"the sites of a pruner must stay in place. '{name}' is now "
                    f"{'gone' if here is None else 'a ' + type(here).__name__}, no longer the BatchNorm that was "
                    "masked; convert modules (convert_sync_batchnorm, fusing, wrapping) before making the pruner, "
                    "or detach() first."
                )

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the network inside DDP, EMA or compile wrappers, which must be a copy of this one."""
        while type(model) is not type(self.model):
            inner = getattr(model, "module", None) or getattr(model, "_orig_mod", None)
            if not isinstance(inner, nn.Module):
                raise ModelError(
                    f"`model` must be a copy of the network that is being pruned, a {type(self.model).__name__}. "
                    f"Got a {type(model).__name__}."
                )
            model = inner
        theirs = _shapes(model)
        if self._shapes != theirs:
            name = _first_difference(self._shapes, theirs)
            raise ModelError(
                "`model` must be a copy of the network that is being pruned, with parameters of the same names and "
                f"shapes. Got {theirs.get(name, 'no such parameter')} for '{name}', which is "
                f"{self._shapes.get(name, 'no parameter')} there."
            )
        return model

    def check_unchanged(self) -> None:
        """Raise a ModelError if the network's layers are no longer those that the pruner was made for."""
        now = _shapes(self.model)
        if now != self._shapes:
            name = _first_difference(self._shapes, now)
            raise ModelError(
                "the network must stay as it was when the pruner was made. "
                f"'{name}' was {self._shapes.get(name, 'absent')} and is now {now.get(name, 'absent')}; replace "
                "layers, a classifier for example, before making the pruner."
            )


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _first_difference(ours: Mapping[str, object], theirs: Mapping[str, object]) -> str:
    return next(name for name in (*ours, *theirs) if ours.get(name) != theirs.get(name))


def _mask_site_(model: nn.Module, site: Site, gate: Gate) -> MaskedBatchNorm:
    """Mask the BatchNorms of one site, in place, and return the first."""
    points, entering = modules_of(model, site.points or [[site.name]], site.entering)
    norm = mask_group_(points, gate, entering) if site.points else mask_(points[0][0], gate)
    for _, member in _members(site, norm):
        member.slopes = slopes_of(model, site.slopes)
    return norm


def _members(site: Site, norm: MaskedBatchNorm) -> Iterator[tuple[str, MaskedBatchNorm]]:
    """Yield the masked BatchNorms of one site with their names."""
    norms = [bn for point in norm.group for bn in point] or [norm]
    yield from zip(site.members, norms, strict=True)
