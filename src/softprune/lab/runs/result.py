"""The records of a run: result.json and the lines of metrics.jsonl. Does not import PyTorch.

A file that is damaged, edited or of another version raises a FileFormatError that names the file and the field.
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
"""A number, or None for a value that was not measured or is not finite (JSON has no NaN)."""


class Record(BaseModel):
    """Base class of all records: immutable, without unknown fields, with finite numbers."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Totals(Record):
    """Cost of a network. Older records also have ``paper_*``, counted like the authors of the paper."""

    channels: Count
    params: Count
    macs: Count
    activations: Count | None = None
    """None in older records and after an epoch, since activations are counted for whole networks only."""
    paper_channels: Count | None = None
    paper_params: Count | None = None
    paper_flops: Count | None = None

    @property
    def flops(self) -> int:
        """Two FLOPs per MAC."""
        return 2 * self.macs


def totals_of(counted: Any) -> Totals:
    """Convert a :class:`softprune.Cost`, or any record with its attributes, to Totals."""
    values: Any = {name: getattr(counted, name, None) for name in Totals.model_fields}
    return Totals(**values)


class AfterEpoch(Totals):
    """Cost of what the masks keep after epoch ``epoch``, counted from zero."""

    epoch: Count

    @property
    def number(self) -> int:
        """The epoch counted from one, as in reports and on the console."""
        return self.epoch + 1


class Epoch(AfterEpoch):
    """One line of metrics.jsonl: the numbers of an epoch."""

    step: Count
    """Number of optimizer steps of the run until the end of the epoch."""
    phase: Literal["train", "finetune"] = "train"
    decided: bool = True
    """Whether the method has decided which channels to remove."""
    lr: float
    strength: Number = None
    margin: Number = None
    """With a target: the share of the limit that a cut would leave unused; negative while the target is exceeded."""
    train_loss: Number
    """Mean training loss, without the penalty of the method."""
    penalty: Number = None
    """Mean penalty that the method adds to the loss; None if it adds none."""
    train_top1: float
    test_loss: Number = None
    test_top1: Number = None
    """In percent, like all accuracies; None for an epoch that was not evaluated."""
    test_top5: Number = None
    seconds: float
    images_per_second: float


class Pruned(Record):
    """Cost after the cut, and accuracy of the masked network before it."""

    kept: Totals
    top1: Number
    top5: Number
    round_to: Count


class Moment(AfterEpoch):
    """Cost and accuracy of the best or the last epoch."""

    top1: float
    top5: Number

    @classmethod
    def of(cls, row: Epoch) -> Self:
        assert row.test_top1 is not None
        return cls(**dict(totals_of(row)), epoch=row.epoch, top1=row.test_top1, top5=row.test_top5)


def best_epoch(rows: Sequence[Epoch]) -> Epoch | None:
    """Return the evaluated epoch with the highest accuracy; None if no epoch was evaluated.

    Only epochs of the last phase count, after the method has decided. With a target, those that meet it; if none does,
    return the last one.
    """
    final = [row for row in rows if row.test_top1 is not None and row.phase == rows[-1].phase and row.decided]
    met = [row for row in final if row.margin is None or row.margin >= 0] or final[-1:]
    return max(met, key=lambda row: row.test_top1 or 0.0, default=None)


class Variant(Record):
    """One row of the result table: the dense, masked or compact network."""

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
    """The git commit of softprune, and whether the working tree had changes."""

    commit: str
    changed: bool


class Environment(Record):
    """Software versions and hardware of a run."""

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
    """The content of result.json. Fields of earlier versions are ignored."""

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
    """Batch size of the latencies in ``table``."""
    round_to: Count | None = None
    """The multiple to which the number of kept channels was rounded."""
    finalised_step: Count | None = None
    """With a target: the step at which the removed channels became final."""
    sites: tuple[SiteRecord, ...] = ()
    modules: tuple[Module, ...] = ()
    config: Annotated[RunConfig, BeforeValidator(known_settings)]
    environment: Environment
    epochs: Annotated[tuple[Epoch, ...], MinLen(1)]

    def variant(self, name: str) -> Variant | None:
        return next((row for row in self.table if row.name == name), None)

    @property
    def latencies(self) -> tuple[float, float] | None:
        """Latencies of the dense and the compact network in milliseconds; None unless both were measured."""
        dense, compact = self.variant("dense"), self.variant("compact")
        if dense is None or compact is None or not dense.latency_ms or not compact.latency_ms:
            return None
        return dense.latency_ms, compact.latency_ms

    @property
    def speed_up(self) -> float | None:
        """Dense latency divided by compact latency; None unless both were measured."""
        return None if self.latencies is None else self.latencies[0] / self.latencies[1]

    @property
    def evaluated_on(self) -> str:
        """The images on which epochs are evaluated: "held-out" training images, or "test" images."""
        return "held-out" if self.config.data.holdout else "test"

    @property
    def compact_top1(self) -> float | None:
        """Top-1 accuracy of the compact network; else of the masked network; else of the last epoch."""
        found = (row.top1 for name in ("compact", "masked") if (row := self.variant(name)) is not None)
        return next((top1 for top1 in found if top1 is not None), self.last.top1)

    def to_json(self) -> str:
        """Return JSON with one entry per line, which keeps files small and diffs readable."""
        values = self.model_dump(mode="json")
        return "{\n" + ",\n".join(_entry(key, value) for key, value in values.items()) + "\n}\n"


class Run(Result):
    """The result of a run and the path of its folder."""

    path: Path
    baseline_top1: float | None = None
    """Mean accuracy of separate dense runs, for a run without its own dense baseline."""

    @property
    def dense_top1(self) -> float | None:
        """Top-1 accuracy of the dense network: of the run's own baseline, or else ``baseline_top1``."""
        row = self.variant("dense")
        return row.top1 if row and row.top1 is not None else self.baseline_top1


def _entry(key: str, value: Any) -> str:
    if isinstance(value, list) and value:
        rows = ",\n".join(json.dumps(row, separators=(",", ":")) for row in value)
        return f"{json.dumps(key)}: [\n{rows}\n]"
    return f"{json.dumps(key)}: {json.dumps(value)}"


def parse(content: bytes, place: str, remedy: str) -> Result:
    """Parse a result.json; raise a FileFormatError that names ``place`` and the field."""
    try:
        return Result.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = f" for {'.'.join(map(str, first['loc']))!r}" if first["loc"] else ""
        raise FileFormatError(
            f"{place} must be a valid record. Got {show(first['input'])}{field}: {first['msg']}. {remedy}"
        ) from error
