"""`inspect`, `compact`, `evaluate` and `predict`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from softprune.errors import ConfigError, first_line, nearest
from softprune.lab.cli.app import (
    DataDir,
    DataSet,
    Device,
    Input,
    Json,
    Method,
    Model,
    Run,
    Settings,
    command,
    parse_shape,
)
from softprune.lab.cli.output import format_percent, print_json, print_table, say
from softprune.lab.config.recipes import DEFAULT_RECIPE, load_recipe
from softprune.lab.runs.folder import RunFolder


@command
def inspect(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A name from `softprune models`, module:factory, or the folder of a run. [default: digits_net]",
            show_default=False,
        ),
    ] = None,
    num_classes: Annotated[
        int | None,
        typer.Option(min=1, max=1_000_000, help="Classes of the network. [default: those of the data, or 10]"),
    ] = None,
    input_shape: Input = "",
    include: Annotated[
        list[str] | None, typer.Option(help="Prune only these BatchNorms (name with wildcards). Repeatable.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(help="Freeze these BatchNorms (name with wildcards). Repeatable.")
    ] = None,
    code: Annotated[
        str, typer.Option("--model", help="The network, as in `train`; for a run whose model.name is module:factory.")
    ] = "",
    data: Annotated[
        str, typer.Option("--data", help="The data set, as in `train`, which gives shape and classes.")
    ] = "",
    data_dir: DataDir = None,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Show which BatchNorms can be pruned, and why others cannot.

    For a run, its method.include and method.exclude apply, and the network is the dense one.
    """
    import torch

    import softprune
    from softprune.lab.cli.opened import data_facts, dense_network, image_shape
    from softprune.lab.runs.networks import build_network, named_config
    from softprune.models import REGISTRY

    shape, asked = parse_shape(input_shape), model or code or "digits_net"
    run = RunFolder(Path(asked)) if asked not in REGISTRY and Path(asked).is_dir() else None
    if run is not None and settings:
        raise ConfigError(f"--set must come with a network. Got it with {asked}, a run, which has its settings.")
    of_data = [f"--set {each}" for each in settings or () if each.startswith("data.")]
    of_data += [] if data_dir is None else [f"--data-dir {data_dir}"]
    if of_data and not data:
        raise ConfigError(f"{of_data[0]} must come with --data, such as --data folder. Got it alone.")
    if run is None:
        _check_network(asked, model, code)
        named = [f"model.name={asked}", *([f"data.name={data}"] if data else [])]
        config = load_recipe(DEFAULT_RECIPE, [*named, *(settings or [])])
        asked = config.model.name  # --set may name another
    else:
        config = named_config(RunFolder.open(run.path), code, data, needs=("model",))
        include, exclude = include or [*config.method.include], exclude or [*config.method.exclude]
    if data and (not shape or num_classes is None):
        found_shape, found_classes = data_facts(config, data_dir)
        shape, num_classes = shape or found_shape, num_classes or found_classes
    if run is not None:
        network = dense_network(run.path, config, num_classes)
        shape = shape or image_shape(config, run.compact)
    elif shape or ":" not in asked:
        network = build_network(asked, num_classes or 10, config.model.options)
        shape = shape or REGISTRY[asked].input_shape
    else:
        raise ConfigError(
            "A network of your own needs the shape of an image: from its data (--data folder --data-dir images), or "
            f"--input 3x224x224. Got {asked!r} without it."
        )
    found = softprune.inspect(network, torch.zeros(2, *shape), include=include or None, exclude=exclude or None)
    if as_json:
        numbers = {name: getattr(found, name) for name in ("macs", "params", "floor_macs", "floor_params")}
        sites = [{"name": site.name, "channels": site.width, "activation": site.activation} for site in found.sites]
        frozen = [{"name": each.name, "channels": each.width, "reason": each.reason} for each in found.frozen]
        print_json({"network": config.model.name, **numbers, "sites": sites, "frozen": frozen})
        return
    if run is not None:
        say(f"{config.model.name}, as pruned in {asked}")
    say(str(found))


def _check_network(asked: str, model: str | None, code: str) -> None:
    """Raise a ConfigError unless `asked`, which is no run, can be a network, and is named once."""
    from softprune.models import REGISTRY

    if model and code:
        raise ConfigError(f"--model must come alone or with the folder of a run. Got {model!r} beside it; name one.")
    if asked not in REGISTRY and ":" not in asked:
        raise ConfigError(
            "A network must be a name that `softprune models` lists, module:factory of your own, or the folder of a "
            f"run. Got {asked!r}.{nearest(asked, REGISTRY)}"
        )


