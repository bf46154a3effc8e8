"""Render benchmarks/records/latency.md from its records."""

from typing import Any

NOISE = 0.1
"""A difference of the quartiles above this share of the median counts as noise."""


def render(records: list[dict[str, Any]]) -> str:
    """Return the page with a section per device."""
    lines = [
        "# Latency",
        "",
        "Milliseconds per forward, dense and compact in turns within one process: medians over blocks, and",
        "quartiles of the speed-up. *MACs*: the share that is left. *realised*: the speed-up over the MAC ratio.",
        "*multiple*: widths are rounded up to it (`auto`: the fastest one by measurement). *folded*: BatchNorms",
        "are folded into the convolutions. Channels are removed at random until the paper's MAC reduction is",
        "reached. A star marks rows with noise: the quartiles of their blocks differ by more than a tenth of the",
        "median. Read their speed-ups, which compare neighbouring blocks, rather than their milliseconds. The",
        "`fused` rows of ResNet-50 were measured with an additional Triton kernel that has been removed since.",
        "Rendered from `benchmarks/records/latency-*.json` by `python benchmarks/latency.py --render`.",
        "See [bench.md](../../docs/bench.md) for multiples and gathers.",
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
        row["model"] + ("*" if _is_noisy(row) else ""),
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


def _is_noisy(row: dict[str, Any]) -> bool:
    timings = [row[side] for side in ("dense", "compact") if row[side]]
    return any(each["high_ms"] - each["low_ms"] > NOISE * each["median_ms"] for each in timings)
