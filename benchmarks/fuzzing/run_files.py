"""The text files of a run: result.json, metrics.jsonl, sessions.jsonl and config.toml."""

import re
from html.parser import HTMLParser
from pathlib import Path
from random import Random

from fuzzing.formats import CONTROL, check_same_run, command, mutate_lines, mutate_text, outcome_of, register
from fuzzing.mutations import TEXTS, mutate_bytes, mutate_json, mutate_toml, replace_by_other_kind
from fuzzing.seeds import Seeds
from fuzzing.worker import WrongResult


@register(0.1)
def result(rng: Random, seeds: Seeds, work: Path) -> str:
    """result.json, as reports, comparisons, lists and `resume` of a finished run read it."""
    run, _ = seeds.copy("run", work), seeds.copy("fuzz_canary.py", work)
    mutate_text(rng, run / "result.json", seeds, mutate_json)
    kind = rng.random()
    if kind < 0.35:
        return _report(run)
    if kind < 0.6:
        return _comparison(run, seeds, rng.choice(("table.md", "table.html")))
    if kind < 0.85:
        return outcome_of(command("runs", ".", *(["--json"] if rng.random() < 0.5 else []))[0])
    return outcome_of(command("resume", "run", "--device", "cpu")[0])


def _report(run: Path) -> str:
    code, _ = command("report", run.name)
    if code == 0:
        _check_page(run / "report.html")
    return outcome_of(code)


def _comparison(run: Path, seeds: Seeds, out: str) -> str:
    code, _ = command("compare", run.name, str(seeds.folder / "run"), "--out", out)
    if code:
        return "refused"
    if out.endswith(".html"):
        _check_page(Path(out))
        return "accepted"
    text = Path(out).read_text(encoding="utf-8")
    if CONTROL.search(text) or "<fuzz" in text:
        raise WrongResult(f"control characters or markup in a table: {text[:1000]}")
    pipes = {len(re.findall(r"(?<!\\)\|", line)) for line in text.splitlines() if line.startswith("|")}
    if len(pipes) > 1:
        raise WrongResult(f"the rows of a table have {sorted(pipes)} bars: {text[:1000]}")
    return "accepted"


class _Elements(HTMLParser):
    """Notes elements that a page must not have."""

    def __init__(self) -> None:
        super().__init__()
        self.hostile: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "fuzz" or any(name == "onclick" and "alert(1)" in (value or "") for name, value in attrs):
            self.hostile.append(tag)


def _check_page(path: Path) -> None:
    elements = _Elements()
    elements.feed(path.read_text(encoding="utf-8"))
    if elements.hostile:
        raise WrongResult(f"text of a file became an element of {path.name}: {elements.hostile}")


@register(0.07)
def metrics(rng: Random, seeds: Seeds, work: Path) -> str:
    """metrics.jsonl, of a finished run and of one under way."""
    run = seeds.copy("run", work)
    mutate_text(rng, run / "metrics.jsonl", seeds, mutate_lines)
    if rng.random() < 0.5:
        (run / "result.json").unlink()
    return _report(run) if rng.random() < 0.6 else outcome_of(command("runs", ".")[0])


@register(0.05)
def sessions(rng: Random, seeds: Seeds, work: Path) -> str:
    """sessions.jsonl; once in a while to the end of a resumed run, which writes them into its result."""
    from softprune.lab.runs.folder import RunFolder

    run = seeds.copy("run", work)
    mutate_text(rng, run / "sessions.jsonl", seeds, mutate_lines)
    if rng.random() < 0.04:
        (run / "result.json").unlink()
        code = command("resume", "run", "--device", "cpu")[0]
        if code == 0:
            check_same_run(run, seeds)
        return "refused" if code else "same"
    RunFolder(run).read_sessions()
    return "accepted"


@register(0.02)
def log(rng: Random, seeds: Seeds, work: Path) -> str:
    """run.log, whose warnings are in the report; once in a while as a run appends to it."""
    run = seeds.copy("run", work)
    path = run / "run.log"
    warning = f"2026-01-01 00:00:00 WARNING {rng.choice(TEXTS)}\n"
    path.write_text(path.read_text() + warning * rng.choice((1, 3, 30)), encoding="utf-8")
    if rng.random() < 0.8:
        path.write_bytes(mutate_bytes(rng, path.read_bytes(), seeds.others))
    else:
        replace_by_other_kind(rng, path)
    if rng.random() < 0.1:
        (run / "result.json").unlink()
        return outcome_of(command("resume", "run", "--device", "cpu")[0])
    return _report(run)


@register(0.09)
def config(rng: Random, seeds: Seeds, work: Path) -> str:
    """config.toml of a run, which must import nothing."""
    run, _ = seeds.copy("run", work), seeds.copy("fuzz_canary.py", work)
    path = run / "config.toml"
    if rng.random() < 0.1:
        path.write_text(path.read_text().replace('"digits_net"', '"fuzz_canary:make"'))
        if rng.random() < 0.3:
            (run / "result.json").unlink()
            return outcome_of(command("resume", "run", "--device", "cpu")[0])
    else:
        mutate_text(rng, path, seeds, mutate_toml)
    kind = rng.random()
    if kind < 0.05:
        (run / "result.json").unlink()
        return outcome_of(command("resume", "run", "--device", "cpu")[0])
    if kind < 0.6:
        return outcome_of(command("runs", ".")[0])
    if kind < 0.8:
        (run / "result.json").unlink()
        return _report(run)
    arguments = rng.choice(
        (
            ("inspect", "run"),
            ("evaluate", "run", "--device", "cpu"),
            ("inspect", "run", "--json"),
            ("export", "run", "--format", "pt2"),
        )
    )
    return outcome_of(command(*arguments)[0])