@command
def compact(
    run: Run,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write. [default: RUN/compact.safetensors]")
    ] = None,
    round_to: Annotated[int | None, typer.Option(help="Round widths up to this multiple. [default: the run's]")] = None,
    gathers: Annotated[
        bool,
        typer.Option("--gathers/--no-gathers", help="Let layers gather the channels that they read from a tensor."),
    ] = True,
    device: Device = "auto",
    data_dir: DataDir = None,
    model: Model = "",
    data: DataSet = "",
    method: Method = "",
    as_json: Json = False,
) -> None:
    """Cut the network of a run, finished or not, and save it.

    Read the result with `softprune.load`. --round-to and --no-gathers change the speed of the network, not what it
    computes; they need --out. `softprune bench` compares the variants.
    """
    from softprune.lab.train.evaluate import compact_run

    own = {"model": model, "data": data, "method": method}
    path, before, after = compact_run(
        run, out, device=device, data_dir=data_dir, round_to=round_to, gathers=gathers, **own
    )
    costs = {"dense": before, "compact": after}
    if as_json:
        sizes = {name: {"params": cost.params, "macs": cost.macs} for name, cost in costs.items()}
        print_json({"file": str(path), **sizes})
        return
    rows = [[name, f"{cost.params:,}", f"{cost.macs:,}"] for name, cost in costs.items()]
    print_table("", ["", "params", "MACs"], rows)
    say(f"Compact network: {path}")


@command
def evaluate(
    run: Annotated[Path, typer.Argument(help="Folder of a run, or a compact network.", show_default=False)],
    device: Device = "auto",
    data_dir: DataDir = None,
    model: Model = "",
    data: DataSet = "",
    method: Method = "",
    input_shape: Input = "",
    as_json: Json = False,
) -> None:
    """Evaluate the masked and the compact network of a run.

    A compact network outside of its run can be evaluated too.
    """
    from softprune.lab.train.evaluate import evaluate_folder

    shape = parse_shape(input_shape)
    found = evaluate_folder(run, device=device, data_dir=data_dir, model=model, data=data, method=method, shape=shape)
    if as_json:
        print_json([{"network": name, **vars(totals)} for name, totals in found.items()])
        return
    cells = [
        [name, format_percent(t.top1), format_percent(t.top5), f"{t.loss:.4f}", f"{t.images:,}"]
        for name, t in found.items()
    ]
    print_table("", ["", "top-1 %", "top-5 %", "loss", "images"], cells)


@command
def predict(
    run: Run,
    images: Annotated[list[Path], typer.Argument(help="Image files, or folders of them.", show_default=False)],
    device: Device = "cpu",
    data_dir: DataDir = None,
    model: Model = "",
    data: DataSet = "",
    as_json: Json = False,
) -> None:
    """Classify images with the compact network of a finished run.

    Images are resized and normalised as in the run's evaluation, and the classes are those that it was trained on. The
    run has recorded both; --data and --data-dir are for runs of earlier versions, which have not.
    """
    import torch

    from softprune.lab.cli.opened import image_files, open_compact, open_images, open_inputs
    from softprune.lab.world import pick_device

    inputs = open_inputs(RunFolder.open(run), model=model, data=data, data_dir=data_dir)
    names, where = inputs.classes, pick_device(device)
    network = open_compact(run, model=model, shape=inputs.shape).compact.to(where).eval()
    found: list[dict[str, Any]] = []
    chosen = image_files(images)
    for files in (chosen[start : start + 16] for start in range(0, len(chosen), 16)):
        batch = open_images(files, inputs).to(where)
        try:
            with torch.inference_mode():
                outputs = network(batch).float()
        except (RuntimeError, ValueError) as error:
            raise ConfigError(
                f"A network must take the inputs that its run has recorded, {'x'.join(map(str, inputs.shape))}. Got "
                f"{first_line(error)}; the record was changed: restore it."
            ) from error
        if outputs.shape[1:] != (len(names),):
            raise ConfigError(
                f"A network must have one output per class. Got {tuple(outputs.shape[1:])} for {len(names)} classes; "
                "the run's record or its data set was changed: restore it."
            )
        best = outputs.softmax(1).topk(min(3, len(names)), dim=1)
        for file, shares, classes in zip(files, best.values.tolist(), best.indices.tolist(), strict=True):
            ranking = [
                {"class": names[index], "probability": share} for share, index in zip(shares, classes, strict=True)
            ]
            found.append({"image": str(file), "classes": ranking})
    if as_json:
        print_json(found)
        return
    rows = []
    for each in found:
        cells = [f"{entry['class']} {100 * entry['probability']:.1f}%" for entry in each["classes"]]
        rows.append([each["image"], cells[0], ", ".join(cells[1:])])
    print_table("", ["image", "class", "next"], rows)
