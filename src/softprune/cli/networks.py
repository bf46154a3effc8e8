"""`inspect`, `compact` and `evaluate`: look at a network, cut it, measure it."""

from pathlib import Path
from typing import Annotated

import typer

from softprune.cli.app import command
from softprune.cli.output import percent, print_table, say
from softprune.cli.training import DataDir, Device, Run
from softprune.errors import ConfigError, nearest


@command
def inspect(
    model: Annotated[
        str,
        typer.Argument(
            help="A name from `softprune models`, module:factory of your own, or the folder of a run."
        ),
    ] = "digits_net",
    num_classes: Annotated[
        int | None, typer.Option(help="Outputs of the network. [default: 10, or as many as the run has]")
    ] = None,
    input_shape: Annotated[
        str, typer.Option("--input", metavar="CxHxW", help="Shape of one image, such as 3x224x224.")
    ] = "",
    include: Annotated[
        list[str] | None, typer.Option(help="Only these BatchNorms, by name with wildcards; repeatable.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(help="Not these BatchNorms, by name with wildcards; repeatable.")
    ] = None,
) -> None:
    """Show what can be pruned in a network, and why not the rest.

    Of a run: what its method was given to prune (method.include, method.exclude), of the network before any cut.
    """
    import torch

    import softprune
    from softprune.models import REGISTRY
    from softprune.runs.networks import build_network

    if model not in REGISTRY and Path(model).is_dir():
        from softprune.cli.shipped import dense_network, image_shape
        from softprune.runs.folder import RunFolder

        config = RunFolder.open(model).read_config()
        shape = parse_shape(input_shape) if input_shape else image_shape(config)
        found = softprune.inspect(
            dense_network(Path(model), config, num_classes),
            torch.zeros(2, *shape),
            include=include or config.method.include or None,
            exclude=exclude or config.method.exclude or None,
        )
        say(f"{config.model.name}, as {model} prunes it")
        say(str(found))
        return
    if model not in REGISTRY and ":" not in model:
        raise ConfigError(
            "A network to inspect is a name that `softprune models` lists, module:factory of your own, or the folder "
            f"of a run. Got {model!r}, which is none of them.{nearest(model, REGISTRY)}"
        )
    if not input_shape and ":" in model:
        raise ConfigError(
            f"A network of your own needs the shape of an image: --input 3x224x224. Got {model!r} alone."
        )
    network = build_network(model, 10 if num_classes is None else num_classes)
    shape = parse_shape(input_shape) if input_shape else REGISTRY[model].input_shape
    found = softprune.inspect(
        network, torch.zeros(2, *shape), include=include or None, exclude=exclude or None
    )
    say(str(found))


@command
def compact(
    run: Run,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder to write. [default: RUN/compact]")
    ] = None,
    round_to: Annotated[
        int | None,
        typer.Option("--round-to", help="Fill widths up to this multiple, with zeros. [default: the run's]"),
    ] = None,
    gathers: Annotated[
        bool,
        typer.Option("--gathers/--no-gathers", help="Let layers read a part of a stream through an index."),
    ] = True,
    device: Device = "auto",
    data_dir: DataDir = None,
) -> None:
    """Cut the network of a run, finished or not.

    The folder then holds weights.safetensors and plan.json; `softprune.load(FOLDER, network)` reads it. Multiples and
    gathers change how fast it is, never what it computes; such a cut needs a folder of its own, and `softprune bench`
    compares.
    """
    from softprune.train.cutting import compact_run

    folder, before, after = compact_run(
        run, out, device=device, data_dir=data_dir, round_to=round_to, gathers=gathers
    )
    rows = [
        ["dense", f"{before.params:,}", f"{before.macs:,}"],
        ["compact", f"{after.params:,}", f"{after.macs:,}"],
    ]
    print_table("", ["", "params", "MACs"], rows)
    say(f"Compact network: {folder}")


@command
def evaluate(
    run: Annotated[
        Path, typer.Argument(help="The folder of a run, or of a compact network.", show_default=False)
    ],
    device: Device = "auto",
    data_dir: DataDir = None,
    model: Annotated[
        str, typer.Option(help="The dense network, for a compact folder that lies outside its run.")
    ] = "",
    data: Annotated[str, typer.Option(help="The data set, for a compact folder outside its run.")] = "",
) -> None:
    """Test a run's network, masked and compact, or a compact folder."""
    from softprune.train.assessment import evaluate_folder

    rows = evaluate_folder(run, device=device, data_dir=data_dir, model=model, data=data)
    cells = []
    for row in rows:
        totals = row.totals
        numbers = [percent(totals.top1), percent(totals.top5), f"{totals.loss:.4f}", f"{totals.images:,}"]
        cells.append([row.name, *numbers])
    print_table("", ["", "top-1 %", "top-5 %", "loss", "images"], cells)


def parse_shape(text: str) -> tuple[int, ...]:
    """Read CxHxW as three numbers."""
    parts = text.lower().replace(",", "x").split("x")
    if len(parts) != 3 or not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f"--input must be CHANNELSxHEIGHTxWIDTH, such as 3x224x224. Got {text!r}.")
    return tuple(int(part) for part in parts)
