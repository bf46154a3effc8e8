"""Budgets against fixed strengths: is the target met in one run, and at what accuracy?

    python benchmarks/budgets.py --work runs/budgets --out benchmarks/records/budgets-digits.json
    python benchmarks/budgets.py --recipe cifar10-resnet56-scp --data-dir DATA --seeds 0 \
        --strengths 3e-5 5e-5 --work runs/budgets-cifar10 --out benchmarks/records/budgets-cifar10.json

Every target is one run of the trainer for each seed. To compare with, runs of a fixed strength are made until one
has the same MACs as the budget's run to within --equal percent, or --search of them were tried: that search is what
a budget saves. Runs lie under --work, each is resumed or read if it is there, and the record is written after each
one, so that the command can be stopped and given again, or be run for several seeds at once and then with
--search 0 to collect. --render writes the tables of all records into docs/budgets.md.
"""

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

from marks import replace_tables

from softprune.lab.config.recipes import load_recipe
from softprune.lab.runs.environment import command_line
from softprune.lab.runs.folder import RunFolder
from softprune.lab.runs.result import Result
from softprune.lab.train.run import resume, start
from softprune.target import read_target

QUIET = ("train.dense_baseline=false", "records.checkpoint_seconds=60")
FASTEST_CHANGE = 2.0
"""Beyond the strengths tried, the next one is at most this much larger or smaller."""


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run what the command line asks for and return the record."""
    options = _parser().parse_args(arguments)
    if options.render:
        return {"rendered": render(Path(__file__).parents[1])}
    runs = Runs(options)
    for seed in options.seeds:
        for target in options.targets:
            runs.budget(seed, target)
            _write(record(options, runs), options.out)
        for strength in options.strengths:
            runs.fixed(seed, strength)
        for target in options.targets:
            runs.search(seed, target)
            _write(record(options, runs), options.out)
    made = record(options, runs)
    _write(made, options.out)
    print(table(made["rows"]))
    return made


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="digits", help="recipe of the runs")
    parser.add_argument("--targets", nargs="+", default=["macs=0.5", "params=0.5"], metavar="KEY=AMOUNT")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--strengths", nargs="+", type=float, default=[], help="fixed strengths to run first")
    parser.add_argument("--search", type=int, default=8, help="fixed strengths to try for equal MACs, per target")
    parser.add_argument("--equal", type=float, default=2.5, help="percent by which equal MACs may differ")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of all runs")
    parser.add_argument("--work", type=Path, default=Path("runs/budgets"), help="folder of the runs")
    parser.add_argument("--out", type=Path, default=Path("budgets.json"), help="JSON record")
    parser.add_argument("--render", action="store_true", help="write the records' tables into the document")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--time-limit", type=float, help="seconds after which a run stops, to be resumed later")
    return parser


class Runs:
    """The runs under a folder: made when asked for, and remembered."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options

    def budget(self, seed: int, target: str) -> Result | None:
        """The result of a run with a target."""
        return self._run(f"{target.replace('=', '-')}-seed{seed}", seed, f"method.target.{target}")

    def fixed(self, seed: int, strength: float) -> Result | None:
        """The result of a run with a fixed strength."""
        return self._run(f"strength-{strength:.4g}-seed{seed}", seed, f"method.strength={strength:.4g}")

    def _run(self, name: str, seed: int, setting: str) -> Result | None:
        folder = self.options.work / name
        limits = {"device": self.options.device, "time_limit": self.options.time_limit}
        if (folder / "config.toml").is_file():
            outcome = resume(folder, **limits)
        else:
            data = [f"data.dir={self.options.data_dir}"] if self.options.data_dir else []
            settings = [*QUIET, *self.options.set, *data, f"seed={seed}", setting]
            outcome = start(load_recipe(self.options.recipe, settings), folder, **limits)
        result = outcome.result
        if result is not None:
            print(f"{name}: top-1 {result.last.top1:.2f}, MACs {_share(result, 'macs'):.4f}", flush=True)
        return result

    def all_fixed(self, seed: int) -> list[Result]:
        """The results of all finished runs with a fixed strength."""
        files = sorted(self.options.work.glob(f"strength-*-seed{seed}/result.json"))
        return [RunFolder(file.parent).read_result() for file in files]

    def search(self, seed: int, target: str) -> None:
        """Try fixed strengths until one has the MACs of the budget's run."""
        budget = self.budget(seed, target)
        for _ in range(self.options.search if budget else 0):
            known = [(math.log(run.config.method.strength), _share(run, "macs")) for run in self.all_fixed(seed)]
            aim = _share(budget, "macs")
            if any(abs(macs / aim - 1) <= self.options.equal / 100 for _, macs in known):
                return
            first = load_recipe(self.options.recipe).method.strength
            if self.fixed(seed, next_strength(known, aim, first)) is None:
                return


