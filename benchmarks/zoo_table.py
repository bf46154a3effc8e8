"""benchmarks/records/zoo.md and a table of docs/sites.md from the zoo's record: none of their numbers is typed."""

from collections import Counter
from typing import Any

from marks import replace_tables

EXACT = ("exact", "not smaller")
FAILED = ("failed", "crash")
KINDS = ("default", "all kinds")


def render(record: dict[str, Any]) -> str:
    """The whole page."""
    rows, environment = record["rows"], record["environment"]
    commits = Counter(row["commit"] for row in rows)
    lines = [
        "# The zoo",
        "",
        "softprune on networks of torchvision and timm, with random weights: read the network, train a few",
        "steps with masks, drop half of the channels at random (and one site in ten whole), cut, and compare masked",
        "and compact network in float64 on inputs of several sizes; once with the default kinds of sites and once with",
        "all kinds (docs/sites.md). Rendered from `benchmarks/records/zoo.json` by",
        "`python benchmarks/zoo.py --render`; `make zoo` makes both again.",
        "",
        f"**{len(rows)} networks.** Largest difference between masked and compact, relative to the largest output: "
        f"{max(_difference(row) for row in rows):.0e}.",
        "",
        table(record),
        "",
        f"Measured with torch {environment['torch']}, torchvision {environment['torchvision']}, timm "
        f"{environment['timm']}, softprune {environment['softprune']} on {environment['device']}, one thread.",
        f"Commits: {', '.join(f'{commit} ({count} networks)' for commit, count in commits.most_common())}.",
        "",
        "Of two figures the first is by default, the second with all kinds of sites.",
        "",
        "- *masked*: BatchNorms that can be masked.",
        "- *floor*: the share of MACs that stays if every site goes to its floor.",
        "- *kept*: the share of MACs that the random mask leaves, counted on the compact network itself.",
        "- *difference*: largest |masked - compact| over the largest output, of both cuts.",
        "",
    ]
    for source in dict.fromkeys(row["source"] for row in rows):
        lines += [
            f"## {source}",
            "",
            "| network | input | BatchNorms | masked | all kinds | floor | all kinds | kept | all kinds | difference "
            "| result | all kinds |",
            f"|---|---|{'---:|' * 8}---|---|",
            *(f"| {' | '.join(_cells(row))} |" for row in rows if row["source"] == source),
            "",
        ]
    lines += ["## Refused", ""]
    for row in rows:
        reasons: dict[str, list[str]] = {}
        for kinds, result in zip(KINDS, _both(row), strict=True):
            if result["status"] not in EXACT:
                reasons.setdefault(result["reason"], []).append(kinds)
        lines += [
            f"- `{row['name']}` ({row['source']}; {' and '.join(kinds)}): {_shortened(reason)}"
            for reason, kinds in reasons.items()
        ]
    lines += ["", "## Why BatchNorms are frozen", "", "In networks that are not refused.", ""]
    lines += ["| BatchNorms | all kinds | networks | all kinds | reason |", "|---:|---:|---:|---:|---|"]
    frozen = [[result.get("frozen", {}) for result in _both(row)] for row in rows]
    counted = {
        reason: [sum(each[kinds].get(reason, 0) for each in frozen) for kinds in (0, 1)]
        + [sum(reason in each[kinds] for each in frozen) for kinds in (0, 1)]
        for reason in {reason for each in frozen for reasons in each for reason in reasons}
    }
    for reason, counts in sorted(counted.items(), key=lambda item: ([-count for count in item[1]], item[0])):
        lines.append(f"| {' | '.join(map(str, counts))} | {reason} |")
    return "\n".join(lines) + "\n"


def table(record: dict[str, Any]) -> str:
    """Return the totals."""
    lines = [
        "| kinds of sites | networks exact | refused | failed | BatchNorms that can be masked |",
        "|---|---:|---:|---:|---:|",
    ]
    norms = sum(row.get("batch_norms", 0) for row in record["rows"])
    for kinds, results in zip(KINDS, zip(*map(_both, record["rows"]), strict=True), strict=True):
        states = Counter(result["status"] for result in results)
        counts = [str(sum(states[state] for state in group)) for group in (EXACT, ("refused",), FAILED)]
        masked = sum(result.get("masked", 0) for result in results)
        lines.append(f"| {' | '.join([kinds, *counts])} | {masked:,} of {norms:,} ({100 * masked / norms:.1f}%) |")
    return "\n".join(lines)


def with_table(text: str, record: dict[str, Any]) -> str:
    """Return the text of the page on sites with the totals of this record."""
    return replace_tables(text, lambda name: table(record) if name == "zoo" else None)


def _both(row: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What became of a network with the default kinds of sites, and with all kinds; a crash is the end of both."""
    return row, row.get("all_kinds", row)


def _difference(row: dict[str, Any]) -> float:
    return max(result.get("difference", 0.0) / max(result.get("scale", 0.0), 1e-30) for result in _both(row))


def _cells(row: dict[str, Any]) -> list[str]:
    results = _both(row)
    cut = any(result["status"] in EXACT for result in results)
    cells = [row["name"], row.get("input", ""), str(row.get("batch_norms", ""))]
    cells += [str(result.get("masked", "")) for result in results]
    cells += [f"{1 - result['macs_reachable']:.1%}" if "macs_reachable" in result else "" for result in results]
    cells += [f"{result['macs_kept']:.1%}" if "macs_kept" in result else "" for result in results]
    return [*cells, f"{_difference(row):.0e}" if cut else "", *(result["status"] for result in results)]


def _shortened(reason: str) -> str:
    return reason if len(reason) <= 400 else reason[:400].rsplit(" ", 1)[0] + " ..."
