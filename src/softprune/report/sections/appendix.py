"""What it takes to run it again: the command, the configuration, the environment; folded away at the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from softprune.report.figures import fold
from softprune.report.markup import Markup, el
from softprune.report.settings import flatten
from softprune.runs.records import Run


def appendix(run: Run) -> Markup:
    return el(
        "section",
        el("h2", "To run it again", id="appendix-title"),
        command(run.command) if run.command else None,
        el("p", "The run folder is ", el("code", str(run.path)), ".", class_="lead"),
        fold("Configuration", _pairs(run.config)) if run.config else None,
        fold("Mask settings", _pairs(run.masks)) if run.masks else None,
        fold("Environment", _pairs(run.environment)) if run.environment else None,
        *(_sessions(run) if len(run.sessions) > 1 else ()),
        aria_labelledby="appendix-title",
    )


def _sessions(run: Run) -> list[Markup]:
    """One fold for each process of a run that was interrupted; the last one's environment is the run's."""
    return [fold(f"Session {number}", _pairs(session)) for number, session in enumerate(run.sessions, 1)]


def command(text: str) -> Markup:
    return el(
        "div",
        el("pre", el("code", text)),
        el("button", "Copy", type="button", class_="copy scripted", hidden=True),
        class_="command",
    )


def _pairs(values: Mapping[str, Any]) -> Markup:
    rows = [el("tr", el("th", key, scope="row"), el("td", _written(value))) for key, value in flatten(values)]
    return el("div", el("table", el("tbody", *rows), class_="pairs"), class_="scroll")


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "not set"
    if isinstance(value, list):
        return ", ".join(_written(item) for item in value)
    return str(value)
