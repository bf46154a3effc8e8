"""The records of a run: result.json and the lines of metrics.jsonl. Imports no PyTorch.

Training makes these models and writes them; reports, comparisons and benchmarks read them. A file that is damaged,
edited or of another version ends in a FileFormatError that names the file and the field.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from annotated_types import Ge, Lt, MinLen
from pydantic import BaseModel, BeforeValidator, ConfigDict
from pydantic_core import ValidationError

from softprune.errors import FileFormatError, show
from softprune.lab.config.settings import RunConfig, known_settings

Count = Annotated[int, Ge(0), Lt(2**63)]
Number = Annotated[
    float | None, BeforeValidator(lambda value: value if not isinstance(value, float) or math.isfinite(value) else None)
]
"""A loss that diverged is unknown: JSON has no NaN."""


class Record(BaseModel):
    """Base of all records: immutable, without unknown fields, with finite numbers."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Totals(Record):
    """Cost of a network. Older records also have it as the paper's authors count, ``paper_*``."""

    channels: Count
    params: Count
    macs: Count
    activations: Count | None = None
    """None in older records, and after an epoch: only whole networks are counted."""
    paper_channels: Count | None = None
    paper_params: Count | None = None
    paper_flops: Count | None = None

    @property
    def flops(self) -> int:
        """Two per multiply-accumulate."""
        return 2 * self.macs


def totals_of(counted: Any) -> Totals:
    """Return the cost alone, of what :func:`softprune.cost` counted or of a record that has more than it."""
    values: Any = {name: getattr(counted, name, None) for name in Totals.model_fields}
    return Totals(**values)


class AfterEpoch(Totals):
    """The masked network after an epoch, which is counted from zero."""

    epoch: Count

    @property
    def number(self) -> int:
        """The epoch as pages and the console count, from one."""
        return self.epoch + 1


class Epoch(AfterEpoch):
    """One line of metrics.jsonl: an epoch, and the cost of what the masks keep after it."""

    step: Count
    """Optimizer steps of the run until the end of the epoch."""
    phase: Literal["train", "finetune"] = "train"
    decided: bool = True
    """Whether the method had decided which channels to remove."""
    lr: float
    strength: Number = None
    margin: Number = None
    """With a target: the share of the limit that a cut would leave unused; negative while it is exceeded."""
    train_loss: Number
    """Mean cross-entropy, without what the method adds."""
    penalty: Number = None
    """Mean of what the method adds to the loss; None for a method that adds nothing."""
    train_top1: float
    test_loss: Number = None
    test_top1: Number = None
    """Accuracies are in percent; None for an epoch that was not evaluated."""
    test_top5: Number = None
    seconds: float
    images_per_second: float


class Pruned(Record):
    """What the last cut decided, and the accuracy of the masked network before it."""

    kept: Totals
    top1: Number
    top5: Number
    round_to: Count


class Moment(AfterEpoch):
    """The best epoch, or the last."""

    top1: float
    top5: Number

    @classmethod
    def of(cls, row: Epoch) -> Self:
        assert row.test_top1 is not None
        return cls(**dict(totals_of(row)), epoch=row.epoch, top1=row.test_top1, top5=row.test_top5)


def best_epoch(rows: Sequence[Epoch]) -> Epoch | None:
    """Return the tested epoch of the final network with the highest accuracy; None if there is none.

    Not counted are epochs before the network was cut or fine-tuned, and with a target those before it was met.
    """
    final = [row for row in rows if row.test_top1 is not None and row.phase == rows[-1].phase and row.decided]
    met = [row for row in final if row.margin is None or row.margin >= 0] or final[-1:]
    return max(met, key=lambda row: row.test_top1 or 0.0, default=None)


class Variant(Record):
    """One row of the table dense / masked / compact."""

    name: Literal["dense", "masked", "compact"]
    top1: Number
    top5: Number
    params: Count
    macs: Count
    file_bytes: Count | None
    latency_ms: Number


class SiteRecord(Record, extra="ignore"):
    """One masked BatchNorm of the dense network."""

    name: str
    activation: str
    width: Count
    kept: Count


