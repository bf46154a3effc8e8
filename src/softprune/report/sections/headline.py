"""The first thing a reader sees: what was run, what it kept of the accuracy, what it cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from softprune.report.figures import bar
from softprune.report.formats import accuracy, change, count, cut, duration, percent, short
from softprune.report.markup import Child, Markup, el, join
from softprune.report.naming import known_as
from softprune.report.signs import ARROW, DOT, MINUS, THIN
from softprune.runs.records import Run, Totals


@dataclass(frozen=True)
class View:
    """One choice of the switch: which network the big numbers speak of."""

    key: str
    label: str
    note: str
    top1: float | None
    top5: float | None
    totals: Totals


def headline(run: Run, titles: Mapping[str, str]) -> Markup:
    """The title, the switch compact / best epoch / last epoch, and the four big numbers of each. `titles`: methods in
    words; one that is not there is called by its key."""
    views = _views(run)
    switch: list[Markup] = []
    for index, view in enumerate(views):
        switch.append(el("input", type="radio", name="view", id=f"view-{view.key}", checked=index == 0))
        switch.append(el("label", view.label, for_=f"view-{view.key}"))
    panels = [_panel(run, view) for view in views]
    # The switch is plain HTML: the style sheet shows the panel of the checked input, script or no script.
    inner = join((*switch, *panels)) if len(views) > 1 else join(panels)
    return el(
        "header",
        el("p", "softprune report", " ", DOT, " ", run.name, class_="kicker"),
        el("h1", *_title(run, titles)),
        _facts(run),
        *(el("p", note, class_="note", role="status") for note in run.notes),
        el("div", inner, class_="views"),
        class_="headline",
    )


def _moment(text: str) -> str:
    """A time stamp to the minute; whatever else stands there, as it is."""
    try:
        return datetime.fromisoformat(text).strftime("%Y-%m-%d %H:%M")
    except ValueError:
        return text


def _title(run: Run, titles: Mapping[str, str]) -> tuple[Child, ...]:
    where = f" on {known_as(run.data)}" if run.data else ""
    model = known_as(run.model)
    if run.method == "dense":
        return (model, where, el("span", ", trained without pruning", class_="by"))
    if not run.method:
        return (model, where)
    return (model, where, ", ", el("span", titles.get(run.method, run.method), class_="by"))


def _facts(run: Run) -> Markup:
    facts = [
        ("seed", None if run.seed is None else str(run.seed)),
        ("epochs", str(len(run.epochs)) if run.epochs else None),
        ("trained in", None if run.wall_seconds is None else duration(run.wall_seconds)),
        ("images a second", None if run.images_per_second is None else count(run.images_per_second)),
        ("on", str(run.environment.get("device") or "") or None),
        ("finished", _moment(run.finished) or None),
    ]
    return el(
        "dl",
        *(el("div", el("dt", label), el("dd", value)) for label, value in facts if value is not None),
        class_="facts",
    )


def _views(run: Run) -> list[View]:
    views = []
    shipped = run.variant("compact")
    if shipped is not None:
        views.append(
            View(
                "compact",
                "Compact network",
                "the network that was written to disk",
                run.shipped_top1,
                shipped.top5,
                run.compact,
            )
        )
    for key, label, moment in (("best", "Best epoch", run.best), ("last", "Last epoch", run.last)):
        if moment is not None:
            when = "" if moment.number is None else f"epoch {moment.number}"
            chosen = ", chosen by test accuracy" if key == "best" else ""
            views.append(View(key, label, when + chosen, moment.top1, moment.top5, moment.totals))
    if not views:
        views.append(View("compact", "Network", "", run.shipped_top1, None, run.compact))
    return views


def _panel(run: Run, view: View) -> Markup:
    dense, now = run.dense, view.totals
    cards = [
        _accuracy_card(run, view),
        _cut_card("MACs", dense.macs, now.macs, "paper's FLOPs ", dense.paper_flops, now.paper_flops),
        _cut_card(
            "Parameters", dense.params, now.params, "paper's counting ", dense.paper_params, now.paper_params
        ),
        _cut_card(
            "Channels",
            dense.channels,
            now.channels,
            "paper's counting ",
            dense.paper_channels,
            now.paper_channels,
        ),
    ]
    note = el("p", view.note, class_="view-note") if view.note else None
    return el("div", el("div", *cards, class_="cards"), note, class_=f"panel panel-{view.key}")


def _accuracy_card(run: Run, view: View) -> Markup:
    dense = run.dense_top1
    below: Child
    if dense is not None and view.top1 is not None:
        below = join((f"dense {accuracy(dense)}, difference ", el("b", change(view.top1 - dense))))
    elif view.top1 is None:
        below = "not measured"
    else:
        below = "no dense baseline in this run"
    top5 = f"top-5 {accuracy(view.top5)}{THIN}%" if view.top5 is not None else None
    return _card(
        "Top-1 accuracy", accuracy(view.top1), view.top1, "%" if view.top1 is not None else "", below, top5
    )


def _cut_card(
    label: str,
    before: float | None,
    after: float | None,
    paper_label: str,
    paper_before: float | None,
    paper_after: float | None,
) -> Markup:
    removed = cut(before, after)
    figure = percent(removed).replace(f"{THIN}%", "")
    big = f"{MINUS}{figure}" if removed is not None and removed > 0.05 else figure
    written = count if before is not None and before < 1e5 else short
    known = before is not None or after is not None
    below = f"{written(before)} {ARROW} {written(after)}" if known else "not recorded"
    paper_cut = cut(paper_before, paper_after)
    paper = None
    if paper_cut is not None:
        paper = f"{paper_label}{MINUS if paper_cut > 0.05 else ''}{percent(paper_cut)}"
    meter = bar(before, after, before) if before and after is not None else None
    return _card(label, big, removed, "%" if removed is not None else "", below, paper, meter)


def _card(
    label: str,
    big: str,
    value: float | None,
    unit: str,
    below: Child,
    more: Child,
    meter: Markup | None = None,
) -> Markup:
    return el(
        "div",
        el("h3", label),
        el(
            "p",
            big,
            el("span", unit, class_="unit"),
            class_="big",
            data_value=None if value is None else repr(value),
        ),
        meter,
        el("p", below, class_="below"),
        el("p", more, class_="more") if more else None,
        class_="card",
    )
