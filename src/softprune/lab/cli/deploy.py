"""`export` and `bench`: write the compact network for another runtime, and time it."""

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from softprune.errors import ConfigError
from softprune.io import write_atomically
from softprune.lab.cli.app import SIZE, Device, Input, Json, Model, command, parse_shape
from softprune.lab.cli.output import print_json, print_table, say

NetworkPath = Annotated[
    Path, typer.Argument(help="Folder of a finished run, or a compact network.", show_default=False)
]


@command
def export(
    path: NetworkPath,
    fold_bn: Annotated[bool, typer.Option("--fold-bn", help="Fold BatchNorms into the layers before them.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write. [default: beside the compact network]")
    ] = None,
    model: Model = "",
    input_shape: Input = "",
    as_json: Json = False,
) -> None:
    """Export the compact network to ONNX.

    The batch size of the file is dynamic. The file is run in ONNX Runtime, and its outputs are compared with those of
    the network.
    """
    from softprune import export as exporting
    from softprune.lab.cli.opened import open_compact

    opened = open_compact(path, model=model, shape=parse_shape(input_shape))
    target = out or opened.path.with_suffix(".onnx")
    small = exporting.to_onnx(opened.compact, opened.example, target, fold_bn=fold_bn)
    with tempfile.TemporaryDirectory() as folder:
        large = exporting.to_onnx(opened.dense, opened.example, Path(folder) / "dense.onnx", fold_bn=fold_bn)
    if as_json:
        facts = asdict(small) | {"path": str(small.path), "dense_bytes": large.bytes}
        print_json(facts)
        return
    rows = [
        [name, f"{report.bytes:,}", f"{100 * report.bytes / large.bytes:.1f}", str(report.folded)]
        for name, report in (("dense", large), ("compact", small))
    ]
    print_table("", ["", "bytes", "% of dense", "BatchNorms folded"], rows)
    say(
        f"Checked in {small.runtime}: differs by at most {small.max_difference:.1e} at output scale {small.scale:.1e} "
        f"(inputs {'; '.join(small.inputs)})"
    )
    say(f"File: {small.path}")


@command
def bench(
    path: NetworkPath,
    backend: Annotated[
        str, typer.Option("--backend", "-b", help="eager, graph, compile, onnxruntime, or a list of them.")
    ] = "eager",
    batch: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1,64",
    threads: Annotated[int, typer.Option(help="CPU threads; 0: PyTorch's default.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    channels_last: Annotated[
        bool, typer.Option("--channels-last", help="Channels-last memory order. [default: in half precision on a GPU]")
    ] = False,
    compile_mode: Annotated[
        str, typer.Option(help="Mode of torch.compile. [default: reduce-overhead on a GPU]", show_default=False)
    ] = "",
    fold_bn: Annotated[
        bool, typer.Option("--fold-bn", help="Fold BatchNorms into the layers before them, in both networks.")
    ] = False,
    round_to: Annotated[
        int, typer.Option(min=0, help="Cut to multiples of this many channels; 0: as the run was cut.")
    ] = 0,
    repeats: Annotated[int, typer.Option(help="Timed blocks per network.")] = 15,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Also write a JSON record to this file.")] = None,
    device: Device = "auto",
    model: Model = "",
    input_shape: Input = "",
    as_json: Json = False,
) -> None:
    """Measure the latency of the dense and the compact network.

    Blocks of both networks alternate. The table has the median, the spread, and "realised", the share of the MAC
    reduction that becomes speed-up: 1 if the compact network is faster by the ratio of MACs. Weights do not matter: of
    a run, config.toml and result.json are enough.
    """
    batches = _numbers(batch)
    from softprune import bench as benching
    from softprune.lab.cli.opened import open_compact
    from softprune.lab.world import pick_device

    opened = open_compact(path, model=model, shape=parse_shape(input_shape), by_record=True, round_to=round_to)
    where = pick_device(device)
    report = benching.compare_latency(
        opened.dense,
        opened.compact,
        opened.example,
        backends=[name.strip() for name in backend.split(",")],
        batches=batches,
        device=where,
        dtype=dtype,
        threads=threads,
        channels_last=channels_last or None,
        compile_mode=compile_mode,
        fold_bn=fold_bn,
        repeats=repeats,
    )
    record = bench_record(report, path, where, round_to) if as_json or out is not None else {}
    if out is not None:
        write_atomically(out, (json.dumps(record, indent=1) + "\n").encode(), then="measure again", follow_link=True)
    if as_json:
        print_json(record)
        return
    columns = ["backend", "device", "dtype", "batch", "dense ms", "compact ms", "speed-up", "spread", "realised", ""]
    print_table("", columns, [_cells(row) for row in report.rows])
    say(f"MACs per image: {report.dense_macs:,} dense, {report.compact_macs:,} compact")
    if report.advice:
        say("Where the compact network is slower:")
    for sentence in report.advice:
        say(f"  {sentence}")
    if out is not None:
        say(f"Record: {out}")


def _numbers(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(SIZE.fullmatch(part) for part in parts):
        raise ConfigError(f"--batch must be whole numbers separated by commas, such as 1,64. Got {text!r}.")
    return [int(part) for part in parts]


def _cells(row: Any) -> list[str]:
    where = [row.backend, row.device, row.dtype, str(row.batch)]
    if row.speed_up is None:
        return [*where, "-", "-", "-", "-", "-", row.note]
    low, high = row.speed_up_spread
    times = [f"{row.dense.median:.3f}", f"{row.compact.median:.3f}"]
    return [*where, *times, f"{row.speed_up:.2f}", f"{low:.2f} to {high:.2f}", f"{row.realised:.2f}", ""]


def bench_record(report: Any, path: Path, device: Any, round_to: int) -> dict[str, Any]:
    """Return a benchmark as the JSON record that `--out` writes."""
    from softprune.lab.runs.environment import command_line, describe_environment

    return {
        "format": 1,
        "what": "milliseconds per forward, dense against compact",
        "command": command_line(),
        "network": str(path),
        "environment": describe_environment(device).model_dump(),
        "dense_macs": report.dense_macs,
        "compact_macs": report.compact_macs,
        "rows": [row.to_dict() | {"round_to": round_to} for row in report.rows],
        "advice": list(report.advice),
    }
