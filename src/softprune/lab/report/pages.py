"""Content of the report page of a run, and of the page that compares runs."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from operator import itemgetter
from pathlib import Path

from markupsafe import Markup

from softprune.errors import SoftpruneError
from softprune.io import read_bytes
from softprune.lab.config.recipes import flat_settings
from softprune.lab.report import comparison, html, text
from softprune.lab.report.html import Column, Part, Series, curves, join, table, tag
from softprune.lab.runs.folder import load_run
from softprune.lab.runs.result import Epoch, Run
from softprune.target import read_target

PRECISIONS = {"bf16": "bfloat16", "tf32": "float32 with TF32", "fp32": "float32"}
MOST_WARNINGS = 20
_WARNING = re.compile(r"\S+ \S+ (?:WARNING|ERROR)\s+(.*)")
_COST_LEAD = (
    "Up and to the left is better. The dashed line is the Pareto front of the experiments; rings are dense networks."
)
_COSTS = {"macs": "MACs", "params": "Parameters", "activations": "Activations", "channels": "Channels"}


def render_run(run_dir: Path | str, out: Path | str | None = None) -> Path:
    """Write a self-contained HTML report of a finished run to ``out`` or RUN/report.html, and return its path."""
    run = load_run(run_dir)
    method = "trained without pruning" if run.method == "dense" else comparison.method_of(run)
    return html.write_page(
        Path(run_dir) / "report.html" if out is None else Path(out),
        then="`softprune report` writes it again, also to another path (--out)",
        title=f"{_place(run.model, run.data)}, {method}",
        kicker=f"softprune report · {run.name}",
        facts={
            "seed": str(run.seed),
            "epochs": len(run.epochs),
            "best": f"{run.best.top1:.2f}% in epoch {run.best.number}, chosen by {run.evaluated_on} accuracy",
            "trained in": f"{run.wall_seconds / 60:.1f} minutes",
            "images/s": text.count(run.images_per_second),
            "precision": precision_of(run),
            "on": run.environment.device,
            "finished": run.finished,
        },
        notes=warnings_of(run),
        cards=list(_cards(run)),
        sections=[_variants(run), _target(run), _epochs(run), _widths(run), _modules(run), _reproduce(run)],
    )


def _place(model: str, data: str) -> str:
    return text.known_as(model) + (f" on {text.known_as(data)}" if data else "")


def precision_of(run: Run) -> str:
    """Return the name of the training precision. TF32 is float32 on a CPU."""
    setting = run.config.train.precision
    return PRECISIONS["fp32" if run.environment.device.startswith("CPU") and setting == "tf32" else setting]


def warnings_of(run: Run) -> list[str]:
    """Return the distinct warnings and errors in run.log, at most twenty."""
    log = run.path / "run.log"
    lines = read_bytes(log).decode(errors="replace").splitlines() if log.is_file() else []
    times = Counter(match[1] for line in lines if (match := _WARNING.match(line)))
    texts = [message if n == 1 else f"{message} ({n} times)" for message, n in times.items()]
    more = len(texts) - MOST_WARNINGS
    return texts if more <= 0 else [*texts[:MOST_WARNINGS], f"{more} more in run.log"]


def _cards(run: Run) -> Iterator[html.Card]:
    top1, dense = run.compact_top1, run.dense_top1
    change = "no dense baseline" if top1 is None or dense is None else f"dense {dense:.2f}, {top1 - dense:+.2f}"
    yield html.Card("Top-1 accuracy", text.percent(top1, 2), top1, change)
    for key, title in _COSTS.items():
        before, after = getattr(run.dense, key), getattr(run.compact, key)
        removed = text.cut(before, after)
        if removed is not None:
            below, meter = f"{text.short(before)} → {text.short(after)}", html.bar(before, after, before)
            yield html.Card(title, text.percent(-removed), removed, below, meter)


def _variants(run: Run) -> Part:
    meanings = {
        "dense": "the network without masks",
        "masked": "removed channels multiplied by zero",
        "compact": "channels removed" + (", then fine-tuned" if run.epochs[-1].phase == "finetune" else ""),
    }
    costs = {"compact": run.compact}
    columns = [
        Column("Network", lambda row: tag("{} <small>{}</small>", row.name, meanings[row.name]), kind=""),
        Column("Top-1 %", lambda row: row.top1, text.fixed),
        Column("Top-5 %", lambda row: row.top5, text.fixed, "n spare"),
        Column("Parameters", lambda row: row.params, text.count),
        Column("MACs", lambda row: row.macs, text.count),
        Column("Activations", lambda row: costs.get(row.name, run.dense).activations, text.count, "n spare"),
        Column("File", lambda row: row.file_bytes, text.file_size, "n spare"),
        Column("Latency", lambda row: row.latency_ms, text.milliseconds),
    ]
    lead = "The network before pruning, the network during training, and the network that you deploy."
    if run.speed_up is not None:
        lead += f" Latency: one forward pass of {run.latency_batch} images on {run.environment.device}."
    known = [column for column in columns if any(column.value(row) is not None for row in run.table)]
    title = "Dense, masked, compact"
    return Part("variants", title, lead, table(title, known, run.table))


def _line(run: Run, label: str, style: str, get: Callable[[Epoch], float | None]) -> Series:
    return Series(label, style, [(row.number, get(row)) for row in run.epochs])


def _epochs(run: Run) -> Part:
    on, dense = run.evaluated_on, run.dense
    accuracies = [
        _line(run, f"{on} top-1", "s-test", lambda row: row.test_top1),
        _line(run, "train top-1", "s-train", lambda row: row.train_top1),
    ]
    with suppress(SoftpruneError):  # a run without a baseline
        baseline = load_run(run.path / "dense")
        accuracies.append(_line(baseline, "dense top-1", "s-dense", lambda row: row.test_top1))
    removed = []
    for key, title in _COSTS.items():
        shares = [(row.number, text.cut(getattr(dense, key), getattr(row, key))) for row in run.epochs]
        removed.append(Series(f"{title} removed", f"s-{key}", shares))
    losses = [
        _line(run, f"{on} loss", "s-test", lambda row: row.test_loss),
        _line(run, "train loss", "s-train", lambda row: row.train_loss),
        _line(run, "penalty", "s-params", lambda row: row.penalty),
    ]
    rate = _line(run, "learning rate", "s-macs", lambda row: row.lr)
    events = [(row.number, "fine-tuning") for before, row in pairwise(run.epochs) if row.phase != before.phase]
    parts = [
        curves("top-1 accuracy, %", accuracies, lambda value: text.percent(value, 2), events=events, zoom=True),
        curves("removed, % of the dense network", removed, text.percent, events=events, from_zero=True),
        curves("loss", losses, from_zero=True),
        curves("learning rate", [rate], log=True),
    ]
    lead = "The accuracy of the masked network, and the share that a cut would remove."
    return Part("epochs", "Epoch by epoch", lead, join(parts))


def _target(run: Run) -> Part:
    if not run.config.method.target:
        return Part("target", "The target", "", Markup())
    target = read_target(run.config.method.target)
    dense, reached = (getattr(each, target.key, None) for each in (run.dense, run.compact))
    share = f"{text.percent(100 * target.amount)} of the dense network"
    if dense is not None and reached is not None:
        limit = target.limit(dense)
        lead = f"At most {target.figure(limit)}{f', {share}' if target.is_share else ''}. The compact network has "
        lead += f"{text.count(reached)}, {text.percent(100 * reached / limit)} of the limit. "
    else:  # metrics that records do not contain, such as the latency
        limit_text = f"{share}'s {target.key}" if target.is_share else target.figure(target.amount)
        lead = f"At most {limit_text}. "
    if run.finalised_step is not None:
        lead += f"The removed channels became final at step {text.count(run.finalised_step)}."
    lines = [
        _line(run, "a cut", "s-macs", lambda row: None if row.margin is None else 100 * (1 - row.margin)),
        _line(run, "limit", "s-dense", lambda row: None if row.margin is None else 100.0),
    ]
    return Part("target", "The target", lead, curves("cost after a cut, % of the limit", lines))


def _widths(run: Run) -> Part:
    kept, width = (sum(getattr(site, name) for site in run.sites) for name in ("kept", "width"))
    lead = f"{len(run.sites)} masked layers had {text.count(width)} channels and keep {text.count(kept)}."
    rows = [(site.name, "", site.width, site.kept) for site in run.sites]
    return Part("widths", "Width of every layer, before and after", lead, _bars("Channels per layer", rows))


def _modules(run: Run) -> Part:
    lead = f"{text.short(run.dense.macs)} multiply-accumulates per forward pass became {text.short(run.compact.macs)}."
    rows = [(each.name, each.kind, each.macs_dense, each.macs_compact) for each in run.modules if each.macs_dense]
    return Part("macs", "Where the MACs went", lead, _bars("MACs per module", rows))


def _bars(caption: str, rows: Sequence[tuple[str, str, int, int]]) -> Markup:
    """Return a table of layers from rows (name, kind, value before, value after)."""
    if not rows:
        return Markup()
    largest = max(max(before, after) for _, _, before, after in rows)
    columns = [
        Column("Layer", lambda row: tag("{} <small>{}</small>", row[0], row[1]), kind=""),
        Column("", lambda row: html.bar(row[2], row[3], largest), kind="wide"),
        Column("Before", lambda row: row[2], text.short),
        Column("After", lambda row: row[3], text.short),
        Column("Removed", lambda row: text.cut(row[2], row[3]), lambda value: text.percent(value, 0)),
    ]
    return table(caption, columns, rows)


def _reproduce(run: Run) -> Part:
    parts = [tag("<pre><code>{}</code></pre>", run.command)]
    columns = [
        Column("", itemgetter(0), kind=""),
        Column("", lambda pair: json.dumps(pair[1], ensure_ascii=False), kind=""),
    ]
    for title, record in (("Configuration", run.config), ("Environment", run.environment)):
        settings = table(title, columns, flat_settings(record.model_dump(mode="json")))
        parts.append(tag("<details><summary>{}</summary>{}</details>", title, settings))
    return Part("appendix", "Reproduce", f"The run folder is {run.path}.", join(parts))


def render_comparison(run_dirs: Sequence[Path | str], out: Path | str) -> Path:
    """Write a self-contained HTML page that compares finished runs to ``out``, and return its path.

    Runs that differ only in the seed form one experiment, shown with mean and spread.
    """
    rows, repeats = comparison.compare_runs([load_run(folder) for folder in run_dirs])
    runs = [run for row in rows for run in row.runs]
    places, precisions = {(run.model, run.data) for run in runs}, sorted({precision_of(run) for run in runs})
    if len({run.data for run in runs}) > 1:
        repeats.append("These runs use different data. Their accuracies cannot be compared.")
    what = _place(*next(iter(places))) if len(places) == 1 else f"{len(places)} networks"
    return html.write_page(
        Path(out),
        then="compare again",
        title=f"{what}: {len(rows)} experiment{'s' if len(rows) != 1 else ''}",
        kicker="softprune comparison",
        facts={
            "runs": len(runs),
            "seeds": ", ".join(map(str, sorted({run.seed for run in runs}))),
            "precision": ", ".join(precisions),
        },
        notes=repeats,
        cards=[],
        sections=[_summary(rows), Part("cost", "Accuracy against cost", _COST_LEAD, join(_scatters(rows)))],
    )


def _summary(rows: Sequence[comparison.Row]) -> Part:
    heads, cells = comparison.cells_of(rows)
    swatch = '<span class="swatch {}"></span> {}'
    names = [tag(swatch, html.style_of(index), row.label) for index, row in enumerate(rows)]
    lines = [(name, *line[4:]) for name, line in zip(names, cells, strict=True)]
    columns = [Column(head, itemgetter(at)) for at, head in enumerate(["Experiment", *heads[4:]])]
    body = [table("Experiments", columns, lines), tag('<p class="lead">{}</p>', comparison.EXPLANATION)]
    return Part("table", "Mean and spread", "", join(body))


def _scatters(rows: Sequence[comparison.Row]) -> Iterator[Markup]:
    """Yield charts of accuracy against MACs and against latency."""
    costs: dict[str, Callable[[Run], tuple[float, float] | None]] = {
        "million MACs": lambda run: (run.dense.macs / 1e6, run.compact.macs / 1e6),
        "ms": lambda run: run.latencies,
    }
    for unit, cost in costs.items():
        rings, groups = dict[tuple[float, float | None], None](), []
        for index, row in enumerate(rows):
            found = [(*pair, run) for run in row.runs if (pair := cost(run)) is not None]
            rings |= {(before, run.dense_top1): None for before, _, run in found}
            spots = [(after, run.compact_top1) for _, after, run in found]
            groups.append(Series(row.label, html.style_of(index), spots))
        title = "top-1 accuracy, %, against " + ("measured time" if unit == "ms" else "MACs")
        best = comparison.front(group.mean for group in groups if group.known)
        yield html.scatter(title, unit, groups, Series("dense", "", list(rings)), best)
