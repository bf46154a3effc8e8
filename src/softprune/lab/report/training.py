"""How a run was trained: precision, warnings, accuracy and pruning by epoch, loss, and the path to its target."""

import re
from collections import Counter
from typing import Any

from softprune.errors import SoftpruneError
from softprune.io import read_bytes
from softprune.lab.report.curves import ACCURACY, REMOVED, Panel, Series, curves, events_of, line_of
from softprune.lab.report.text import accuracy, count, cut, percent, significant
from softprune.lab.runs.folder import Run, load_run
from softprune.target import Target, read_target

PRECISIONS = {"bf16": "bfloat16", "tf32": "float32 with TF32", "fp32": "float32"}
_WARNING = re.compile(r"\S+ \S+ (?:WARNING|ERROR)\s+(.*)")
MOST_WARNINGS = 20
LOSS = Panel("loss", "value", 120.0)
RATE = Panel("learning rate", "log", 90.0)
STRENGTH = Panel("sparsity strength", "log", 90.0)
MARGIN = Panel("margin to the target, %", "value", 90.0)


def precision_of(run: Run) -> str:
    """The precision of the training in words. A CPU has no TF32."""
    on_cpu = run.environment is not None and run.environment.device.startswith("CPU")
    setting = run.config.train.precision
    return PRECISIONS["fp32" if on_cpu and setting == "tf32" else setting]


def baseline_of(run: Run) -> Run | None:
    """The dense baseline that the run trained first, in RUN/dense, or None."""
    try:
        return load_run(run.path / "dense")
    except SoftpruneError:
        return None


def warnings_of(run: Run) -> list[str]:
    """The warnings of the record, and those and errors in run.log, each once, at most twenty of them."""
    log = run.path / "run.log"
    lines = read_bytes(log).decode(errors="replace").splitlines() if log.is_file() else []
    found = [*run.warnings, *(match[1] for line in lines if (match := _WARNING.match(line)))]
    times = Counter(found)
    texts = [message if n == 1 else f"{message} ({n} times)" for message, n in times.items()]
    more = len(texts) - MOST_WARNINGS
    return texts if more <= 0 else [*texts[:MOST_WARNINGS], f"{more} more in run.log"]


def epochs_section(run: Run) -> dict[str, Any]:
    """The accuracy of the masked network, that of the dense baseline, and what the masks remove."""
    dense, baseline, target = run.dense, baseline_of(run), target_of(run)
    # A target that records do not count is a line without values, which is left out.
    limit = None if target is None else cut(getattr(dense, target[0].key, None), target[1])
    lines = [
        line_of(run, f"{run.evaluated_on} top-1", "s-test", ACCURACY, lambda row: row.test_top1),
        line_of(run, "train top-1", "s-train", ACCURACY, lambda row: row.train_top1),
    ]
    if baseline is not None:
        lines.append(line_of(baseline, "dense top-1", "s-dense", ACCURACY, lambda row: row.test_top1))
    lines += [
        line_of(run, "parameters removed", "s-params", REMOVED, lambda row: cut(dense.params, row.params)),
        line_of(run, "channels removed", "s-channels", REMOVED, lambda row: cut(dense.channels, row.channels)),
        line_of(run, "MACs removed", "s-macs", REMOVED, lambda row: cut(dense.macs, row.macs)),
        Series("target removed", "s-target", REMOVED, [(row.number, limit) for row in (run.epochs[0], run.epochs[-1])]),
    ]
    events, best, last = events_of(run.epochs), run.best, run.epochs[-1]
    mark = None if best is None else (best.number, best.top1, f"best {accuracy(best.top1)}, epoch {best.number}")
    lead = "Above, the accuracy of the network with its masks; below, the share that they remove. "
    lead += "Dotted lines mark changes of the training." if events else "Both share one axis."
    title = "Accuracy and share removed against epochs"
    description = (
        f"In epoch {last.number}: {run.evaluated_on} top-1 {accuracy(last.test_top1)} percent, "
        f"{percent(cut(dense.macs, last.macs))} of the MACs removed"
    )
    return {"lead": lead, "chart": curves(lines, title, description, events, mark)}


def target_of(run: Run) -> tuple[Target, float | None] | None:
    """The target of a run, or None, and its limit: None for a share of what records do not count, a latency say."""
    if not run.config.method.target:
        return None
    target = read_target(run.config.method.target)
    dense = getattr(run.dense, target.key, None)
    if dense is None:
        return target, None if target.is_share else target.amount
    return target, target.limit(dense)


def target_section(run: Run) -> dict[str, Any] | None:
    """The target, whether it is met, and the path of strength and margin to it."""
    found = target_of(run)
    if found is None:
        return None
    target, limit = found
    share = f"{percent(100 * target.amount)} of the dense network"
    if limit is None:
        lead = f"At most {share}'s {target.key}. "
    else:
        lead = f"At most {target.figure(limit)}{f', {share}' if target.is_share else ''}. "
    reached = getattr(run.compact, target.key, None)
    if reached is not None and limit is not None:
        verdict = "meets" if reached <= limit else "exceeds"
        what = "The network so far" if run.in_progress else "The compact network"
        lead += f"{what} has {count(reached)}, {percent(100 * reached / limit)} of the limit, and {verdict} it. "
    step, events = run.finalised_step, events_of(run.epochs)
    if step is not None:
        epoch = next((row.number for row in run.epochs if row.step >= step), run.epochs[-1].number)
        lead += f"The removed channels were finalised at step {count(step)}, in epoch {epoch}."
        events = sorted([*events, (epoch, "finalised")])
    lines = [
        line_of(run, "strength", "s-macs", STRENGTH, lambda row: row.strength),
        line_of(run, "margin", "s-params", MARGIN, lambda row: None if row.margin is None else 100 * row.margin),
    ]
    last = next(reversed(lines[0].known), None)
    description = f"strength {significant(last)} in the last epoch"
    return {"lead": lead, "chart": curves(lines, "The path to the target", description, events)}


def training_section(run: Run) -> dict[str, Any] | None:
    """The chart of loss, learning rate and, where it varies without a target, the strength."""
    lines = [
        line_of(run, f"{run.evaluated_on} loss", "s-test", LOSS, lambda row: row.test_loss),
        line_of(run, "train loss", "s-train", LOSS, lambda row: row.train_loss),
        line_of(run, "learning rate", "s-macs", RATE, lambda row: row.lr),
    ]
    strength = line_of(run, "strength", "s-params", STRENGTH, lambda row: row.strength)
    if len(set(strength.known)) > 1 and target_of(run) is None:
        lines.append(strength)
    last = run.epochs[-1]
    description = f"In epoch {last.number}: train loss {significant(last.train_loss)}, lr {significant(last.lr)}"
    return curves(lines, "Loss and learning rate", description, events_of(run.epochs))
