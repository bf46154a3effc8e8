"""The result of a run in the terminal, and its report."""

from pathlib import Path

from softprune.cli.output import format_count, format_cut, format_percent, print_table, say
from softprune.runs.result import Result

_IMPLAUSIBLE = 1.5
"""Above this multiple of the MAC reduction a speed-up is reported with a remark, as it is below 1."""


def print_result(result: Result) -> None:
    """Print the table of dense, masked and compact network, and the speed-up."""
    from softprune.report.text import THIN, file_size

    rows = []
    dense = result.dense
    for row in result.table:
        size = row.file_bytes
        latency = row.latency_ms
        rows.append(
            [
                row.name,
                _with_sign(format_percent(row.top1)),
                _with_sign(format_percent(row.top5)),
                format_count(row.params),
                _with_sign(format_cut(dense.params, row.params)),
                format_count(row.macs),
                _with_sign(format_cut(dense.macs, row.macs)),
                "-" if size is None else file_size(size).replace(THIN, " "),
                "-" if latency is None else f"{latency:.2f} ms",
            ]
        )
    columns = ["", "top-1", "top-5", "params", "cut", "MACs", "cut", "file", "latency"]
    say()
    print_table(f"{result.model} on {result.data}, {result.method}", columns, rows)
    latencies = {row.name: row.latency_ms for row in result.table}
    dense_ms, compact_ms = latencies.get("dense"), latencies.get("compact")
    if dense_ms and compact_ms:
        say()
        speedup = dense_ms / compact_ms
        say(f"Speed-up: {speedup:.2f}x (latency of {result.latency_batch} images)")
        explained = dense.macs / max(next(row.macs for row in result.table if row.name == "compact"), 1)
        if not 1 <= speedup <= _IMPLAUSIBLE * explained:
            say(
                f"The MACs suggest up to {explained:.1f}x. `softprune bench` measures again, with other backends and "
                "batch sizes, and says what to try. Other programs on this machine disturb the measurement.",
                wrap=True,
            )


def _with_sign(number: str) -> str:
    return number if number == "-" else f"{number}%"


def write_report(run: Path, refresh: int = 0) -> Path:
    """Write the page of a run and return its path. With `refresh`, an open page reloads after these seconds."""
    from softprune.report import render_run

    return Path(render_run(run, titles=method_titles(), refresh=refresh))


def method_titles() -> dict[str, str]:
    """Return the titles of the methods by name."""
    from softprune.methods import REGISTRY

    return {name: entry.title for name, entry in REGISTRY.items()}
