"""Commands for networks: `inspect`, `compact`, `evaluate`, `export` and `bench`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from softprune.errors import ConfigError
from softprune.lab.cli.app import SIZE, DataDir, DataSet, Device, Input, Json, Method, Model, Run, command, parse_shape
from softprune.lab.cli.output import print_json, print_table, say
from softprune.lab.report.text import count, fixed

NetworkPath = Annotated[
    Path, typer.Argument(help="Folder of a finished run, or file of a compact network.", show_default=False)
]


@command
def inspect(
    model: Annotated[str, typer.Argument(help="A name from `softprune models`, or module:factory.")] = "digits_net",
    num_classes: Annotated[int, typer.Option(min=1, help="Number of classes.")] = 10,
    input_shape: Input = "",
    include: Annotated[
        list[str] | None, typer.Option(help="Glob pattern of the BatchNorms to prune. Repeatable.")
    ] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Glob pattern of BatchNorms to freeze. Repeatable.")] = None,
    as_json: Json = False,
) -> None:
    """Show which BatchNorms can be pruned, and why the others cannot."""
    import torch

    import softprune
    from softprune.lab.runs.networks import build_network, image_shape

    network = build_network(model, num_classes)
    example = torch.zeros(2, *image_shape(model, parse_shape(input_shape)))
    found = softprune.inspect(network, example, include=include or None, exclude=exclude or None)
    if as_json:
        numbers = {name: getattr(found, name) for name in ("macs", "params", "floor_macs", "floor_params")}
        sites = [{"name": site.name, "channels": site.width, "activation": site.activation} for site in found.sites]
        frozen = [{"name": each.name, "channels": each.width, "reason": each.reason} for each in found.frozen]
        print_json({"network": model, **numbers, "sites": sites, "frozen": frozen})
    else:
        say(str(found))


@command
def compact(
    run: Run,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write. [default: RUN/compact.safetensors]")
    ] = None,
    round_to: Annotated[
        int | None, typer.Option(help="Round numbers of channels up to this multiple. [default: the run's]")
    ] = None,
    gathers: Annotated[
        bool, typer.Option("--gathers/--no-gathers", help="Let layers gather the channels that they read.")
    ] = True,
    device: Device = "auto",
    data_dir: DataDir = None,
    model: Model = "",
    data: DataSet = "",
    method: Method = "",
    as_json: Json = False,
) -> None:
    """Save the compact network of a run, finished or not.

    Load the file with `softprune.load`. --round-to and --no-gathers change the speed of the network, not its outputs,
    and need --out. `softprune bench` measures each variant.
    """
    from softprune.lab.train.run import compact_run

    own = {"model": model, "data": data, "method": method}
    path, before, after = compact_run(
        run, out, device=device, data_dir=data_dir, round_to=round_to, gathers=gathers, **own
    )
    keys = ("params", "macs", "activations")
    costs = {name: {key: getattr(cost, key) for key in keys} for name, cost in (("dense", before), ("compact", after))}
    if as_json:
        print_json({"file": str(path), **costs})
        return
    rows = [[name, *map(count, each.values())] for name, each in costs.items()]
    print_table(["", "params", "MACs", "activations"], rows)
    say(f"Compact network: {path}")


@command
def evaluate(
    run: Run,
    device: Device = "auto",
    data_dir: DataDir = None,
    model: Model = "",
    data: DataSet = "",
    method: Method = "",
    as_json: Json = False,
) -> None:
    """Evaluate the masked and the compact network of a run."""
    from softprune.lab.train.run import evaluate_run

    found = evaluate_run(run, device=device, data_dir=data_dir, model=model, data=data, method=method)
    if as_json:
        print_json([{"network": name, **vars(totals)} for name, totals in found.items()])
        return
    rows = [[name, fixed(t.top1), fixed(t.top5), fixed(t.loss, 4), count(t.images)] for name, t in found.items()]
    print_table(["", "top-1 %", "top-5 %", "loss", "images"], rows)


@command
def export(
    path: NetworkPath,
    fold_bn: Annotated[bool, typer.Option("--fold-bn", help="Fold BatchNorms into the layers before them.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write. [default: next to the compact network]")
    ] = None,
    model: Model = "",
    input_shape: Input = "",
    as_json: Json = False,
) -> None:
    """Export the compact network to ONNX.

    The batch size is dynamic. The file is run in ONNX Runtime to compare its outputs with those of the network.
    """
    from softprune import export as exporting
    from softprune.lab.runs.networks import open_compact

    opened = open_compact(path, model, parse_shape(input_shape))
    target = out or opened.path.with_suffix(".onnx")
    report = exporting.to_onnx(opened.compact, opened.example, target, fold_bn=fold_bn)
    if as_json:
        print_json(asdict(report) | {"path": str(report.path)})
        return
    say(str(report))


@command
def bench(
    path: NetworkPath,
    backend: Annotated[
        str, typer.Option("--backend", "-b", help="eager, graph, compile, onnxruntime; several separated by commas.")
    ] = "eager",
    batch: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1,64",
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0 for PyTorch's default.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    fold_bn: Annotated[
        bool, typer.Option("--fold-bn", help="Fold BatchNorms into the layers before them, in both networks.")
    ] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Number of timed blocks per network.")] = 15,
    device: Device = "auto",
    model: Model = "",
    input_shape: Input = "",
    as_json: Json = False,
) -> None:
    """Measure the latency of the dense and the compact network.

    Timed blocks of both networks alternate. The table has the median, the spread, and "realised", the share of the MAC
    reduction that becomes speed-up: 1 if the speed-up equals the ratio of the MACs.
    """
    batches = [part.strip() for part in batch.split(",")]
    if not all(SIZE.fullmatch(part) for part in batches):
        raise ConfigError(f"--batch must be integers separated by commas, such as 1,64. Got {batch!r}.")
    from softprune import bench as benching
    from softprune.lab.runs.environment import command_line, describe_environment
    from softprune.lab.runs.networks import open_compact
    from softprune.lab.world import pick_device

    opened, where = open_compact(path, model, parse_shape(input_shape)), pick_device(device)
    report = benching.compare_latency(
        opened.dense,
        opened.compact,
        opened.example,
        backends=[name.strip() for name in backend.split(",")],
        batches=list(map(int, batches)),
        device=where,
        dtype=dtype,
        threads=threads,
        fold_bn=fold_bn,
        repeats=repeats,
    )
    if as_json:
        print_json(
            {
                "command": command_line(),
                "network": str(path),
                "environment": describe_environment(where).model_dump(),
                "dense_macs": report.dense_macs,
                "compact_macs": report.compact_macs,
                "rows": [row.to_dict() for row in report.rows],
                "advice": report.advice,
            }
        )
        return
    say(str(report))
