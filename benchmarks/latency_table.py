"""docs/latency.md from its records: every number of that page is rendered here, none is typed."""

from typing import Any

DISTURBED = 0.1
"""Of the median: where the middle half of the blocks spreads by more, other work was in the way."""


def render(records: list[dict[str, Any]]) -> str:
    """The whole page, a section for each device."""
    lines = [
        "# Latency",
        "",
        "Milliseconds per forward, dense against compact, in turns within one process: medians over blocks, and the",
        "quartiles of the speed-up. *MACs* is what of them is left; *realised* the speed-up over the ratio of MACs.",
        "*multiple*: widths are rounded up to it (`auto` measures which one is fastest on the machine); *folded*:",
        "BatchNorms are part of the convolutions. Channels go by lot until at least the paper's share of MACs is gone.",
        "Networks with a star were disturbed, the middle half of their blocks spreads by more than a tenth: read",
        "their speed-ups, which are of neighbouring blocks, rather than their milliseconds.",
        "Rendered from `benchmarks/records/latency-*.json` by `python benchmarks/latency.py --render`;",
        "[bench.md](bench.md) says what multiples and gathers are for.",
        "",
    ]
    for record in records:
        environment = record["environment"]
        lines += [
            f"## {environment['device']}",
            "",
            f"torch {environment['torch']}, {environment['threads']} CPU threads, {record['repeats']} blocks each, "
            f"float32 without TF32. {record.get('remarks', '')}".rstrip(),
            "",
            "| network | multiple | backend | dtype | batch | dense ms | compact ms | MACs | speed-up | realised |",
            "|---|---:|---|---|---:|---:|---:|---:|---:|---:|",
        ]
        lines += [_line(row) for row in record["rows"]]
        lines.append("")
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    multiple = f"{row['multiple']} (auto)" if row["round_to"] == "auto" else str(row["multiple"])
    multiple += "" if row["gathers"] else ", no gathers"
    multiple += ", folded" if row["fold_bn"] else ""
    cells = [
        row["model"] + ("*" if _is_disturbed(row) else ""),
        multiple,
        row["backend"] + (", own order" if row.get("own_order") else ""),
        row["dtype"],
        str(row["batch"]),
    ]
    if row["speed_up"] is None:
        return "| " + " | ".join([*cells, "", "", "", row["note"], ""]) + " |"
    low, high = row["speed_up_spread"]
    cells += [
        f"{row['dense']['median_ms']:.3f}",
        f"{row['compact']['median_ms']:.3f}",
        f"{100 / row['mac_ratio']:.1f}%",
        f"{row['speed_up']:.2f} ({low:.2f} to {high:.2f})",
        f"{row['realised']:.2f}",
    ]
    return "| " + " | ".join(cells) + " |"


def _is_disturbed(row: dict[str, Any]) -> bool:
    timings = [row[side] for side in ("dense", "compact") if row[side]]
    return any(each["high_ms"] - each["low_ms"] > DISTURBED * each["median_ms"] for each in timings)
