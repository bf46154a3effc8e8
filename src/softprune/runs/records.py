"""What a run folder holds, as typed read-only records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Totals:
    """What a network costs. ``paper_*`` is the authors' own counting, where it exists for the network."""

    macs: float | None = None
    params: float | None = None
    channels: float | None = None
    paper_flops: float | None = None
    paper_params: float | None = None
    paper_channels: float | None = None


@dataclass(frozen=True)
class Moment:
    """The masked network at one epoch: the best one, or the last."""

    epoch: int | None
    top1: float | None
    top5: float | None
    totals: Totals

    @property
    def number(self) -> int | None:
        """The epoch as pages and the console count, from one."""
        return None if self.epoch is None else self.epoch + 1


@dataclass(frozen=True)
class Variant:
    """One row of the table dense / masked / compact."""

    name: str
    top1: float | None
    top5: float | None
    params: float | None
    macs: float | None
    file_bytes: float | None
    latency_ms: float | None


@dataclass(frozen=True)
class Site:
    """One masked BatchNorm. ``beta``, ``gamma`` and ``keep`` are empty where the run did not record them."""

    name: str
    activation: str
    width: int
    kept: int
    beta: tuple[float, ...] = ()
    gamma: tuple[float, ...] = ()
    keep: tuple[bool, ...] = ()

    @property
    def has_channels(self) -> bool:
        return bool(self.beta and self.gamma and self.keep)


@dataclass(frozen=True)
class Module:
    """One convolution or linear layer, before and after the cut."""

    name: str
    kind: str
    macs_dense: float
    macs_compact: float
    params_dense: float | None
    params_compact: float | None
    out_dense: float | None
    out_compact: float | None


@dataclass(frozen=True)
class Epoch:
    """One line of metrics.jsonl, whose epochs count from zero; accuracies in percent, counts of what is kept."""

    epoch: int
    phase: str
    lr: float | None
    strength: float | None
    train_loss: float | None
    train_top1: float | None
    test_loss: float | None
    test_top1: float | None
    test_top5: float | None
    seconds: float | None
    totals: Totals

    @property
    def number(self) -> int:
        """The epoch as pages and the console count, from one."""
        return self.epoch + 1


@dataclass(frozen=True)
class Run:
    """Everything a report says about one run."""

    path: Path
    name: str
    model: str
    data: str
    method: str
    command: str
    seed: int | None
    started: str
    finished: str
    wall_seconds: float | None
    images_per_second: float | None
    dense: Totals
    compact: Totals
    best: Moment | None
    last: Moment | None
    table: tuple[Variant, ...] = ()
    sites: tuple[Site, ...] = ()
    modules: tuple[Module, ...] = ()
    epochs: tuple[Epoch, ...] = ()
    masks: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    sessions: tuple[Mapping[str, Any], ...] = ()
    in_progress: bool = False
    notes: tuple[str, ...] = ()
    baseline_top1: float | None = None
    """Accuracy of dense runs compared with this one, for a run that trained no dense network itself."""

    def variant(self, name: str) -> Variant | None:
        return next((row for row in self.table if row.name == name), None)

    @property
    def dense_top1(self) -> float | None:
        row = self.variant("dense")
        return row.top1 if row and row.top1 is not None else self.baseline_top1

    @property
    def finetuned(self) -> bool:
        return any(row.phase == "finetune" for row in self.epochs)

    @property
    def shipped_top1(self) -> float | None:
        """Accuracy of what the user takes away: the compact network, or what it equals."""
        for name in ("compact", "masked"):
            row = self.variant(name)
            if row is not None and row.top1 is not None:
                return row.top1
        return self.last.top1 if self.last else None
