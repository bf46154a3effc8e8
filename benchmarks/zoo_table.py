"""benchmarks/records/zoo.md from the zoo's record: every number of that page is rendered here, none is typed."""

from collections import Counter
from typing import Any

STATES = {
    "exact": "exact and smaller",
    "not smaller": "exact, nothing to cut",
    "refused": "refused with a reason",
    "failed": "a cut that was not exact, stopped",
    "crash": "crashed",
}


def render(record: dict[str, Any]) -> str:
    """The whole page."""
    rows, environment = record["rows"], record["environment"]
    states = Counter(row["status"] for row in rows)
    cut = [row for row in rows if row["status"] == "exact"]
    worst = max((row["difference"] / row["scale"] for row in cut), default=0.0)
    lines = [
        "# The zoo",
        "",
        "softprune on networks of torchvision and timm, with random weights: read the network, train a few",
        "steps with masks, drop half of the channels at random (and one site in ten whole), cut, and compare masked",
        "and compact network in float64 on inputs of several sizes. Rendered from `benchmarks/records/zoo.json` by",
        "`python benchmarks/zoo.py --render`; `make zoo` makes both again.",
        "",
        f"**{len(rows)} networks: {', '.join(f'{states[key]} {STATES[key]}' for key in STATES if states[key])}.**",
        f"Largest difference between masked and compact, relative to the largest output: {worst:.0e}.",
        "",
        f"Measured with torch {environment['torch']}, torchvision {environment['torchvision']}, timm "
        f"{environment['timm']}, softprune {environment['softprune']} on {environment['device']}, one thread.",
        "",
        "- *sites*: BatchNorms that can be masked. *frozen*: BatchNorms that cannot, with the reasons below the table.",
        "- *reachable*: the share of MACs that goes if every site goes to its floor.",
        "- *kept*: MACs and parameters left by the random mask, counted on the compact network itself.",
        "- *difference*: largest |masked - compact| over the largest output.",
        "- *seconds*: reading the network, and cutting it (training steps and the proof are not in it).",
        "",
    ]
    for source in dict.fromkeys(row["source"] for row in rows):
        lines += [f"## {source}", ""]
        lines += _table([row for row in rows if row["source"] == source])
    lines += ["## Refused", ""]
    lines += [
        f"- `{row['name']}` ({row['source']}): {_shortened(row['reason'])}"
        for row in rows
        if row["status"] not in ("exact", "not smaller")
    ]
    lines += ["", "## Why BatchNorms are frozen", "", "| BatchNorms | networks | reason |", "|---:|---:|---|"]
    reasons: Counter[str] = Counter()
    networks: Counter[str] = Counter()
    for row in rows:
        for reason, count in row.get("frozen", {}).items():
            reasons[reason] += count
            networks[reason] += 1
    lines += [f"| {count} | {networks[reason]} | {reason} |" for reason, count in reasons.most_common()]
    return "\n".join(lines) + "\n"


def _table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| network | input | sites | frozen | reachable | MACs kept | params kept | difference | seconds | |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        if row["status"] not in ("exact", "not smaller"):
            lines.append(f"| {row['name']} | {row.get('input', '')} | | | | | | | | {row['status']}, see below |")
            continue
        seconds = row["seconds"]["analyse"] + row["seconds"]["cut"]
        cells = [
            row["name"],
            row["input"],
            str(row["sites"]),
            str(sum(row["frozen"].values())),
            f"{100 * row['macs_reachable']:.1f}%",
            f"{100 * row['macs_kept']:.1f}%",
            f"{100 * row['params_kept']:.1f}%",
            f"{row['difference'] / row['scale']:.0e}",
            f"{seconds:.1f}",
            row["status"],
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def _shortened(reason: str) -> str:
    return reason if len(reason) <= 400 else reason[:400].rsplit(" ", 1)[0] + " ..."
