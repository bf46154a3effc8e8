"""Evaluate or cut the network of a run from its newest checkpoint: `softprune evaluate` and `softprune compact`."""

from pathlib import Path

from softprune.costs import Cost, cost
from softprune.cut import load, read_origin, save
from softprune.errors import ConfigError
from softprune.lab.config.settings import DataConfig, ModelConfig, RunConfig
from softprune.lab.data import DATASETS
from softprune.lab.runs.checkpoint import newest_path, read_newest
from softprune.lab.runs.folder import RunFolder
from softprune.lab.runs.networks import build_network, locate_compact, named_config, origin_of
from softprune.lab.train.evaluate import EvalTotals, Evaluator
from softprune.lab.train.run import open_data, set_arithmetic
from softprune.lab.train.stage import restored_stage
from softprune.lab.world import join_world
from softprune.models import REGISTRY
from softprune.module_state import evaluating


def evaluate_folder(
    path: Path,
    *,
    device: str = "auto",
    data_dir: str | None = None,
    model: str = "",
    data: str = "",
    method: str = "",
    shape: tuple[int, ...] = (),
) -> dict[str, EvalTotals]:
    """Return the test accuracy of a run's network, as trained ("masked") and "compact", or of a compact network alone.

    A compact network inside its run takes the model and the data from the run's configuration. Elsewhere they come
    from its record of its origin, or from ``model`` and ``data``; so does the ``shape`` of its images.
    """
    run, compact = locate_compact(path)
    is_run = run is not None and run.path == path
    if not is_run and not compact.is_file():
        raise ConfigError(
            "`softprune evaluate` takes the folder of a run (with config.toml) or the .safetensors file of a compact "
            f"network. Got {path}, which is neither."
        )
    if run is None:
        config, shape = _config_outside(compact, model, data, shape)
    else:
        needs = ("model", "data", "method") if is_run else ("model", "data")
        config = named_config(run, model, data, method, needs=needs)
    world = join_world(device)
    set_arithmetic(config, world.device)
    images = open_data(config, world.device, data_dir, in_memory=False)
    if shape and shape != images.input_shape:
        needed, found_shape = ("x".join(map(str, each)) for each in (shape, images.input_shape))
        raise ConfigError(
            f"A network must be evaluated with images of its own shape, {needed}. Got {found_shape} from "
            f"{config.data.name}; if that is right, pass it as --input."
        )
    evaluator = Evaluator(images, config, world)
    found = {}
    if run is not None and is_run and newest_path(run.checkpoints) is not None:
        stage = restored_stage(config, images, world, read_newest(run.checkpoints)[1]).stage
        found["masked" if stage.pruner is not None else "trained"] = evaluator(stage.network, on_test=True)
    if compact.is_file():
        dense = build_network(config.model.name, images.num_classes, config.model.options).to(world.device)
        found["compact"] = evaluator(load(compact, dense).float(), on_test=True)
    if not found:
        raise ConfigError(f"A run must have a checkpoint to evaluate. Got none in {path}; train it first.")
    return found


def _config_outside(compact: Path, model: str, data: str, shape: tuple[int, ...]) -> tuple[RunConfig, tuple[int, ...]]:
    """Return the configuration for a compact network outside its run, and the shape of its images, if it is known."""
    origin = read_origin(compact)
    # A module:factory is code of whoever wrote the file, and runs only when the user names it.
    if origin is not None and origin.model in REGISTRY:
        model, data = model or origin.model, data or origin.data
    if not (model and data):
        raise ConfigError(
            "A compact network outside its run needs --model and --data, unless it records that it comes from one of "
            f"softprune's own networks. Got {model or 'no'} model and {data or 'no'} data."
        )
    shape = shape or (() if origin is None else origin.input_shape)
    if data in DATASETS and DATASETS[data].input_shape is None and not shape:
        raise ConfigError(
            f"A compact network that does not record the shape of its images needs --input, such as --input 3x224x224. "
            f"Got {compact} with images of any size ({data})."
        )
    images = DataConfig(name=data, image_size=shape[-1]) if shape else DataConfig(name=data)
    return RunConfig(model=ModelConfig(name=model), data=images), shape


def refuse_dense(config: RunConfig, run: Path) -> None:
    """Raise a ConfigError for a run without pruning, which has no compact network."""
    if config.method.name == "dense":
        raise ConfigError(
            f"A compact network is cut from a pruned one. Got the dense run {run}; pass the folder of a run with a "
            'pruning method (method.name other than "dense").'
        )


def compact_run(
    run: Path,
    out: Path | None = None,
    *,
    device: str = "auto",
    data_dir: str | None = None,
    round_to: int | None = None,
    gathers: bool = True,
    model: str = "",
    data: str = "",
    method: str = "",
) -> tuple[Path, Cost, Cost]:
    """Write the compact network of a run's newest checkpoint; return its path, the dense cost and its own cost.

    For a finished run it equals the network that the run wrote, if the device is the same. `round_to` and `gathers`
    are those of Pruner.compact; `model`, `data` and `method` those of named_config.
    """
    folder = RunFolder.open(run)
    config = named_config(folder, model, data, method)
    refuse_dense(config, run)
    world = join_world(device)
    set_arithmetic(config, world.device)
    images = open_data(config, world.device, data_dir, in_memory=False)
    start = restored_stage(config, images, world, read_newest(folder.checkpoints)[1])
    compact, pruner = start.stage.network, start.stage.pruner
    if (round_to is not None or not gathers) and (out is None or pruner is None):
        raise ConfigError(
            "--round-to and --no-gathers cut a network in another way than its run did, which needs --out and a run "
            f"that has not begun its fine-tuning. Got {'no --out' if out is None else 'a run in its fine-tuning'}."
        )
    with evaluating(start.stage.network):
        if pruner is not None:
            compact = pruner.compact(round_to=round_to, gathers=gathers)
        target = save(compact, out or folder.compact, origin=origin_of(config, images))
    return target, cost(start.dense, images.example(1)), cost(compact, images.example(1, world.device))
