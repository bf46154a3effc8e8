"""benchmarks/records/torch-pruning.md from its record: every number of that page is rendered here, none is typed."""

from typing import Any


def render(record: dict[str, Any]) -> str:
    """The whole page."""
    rows, environment = record["rows"], record["environment"]
    count = {tool: sum(row[tool]["status"] == "exact" for row in rows) for tool in ("softprune", "torch_pruning")}
    lines = [
        "# Beside Torch-Pruning",
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
    return "\n".join(lines) + "\n"


def _cells(outcome: dict[str, Any]) -> list[str]:
    seconds = sum(outcome["seconds"].values()) if "seconds" in outcome else None
    shown = "" if seconds is None else f"{seconds:.1f}"
    if "difference" not in outcome:
        return [f"**{outcome['status']}**", "", "", shown]
    status = outcome["status"] if outcome["status"] == "exact" else f"**{outcome['status']}**"
    return [status, f"{outcome['difference'] / outcome['scale']:.0e}", f"{100 * outcome['macs_kept']:.0f}%", shown]
