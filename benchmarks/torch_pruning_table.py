"""benchmarks/records/torch-pruning.md from its records: every number of that page is rendered here, none is typed."""

from statistics import mean, stdev
from typing import Any


def render(record: dict[str, Any], own: dict[str, Any]) -> str:
    """The whole page: the cuts of `record`, and the accuracies of `own`."""
    rows, environment = record["rows"], record["environment"]
    count = {tool: sum(row[tool]["status"] == "exact" for row in rows) for tool in ("softprune", "torch_pruning")}
    lines = [
        "# Beside Torch-Pruning",
        "",
        "## The same channels",
        "",
        f"Torch-Pruning {record['torch_pruning']} takes half of every group of coupled channels at random. They",
        "are made exactly zero in a copy of the network (scale and shift of their BatchNorms zero); then both tools",
        "remove them, and both results are compared with the copy in float64. Where Torch-Pruning crashes before it",
        "has chosen, softprune removes half of the channels of its own sites. Rendered from",
        "`benchmarks/records/torch_pruning.json` by `python benchmarks/beside_torch_pruning.py --render`.",
        "",
        f"**Exact and smaller: softprune {count['softprune']} of {len(rows)}, "
        f"Torch-Pruning {count['torch_pruning']} of {len(rows)}.**",
        "",
        f"torch {environment['torch']}, torchvision {environment['torchvision']}, timm {environment['timm']}, "
        f"softprune {environment['softprune']}, one CPU thread; random weights and BatchNorm statistics.",
        "*difference* is the largest |copy - result| over the largest output; *kept* the MACs left; *seconds* to read",
        "the network and to cut it. softprune keeps a channel that Torch-Pruning drops where it is needed after all.",
        "",
        "| network | softprune | difference | kept | seconds | Torch-Pruning | difference | kept | seconds |",
        "|---|---|---:|---:|---:|---|---:|---:|---:|",
    ]
    for row in rows:
        lines.append("| " + " | ".join([row["name"], *_cells(row["softprune"]), *_cells(row["torch_pruning"])]) + " |")
    failures = [
        f"- `{row['name']}`, {label}: {row[tool]['reason']}"
        for row in rows
        for tool, label in (("softprune", "softprune"), ("torch_pruning", "Torch-Pruning"))
        if row[tool]["status"] == "crash"
    ]
    if failures:
        lines += ["", "What crashed:", "", *failures]
    return "\n".join([*lines, "", *_own_decisions(own)]) + "\n"


def _own_decisions(record: dict[str, Any]) -> list[str]:
    """Return the section on accuracy where each tool decides by itself."""
    rows = record["rows"]
    methods = list(dict.fromkeys(row["method"] for row in rows))
    seeds = len({row["seed"] for row in rows})
    lines = [
        "## Their own decisions, at equal MACs",
        "",
        f"Two small networks are trained on the embedded digits for {record['dense_epochs']} epochs, then pruned by",
        f"each method in {record['epochs']} epochs in all, from the same weights, in the same number of steps.",
        "softprune prunes while it trains (`SoftPruner` with a target). Torch-Pruning's L1 removes channels first and",
        "fine-tunes; its sparse trainings take half of the epochs, then it removes channels and fine-tunes. Of each",
        "method four settings were tried on held-out training images, and the best was fixed before any test image",
        "was used. Rendered from `benchmarks/records/own_decisions.json` (`python benchmarks/own_decisions.py`).",
        "",
        f"Top-1 accuracy of the cut network on 360 test images in percent, mean and deviation of {seeds} seeds, and",
        "the MACs that it keeps; the best of a line is bold. One image is 0.28 points: differences below one point may",
        "be chance.",
        "",
        "| network | MACs allowed | " + " | ".join(methods) + " |",
        "|---|---:|" + "---:|" * len(methods),
    ]
    targets = sorted({row["target"] for row in rows if row["method"] != "dense"}, reverse=True)
    for network in dict.fromkeys(row["network"] for row in rows):
        for target in targets:
            cells = [_accuracy(rows, network, target, method) for method in methods]
            best = max(cells[1:])
            cells = [f"**{cell}**" if cell[:5] == best[:5] and cell is not cells[0] else cell for cell in cells]
            lines.append(f"| {network} | {100 * target:.0f}% | " + " | ".join(cells) + " |")
    pooled = {method: mean(row["accuracy"] for row in rows if row["method"] == method) for method in methods}
    cells = [f"{pooled[method]:.2f}" for method in methods]
    lines += ["| mean of all | | " + " | ".join(cells) + " |", "", "Settings chosen on held-out images:", ""]
    for network, chosen in record["chosen"].items():
        for method, setting in chosen.items():
            words = ", ".join(f"{name} {_plain(value)}" for name, value in setting.items())
            lines.append(f"- {network}, {method}: {words}")
    return lines


def _accuracy(rows: list[dict[str, Any]], network: str, target: float, method: str) -> str:
    target = 1.0 if method == "dense" else target
    found = [row for row in rows if (row["network"], row["target"], row["method"]) == (network, target, method)]
    values = [row["accuracy"] for row in found]
    kept = f" ({100 * mean(row['macs_kept'] for row in found):.1f}%)" if method != "dense" else ""
    return f"{mean(values):.2f} ± {stdev(values):.2f}{kept}"


def _plain(value: Any) -> str:
    return " + ".join(value) if isinstance(value, list) else str(value)


def _cells(outcome: dict[str, Any]) -> list[str]:
    seconds = sum(outcome["seconds"].values()) if "seconds" in outcome else None
    shown = "" if seconds is None else f"{seconds:.1f}"
    if "difference" not in outcome:
        return [f"**{outcome['status']}**", "", "", shown]
    status = outcome["status"] if outcome["status"] == "exact" else f"**{outcome['status']}**"
    return [status, f"{outcome['difference'] / outcome['scale']:.0e}", f"{100 * outcome['macs_kept']:.0f}%", shown]
