"""GPU seconds of a run, from the step times in benchmarks/records/.

    python benchmarks/gpu/prices.py    # predicted and measured minutes of the runs of two sessions

A step of a cut network takes the share `FIXED` of its time, and the rest in proportion to the MACs. Start-up is work of
the CPU, which runs beside it do not slow down.
"""

import json
import math
import statistics
import sys
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent)]

from run_jobs import SHARING  # noqa: E402
from speed_page import RECORD  # noqa: E402

from softprune.lab.config.settings import RunConfig  # noqa: E402
from softprune.lab.report import paper_figures  # noqa: E402
from softprune.lab.runs.folder import RunFolder  # noqa: E402
from softprune.lab.runs.result import Result  # noqa: E402

RESULTS = HERE.parents[1] / "results"
IMAGES, TEST_IMAGES = 50_000, 10_000
"""Of CIFAR. The 100 classes of Tiny-ImageNet have as many to train with."""
FIXED = 0.65
"""VGGs cut to 71%, 63%, 48% and 19% of their MACs took 0.87, 0.88, 0.78 and 0.82 of the time, ResNet-56 at 50% 0.84."""
BATCH = 0.63
"""Exponent of the batch: ResNet-56 takes 1.55 times as long for a step with twice the images."""
FORWARD = 0.25
"""Share of a step that a pass without gradients takes, a teacher's or an evaluation's: ResNet-56 0.22, VGG-16 0.35."""
FLOAT32 = 5.0
"""Times bfloat16, from VGG-16 beside a DenseNet-40, which had two fifths of its rate alone."""
SESSIONS = (("2026-11-17T09:13", "2026-11-17T09:39"), ("2026-11-17T12:51", "2026-11-17T13:15"))
"""Begin and end of sessions of which every run has a record, so that the runs beside each are known."""


@dataclass(frozen=True)
class Price:
    """Seconds of the parts of a run, alone on one H200."""

    startup: float
    dense: float
    train: float
    finetune: float

    @property
    def work(self) -> float:
        """Seconds on the GPU."""
        return self.dense + self.train + self.finetune


@cache
def timed() -> dict[str, tuple[float, int, float]]:
    """Milliseconds of a step, its batch and seconds to start, of the networks that were timed alone.

    The step is the fastest that was measured: what a busy GPU adds is in `SHARING`. The start, with an
    empty cache, depends on what starts beside it, so it is the median.
    """
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    rows, batch = record["rows"], record["settings"]["batch"]
    found = {}
    for model in {row["model"] for row in rows}:
        fast = [row for row in rows if (row["model"], row["variant"], row["masks"]) == (model, "fast", True)]
        cold = [row["startup_seconds"] for row in fast if not (row.get("warm_cache") or row.get("crowded_start"))]
        found[model] = (min(row["ms_per_step"] for row in fast), batch, statistics.median(cold))
    waiting = json.loads(RECORD.with_name("gpu_waiting.json").read_text(encoding="utf-8"))["rows"]
    row = next(row for row in waiting if (row.get("model"), row.get("form")) == ("resnet50_64", "folder"))
    size = round(row["images_per_second"] * row["ms_per_step"] / 1000)
    return found | {"resnet56_a": found["resnet56"], "resnet50_64": (row["ms_per_step"], size, row["startup_seconds"])}


def price(config: RunConfig, kept: float | None = None) -> Price:
    """Return the price of a run. ``kept`` is the share of MACs that is fine-tuned: the paper's, or all, by default."""
    if config.model.name not in timed():
        raise SystemExit(f"A network must have been timed (benchmarks/step_time.py). Got {config.model.name}.")
    ms, batch, startup = timed()[config.model.name]
    train, size, teacher = config.train, config.data.batch_size, bool(config.distill.teacher)
    if kept is None:
        paper = paper_figures().get(config.name.replace("tinyimagenet", "imagenet"))
        kept = 1 - ((paper and paper.flops) or 0) / 100

    def seconds(epochs: int, macs: float = 1.0, passes: float = 1.0) -> float:
        step = ms / 1000 * (FIXED + (1 - FIXED) * macs) * (size / batch) ** BATCH
        step *= FLOAT32 if train.precision == "fp32" else 1
        passes += FORWARD * TEST_IMAGES / IMAGES / config.records.eval_epochs
        return epochs * math.ceil(IMAGES / size) * step * passes

    return Price(
        startup,
        seconds(train.dense_epochs or train.epochs) if train.dense_baseline else 0.0,
        seconds(train.epochs, passes=1 + FORWARD * teacher),
        seconds(config.finetune.epochs, kept, 1 + FORWARD * teacher),
    )


@dataclass(frozen=True)
class Check:
    """A run of a session: predicted and measured seconds on the GPU, and how many ran beside it on average."""

    name: str
    beside: float
    predicted: float
    measured: float
    """Less what the runs beside it added, by SHARING."""


def checks(results: Path = RESULTS) -> list[Check]:
    """Compare the prices of the runs of the sessions with their times."""
    records = [RunFolder(path.parent).read_result() for path in sorted(results.glob("**/result.json"))]
    found = []
    for start, stop in SESSIONS:
        spans = [(_span(each), each) for each in records if each.sessions and start <= each.sessions[-1].started < stop]
        for (begin, end), record in spans:
            if record.model not in timed():
                continue
            cost = price(record.config, record.compact.macs / record.dense.macs)
            work = cost.work if len(record.sessions) == 1 else cost.finetune  # a fork has its training from another run
            others = [span for span, each in spans if each is not record]
            beside = [sum(a <= now < b for a, b in others) for now in range(int(begin + cost.startup), int(end))]
            measured = sum(1 / (1 + SHARING * each) for each in beside)
            found.append(Check(f"{record.name}-s{record.seed}", sum(beside) / len(beside), work, measured))
    return found


def _span(record: Result) -> tuple[float, float]:
    """When the last session of a run began and ended."""
    begin, end = (datetime.fromisoformat(text) for text in (record.sessions[-1].started, record.finished))
    return begin.timestamp(), end.timestamp()


if __name__ == "__main__":
    print("| run | beside | predicted min | measured min | ratio |\n|---|---:|---:|---:|---:|")
    for each in checks():
        cells = f"{each.beside:.1f} | {each.predicted / 60:.1f} | {each.measured / 60:.1f}"
        print(f"| {each.name} | {cells} | {each.predicted / each.measured:.2f} |")
