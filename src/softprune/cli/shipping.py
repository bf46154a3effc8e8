"""`export` and `bench`: take a compact network to other runtimes, and see how fast it is."""

from pathlib import Path
from typing import Annotated, Any

import typer

from softprune.cli.app import command
from softprune.cli.networks import parse_shape
from softprune.cli.output import print_table, say
from softprune.cli.training import Device
from softprune.errors import ConfigError

Target = Annotated[
    Path, typer.Argument(help="The folder of a finished run, or of a compact network.", show_default=False)
]
Model = Annotated[
    str, typer.Option(help="The dense network, for a compact folder that lies outside its run.")
]
Input = Annotated[
    str, typer.Option("--input", metavar="CxHxW", help="Shape of one image, where the run does not say it.")
]


@command
def export(
    path: Target,
    format: Annotated[str, typer.Option("--format", "-f", help="onnx, or pt2 for torch.export.")] = "onnx",
    fold_bn: Annotated[
        bool, typer.Option("--fold-bn", help="Fold BatchNorms into the layers before them.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write. [default: beside the compact folder]")
    ] = None,
    model: Model = "",
    input_shape: Input = "",
) -> None:
    """Write the compact network as an ONNX or torch.export file and check it in its own runtime.

    The batch size is free. The file's outputs are compared with the network's, and the difference is printed.
    """
    if format not in ("onnx", "pt2"):
        raise ConfigError(f"--format must be onnx or pt2. Got {format!r}.")
    import tempfile

    from softprune import export as exporting
    from softprune.cli.shipped import open_shipped

    shipped = open_shipped(path, model=model, shape=parse_shape(input_shape) if input_shape else ())
    write = exporting.to_onnx if format == "onnx" else exporting.to_torch_export
    target = out or shipped.folder.with_name(f"{shipped.folder.name}.{format}")
    small = write(shipped.compact, shipped.example, target, fold_bn=fold_bn)
    with tempfile.TemporaryDirectory() as folder:
        large = write(shipped.dense, shipped.example, Path(folder) / f"dense.{format}", fold_bn=fold_bn)
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
    path: Target,
    backend: Annotated[
        str,
        typer.Option("--backend", "-b", help="Of eager, compile, fused, onnxruntime; several with commas."),
    ] = "eager",
    batch: Annotated[str, typer.Option("--batch", help="Batch sizes, with commas.")] = "1,64",
    threads: Annotated[int, typer.Option("--threads", help="CPU threads; 0 for PyTorch's choice.")] = 0,
    dtype: Annotated[str, typer.Option("--dtype", help="float32, bfloat16 or float16.")] = "float32",
    channels_last: Annotated[
        bool, typer.Option("--channels-last", help="Channels-last memory order.")
    ] = False,
    compile_mode: Annotated[
        str,
        typer.Option("--compile-mode", help="torch.compile's mode; reduce-overhead records CUDA graphs."),
    ] = "default",
    fold_bn: Annotated[
        bool, typer.Option("--fold-bn", help="Fold BatchNorms into the layers before them, in both networks.")
    ] = False,
    repeats: Annotated[int, typer.Option("--repeats", help="Timed blocks of each network, in turns.")] = 15,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Also write a JSON record to this file.")
    ] = None,
    device: Device = "auto",
    model: Model = "",
    input_shape: Input = "",
) -> None:
    """Time the dense network against the compact one, in turns: median, spread, and what of the saving arrives.

    "realised" is the speed-up over the ratio of MACs: 1 where all of the saved arithmetic is saved time.
    """
    batches = _numbers(batch)
    import torch

    from softprune import bench as benching
    from softprune.cli.shipped import open_shipped
    from softprune.distributed import pick_device

    shipped = open_shipped(path, model=model, shape=parse_shape(input_shape) if input_shape else ())
    where = str(pick_device(device))
    report = benching.compare(
        shipped.dense,
        shipped.compact,
        shipped.example,
        backends=[name.strip() for name in backend.split(",")],
        batches=batches,
        device=where,
        dtype=dtype,
        threads=threads,
        channels_last=channels_last,
        compile_mode=compile_mode,
        fold_bn=fold_bn,
        repeats=repeats,
    )
    columns = [
        "backend",
        "device",
        "dtype",
        "batch",
        "dense ms",
        "compact ms",
        "speed-up",
        "spread",
        "realised",
        "",
    ]
    print_table("", columns, [_cells(row) for row in report.rows])
    say(f"MACs per image: {report.dense_macs:,} dense, {report.compact_macs:,} compact")
    if report.advice:
        say("Where the compact network is slower:")
    for sentence in report.advice:
        say(f"  {sentence}")
    if out is not None:
        say(f"Record: {_write_record(out, report, path, torch.device(where))}")


def _numbers(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(
            f"--batch must be whole numbers with commas between them, such as 1,64. Got {text!r}."
        )
    return [int(part) for part in parts]


def _cells(row: Any) -> list[str]:
    where = [row.backend, row.device, row.dtype, str(row.batch)]
    if row.speed_up is None:
        return [*where, "-", "-", "-", "-", "-", row.note]
    low, high = row.speed_up_spread
    times = [f"{row.dense.median:.3f}", f"{row.compact.median:.3f}"]
    return [*where, *times, f"{row.speed_up:.2f}", f"{low:.2f} to {high:.2f}", f"{row.realised:.2f}", ""]


def _write_record(out: Path, report: Any, path: Path, device: Any) -> Path:
    import json

    from softprune.io import write_atomically
    from softprune.runs.environment import command_line, describe_environment

    record = {
        "format": 1,
        "what": "milliseconds per forward, dense against compact",
        "command": command_line(),
        "network": str(path),
        "environment": describe_environment(device),
        "dense_macs": report.dense_macs,
        "compact_macs": report.compact_macs,
        "rows": [row.to_dict() for row in report.rows],
    }
    write_atomically(out, (json.dumps(record, indent=1) + "\n").encode(), then="measure again")
    return out