class Module(Record, extra="ignore"):
    """One convolution or linear layer, before and after the cut."""

    name: str
    kind: str
    macs_dense: Count
    macs_compact: Count


class Revision(Record):
    """The commit of the checkout that softprune ran from."""

    commit: str
    changed: bool


class Environment(Record):
    """Versions and hardware."""

    python: str
    torch: str
    numpy: str
    softprune: str
    cuda: str | None
    cudnn: Count | None
    device: str
    processes: Count
    threads: Count
    platform: str
    git: Revision | None


class Result(Record, extra="ignore"):
    """The content of result.json. Fields of earlier versions are left out."""

    format: Literal[2] = 2
    name: str
    command: str
    model: str
    data: str
    method: str
    seed: Count
    started: str
    finished: str
    wall_seconds: float
    images_per_second: float
    dense: Totals
    compact: Totals
    best: Moment
    last: Moment
    table: tuple[Variant, ...]
    latency_batch: Count = 64
    """Images per forward pass of the latencies in ``table``."""
    round_to: Count | None = None
    """The multiple that widths were kept at."""
    finalised_step: Count | None = None
    """With a target: the step from which the removed channels were fixed."""
    sites: tuple[SiteRecord, ...] = ()
    modules: tuple[Module, ...] = ()
    config: Annotated[RunConfig, BeforeValidator(known_settings)]
    environment: Environment
    epochs: Annotated[tuple[Epoch, ...], MinLen(1)]

    def variant(self, name: str) -> Variant | None:
        return next((row for row in self.table if row.name == name), None)

    @property
    def latencies(self) -> tuple[float, float] | None:
        """Milliseconds of the dense and the compact network; None where one was not measured."""
        dense, compact = self.variant("dense"), self.variant("compact")
        if dense is None or compact is None or not dense.latency_ms or not compact.latency_ms:
            return None
        return dense.latency_ms, compact.latency_ms

    @property
    def speed_up(self) -> float | None:
        """Latency of the dense network over that of the compact one; None where one was not measured."""
        return None if self.latencies is None else self.latencies[0] / self.latencies[1]

    @property
    def evaluated_on(self) -> str:
        """The images that each epoch is evaluated on: "test", or "held-out" ones of the training images."""
        return "held-out" if self.config.data.holdout else "test"

    @property
    def compact_top1(self) -> float | None:
        """Accuracy of the compact network, or of the network that it equals."""
        found = (row.top1 for name in ("compact", "masked") if (row := self.variant(name)) is not None)
        return next((top1 for top1 in found if top1 is not None), self.last.top1)

    def to_json(self) -> str:
        """Return the file's content: a line per entry, so that files stay small and diffs readable."""
        values = self.model_dump(mode="json")
        return "{\n" + ",\n".join(_entry(key, value) for key, value in values.items()) + "\n}\n"


class Run(Result):
    """The record of a run, and where it is."""

    path: Path
    baseline_top1: float | None = None
    """Accuracy of dense runs compared with this one, for a run that trained no dense network itself."""

    @property
    def dense_top1(self) -> float | None:
        """Accuracy of the dense network: the run's own baseline, or that of the dense runs beside it."""
        row = self.variant("dense")
        return row.top1 if row and row.top1 is not None else self.baseline_top1


def _entry(key: str, value: Any) -> str:
    if isinstance(value, list) and value:
        rows = ",\n".join(json.dumps(row, separators=(",", ":")) for row in value)
        return f"{json.dumps(key)}: [\n{rows}\n]"
    return f"{json.dumps(key)}: {json.dumps(value)}"


def parse(content: bytes, place: str, remedy: str) -> Result:
    """Return the record in a result.json, or raise a FileFormatError that names the place and the field."""
    try:
        return Result.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = f" for {'.'.join(map(str, first['loc']))!r}" if first["loc"] else ""
        raise FileFormatError(
            f"{place} must be what softprune writes. Got {show(first['input'])}{field}: {first['msg']}. {remedy}"
        ) from error