def next_strength(known: list[tuple[float, float]], aim: float, first: float) -> float:
    """The fixed strength to try: between the nearest on both sides, or beyond them all.

    `known` are logarithms of strengths with the MACs that they left.
    """
    if not known:
        return first
    above = max((point for point in known if point[1] > aim), default=None)
    below = min((point for point in known if point[1] <= aim), default=None)
    if above is None or below is None:
        factor = FASTEST_CHANGE if below is None else 1 / FASTEST_CHANGE
        return math.exp((above or below)[0]) * factor
    # Inside the bracket by interpolation, but never so near to an end that the bracket hardly shrinks.
    place = (above[1] - aim) / max(above[1] - below[1], 1e-9)
    place = min(max(place, 0.2), 0.8)
    return math.exp(above[0] + place * (below[0] - above[0]))


def record(options: argparse.Namespace, runs: Runs) -> dict[str, Any]:
    """What the finished runs say."""
    rows = []
    environments: list[dict[str, Any]] = []
    for seed in options.seeds:
        for target in options.targets:
            file = options.work / f"{target.replace('=', '-')}-seed{seed}" / "result.json"
            if file.is_file():
                result = RunFolder(file.parent).read_result()
                fixed = runs.all_fixed(seed)
                rows.append(_row(seed, target, result, fixed, options.equal))
                environments += [run.environment.model_dump() for run in (result, *fixed)]
    return {
        "format": 1,
        "benchmark": "budgets",
        "command": command_line(),
        "recipe": options.recipe,
        "settings": options.set,
        "environments": [made for place, made in enumerate(environments) if made not in environments[:place]],
        "rows": rows,
        "mean": _means(rows),
    }


def _row(seed: int, target: str, result: Result, fixed: list[Result], equal: float) -> dict[str, Any]:
    key, _, amount = target.partition("=")
    # MACs and parameters alone: what the result itself holds of both networks.
    limit = read_target({key: amount}).limit(getattr(result.dense, key))
    kept = getattr(result.compact, key)
    row: dict[str, Any] = {
        "seed": seed,
        "target": target,
        "limit": limit,
        "kept": kept,
        "over": kept > limit,
        "under_percent": 100 * (1 - kept / limit),
        "macs": _share(result, "macs"),
        "params": _share(result, "params"),
        "top1": result.last.top1,
        "seconds": result.wall_seconds,
        "fixed": None,
    }
    if fixed:
        near = min(fixed, key=lambda run: abs(_share(run, "macs") - row["macs"]))
        row["fixed"] = {
            **_point(near),
            "equal": abs(_share(near, "macs") / row["macs"] - 1) <= equal / 100,
            "tried": sorted(map(_point, fixed), key=lambda point: point["strength"]),
        }
    return row


def _point(run: Result) -> dict[str, float]:
    """A run with a fixed strength in short."""
    return {
        "strength": run.config.method.strength,
        "macs": _share(run, "macs"),
        "params": _share(run, "params"),
        "top1": run.last.top1,
    }


def _share(result: Result, key: str) -> float:
    return getattr(result.compact, key) / getattr(result.dense, key)


def _means(rows: list[dict[str, Any]]) -> dict[str, Any]:
    means = {}
    for target in dict.fromkeys(row["target"] for row in rows):
        mine = [row for row in rows if row["target"] == target]
        compared = [row for row in mine if row["fixed"] is not None and row["fixed"]["equal"]]
        means[target] = {
            "runs": len(mine),
            "over": sum(row["over"] for row in mine),
            "most_under_percent": max(row["under_percent"] for row in mine),
            "top1": statistics.mean(row["top1"] for row in mine),
            "compared": len(compared),
            "top1_minus_fixed": statistics.mean(row["top1"] - row["fixed"]["top1"] for row in compared)
            if compared
            else None,
        }
    return means


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a table in Markdown."""
    lines = [
        "| target | seed | of the limit | MACs | top-1 | fixed strength | its MACs | its top-1 | tried |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        fixed = row["fixed"] or {"strength": math.nan, "macs": math.nan, "top1": math.nan, "tried": [], "equal": False}
        partner = [f"{fixed['strength']:.3g}", f"{100 * fixed['macs']:.1f}%", f"{fixed['top1']:.2f}"]
        if not fixed["equal"]:
            partner = [f"({cell})" for cell in partner]
        lines.append(
            f"| {row['target']} | {row['seed']} | {100 - row['under_percent']:.2f}% | {100 * row['macs']:.1f}% "
            f"| {row['top1']:.2f} | {' | '.join(partner)} | {len(fixed['tried'])} |"
        )
    return "\n".join(lines)


def render(repository: Path) -> list[str]:
    """Put the table of every record that docs/budgets.md names into it; returns their paths."""
    document = repository / "docs" / "budgets.md"
    rendered = []

    def render_record(path: str) -> str:
        rendered.append(path)
        return table(json.loads((repository / path).read_text(encoding="utf-8"))["rows"])

    document.write_text(replace_tables(document.read_text(encoding="utf-8"), render_record), encoding="utf-8")
    return rendered


def _write(made: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


if __name__ == "__main__":
    main()
