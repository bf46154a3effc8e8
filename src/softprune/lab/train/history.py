"""What a run has done so far: its epochs, the channels of every site, and the cost of its network."""

import contextlib
import time
from datetime import UTC, datetime
from typing import Any, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, RootModel
from torch import Tensor, nn

from softprune.costs import Cost, PaperCounter, cost
from softprune.cut import PrunePlan
from softprune.errors import ConfigError
from softprune.lab.data import DataBundle
from softprune.lab.runs.result import Count, Epoch, Number, Pruned, SiteRecord, Text, Totals
from softprune.masks import norms_of
from softprune.masks.sites import deciding_affine
from softprune.methods import Pruner


class _Site(BaseModel):
    model_config = ConfigDict(strict=True)

    activation: str
    live: list[int]
    """Channels of the dense BatchNorm that the network still has."""
    beta: list[float]
    gamma: list[float]
    """Per dense channel; those cut away keep the values that they were cut with."""
    points: list[list[str]]
    """The BatchNorms that share the mask; empty for one."""
    entering: list[tuple[int, list[list[str]]]] = Field(default_factory=list)
    """Those of narrower streams that enter, with their first channel here."""


class SiteHistory(RootModel[dict[str, _Site]]):
    """The sites of a run in terms of its dense network, also after the network was cut during training."""

    @classmethod
    def of(cls, pruner: Pruner | None) -> "SiteHistory":
        return cls(
            {
                site.name: _Site(
                    activation=site.activation,
                    live=list(range(site.width)),
                    beta=[0.0] * site.width,
                    gamma=[0.0] * site.width,
                    points=[list(point) for point in site.points],
                    entering=[(offset, [list(point) for point in inner]) for offset, inner in site.entering],
                )
                for site in (() if pruner is None else pruner.sites)
            }
        )

    def dense_masks(self, masks: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return masks of the dense network from masks of the current one: a channel that was cut is False."""
        dense = {}
        for name, site in self.root.items():
            mask = torch.zeros(len(site.beta), dtype=torch.bool)
            if site.live:
                kept = masks[name].cpu() if name in masks else torch.ones(len(site.live), dtype=torch.bool)
                mask[torch.tensor(site.live)] = kept
            dense[name] = mask
        return dense

    def note(self, network: nn.Module) -> None:
        """Record shift and scale of the channels that the network has now."""
        for name, site in self.root.items():
            if not site.live:
                continue
            shifts, scales = deciding_affine(norms_of(network, name, site.points, site.entering))
            for channel, beta, gamma in zip(site.live, shifts.tolist(), scales.tolist(), strict=True):
                site.beta[channel], site.gamma[channel] = beta, gamma

    def cut(self, plan: PrunePlan) -> None:
        for name, site in self.root.items():
            if site.live and name in plan.modules:
                module = plan.modules[name]
                site.live = [] if module.void else [site.live[index] for index in module.outputs]

    def records(self, masks: dict[str, Tensor]) -> tuple[SiteRecord, ...]:
        dense = self.dense_masks(masks)
        return tuple(
            SiteRecord(
                name=name,
                activation=site.activation,
                width=len(site.beta),
                kept=int(dense[name].sum()),
                beta=tuple(site.beta),
                gamma=tuple(site.gamma),
                keep=tuple(dense[name].tolist()),
            )
            for name, site in self.root.items()
        )


class RunHistory(BaseModel):
    """What a run has done so far. Checkpoints hold it, and it is checked when one is read."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    sites: SiteHistory
    epoch: Count = 0
    """Epochs that are finished, of training and fine-tuning together."""
    batch: Count = 0
    """Batches of the current epoch that are finished."""
    epoch_ended: bool = False
    """Whether the pruner has been told of the end of the epoch, which is not recorded yet."""
    epochs: list[Epoch] = Field(default_factory=list)
    cuts: list[str] = Field(default_factory=list)
    """The plans that cut the network, as JSON."""
    finalised_step: Count | None = None
    """With a target: the step from which the removed channels were fixed."""
    pruned: Pruned | None = None
    given: tuple[Number, Number] = (None, None)
    """Top-1 and top-5 accuracy of the trained weights that the run began with, if it did."""
    seconds: float = 0.0
    epoch_seconds: float = 0.0
    started: Text = Field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    _counted_at: float = PrivateAttr(default_factory=time.monotonic)

    def count_time(self) -> None:
        now = time.monotonic()
        self.seconds += now - self._counted_at
        self.epoch_seconds += now - self._counted_at
        self._counted_at = now

    def next_epoch(self) -> None:
        self.epoch, self.batch, self.epoch_ended, self.epoch_seconds = self.epoch + 1, 0, False, 0.0

    def state_dict(self) -> dict[str, Any]:
        values = self.model_dump()
        return values | {"history": values.pop("epochs")}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        values = {name: state[name] for name in cls.model_fields.keys() - {"epochs"}}
        return cls(**values, epochs=state["history"])


class CostTracker:
    """Counts the cost of the dense network, on the CPU, once, and of what its masks keep on request."""

    def __init__(self, dense: nn.Module, data: DataBundle) -> None:
        self.dense_network = dense
        self._image = data.example(1)
        self.dense_cost = cost(dense, self._image)
        self._paper_counter: PaperCounter | None = None
        with contextlib.suppress(ConfigError):  # not one of the paper's networks
            counter = PaperCounter(dense, self._image)
            counter.count()
            self._paper_counter = counter
        self.dense = self._totals(self.dense_cost, {})
        self._last: tuple[dict[str, Tensor], Totals] | None = None

    def of_network(self, network: nn.Module, masks: dict[str, Tensor]) -> tuple[Cost, Totals]:
        """Return the cost of a compact network; ``masks`` are the dense network's, for the paper's counting."""
        device = next(network.parameters()).device
        counted = cost(network, self._image.to(device))
        return counted, self._totals(counted, masks)

    def kept(self, pruner: Pruner | None, sites: SiteHistory) -> Totals:
        """Return what a cut at this moment would leave: channels, params, macs and the paper's counting.

        While a method has not decided, that is the whole network, whose accuracy is measured too.
        """
        if pruner is None or not pruner.decided:
            return self.dense
        masks = sites.dense_masks(pruner.masks())
        # Late in training masks hardly change, and planning the cut of a deep network is slow.
        if self._last is not None and all(masks[name].equal(mask) for name, mask in self._last[0].items()):
            return self._last[1]
        plan = pruner.plan()
        masked = sum(len(mask) for mask in masks.values())
        channels = self.dense_cost.channels - masked + sum(int(mask.sum()) for mask in masks.values())
        kept = Totals(channels=channels, params=plan.params, macs=plan.macs, **self._paper(masks))
        self._last = (masks, kept)
        return kept

    def _totals(self, counted: Cost, masks: dict[str, Tensor]) -> Totals:
        return Totals(channels=counted.channels, params=counted.params, macs=counted.macs, **self._paper(masks))

    def _paper(self, masks: dict[str, Tensor]) -> dict[str, int]:
        if self._paper_counter is None:
            return {}
        counted = self._paper_counter.count(masks)
        return {"paper_channels": counted.channels, "paper_params": counted.params, "paper_flops": counted.flops}
