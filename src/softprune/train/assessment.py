"""Test the networks of a run, or a saved compact network."""

from dataclasses import dataclass
from pathlib import Path

from softprune.config.settings import ModelConfig, RunConfig
from softprune.distributed import join_world
from softprune.errors import ConfigError
from softprune.runs.checkpoint import newest_path, read_newest
from softprune.runs.folder import RunFolder
from softprune.runs.networks import build_network, known_origin
from softprune.surgery import load, saved_path
from softprune.train.cutting import restore_stage
from softprune.train.eval_step import EvalTotals
from softprune.train.evaluate import Evaluator
from softprune.train.run import open_data, set_arithmetic


@dataclass(frozen=True)
class Variant:
    """One row of what :func:`evaluate_folder` found."""

    name: str
    totals: EvalTotals


def evaluate_folder(
    path: Path, *, device: str = "auto", data_dir: str | None = None, model: str = "", data: str = ""
) -> list[Variant]:
    """Test a run's network as trained (masked) and compact, or a saved compact network.

    The dense network and the data come from the configuration of the run that the file is in, else from the origin
    noted in the file, else from ``model`` and ``data``.
    """
    is_run = (path / "config.toml").is_file()
    compact = RunFolder(path).compact if is_run else saved_path(path)
    if not is_run and not compact.is_file():
        raise ConfigError(
            "`softprune evaluate` takes the folder of a run (with config.toml) or the .safetensors file of a compact "
            f"network. Got {path}, which is neither."
        )
    config = _config_for(compact, model, data, data_dir)
    world = join_world(device)
    set_arithmetic(config, world.device)
    images = open_data(config, world.device)
    evaluator = Evaluator(images, config, world)
    rows = []
    folder = RunFolder(path)
    if is_run and newest_path(folder.checkpoints) is not None:
        stage = restore_stage(config, images, world, read_newest(folder.checkpoints)[1])
        with stage.judged() as network:
            name = "masked" if stage.pruner is not None else "trained"
            rows.append(Variant(name, evaluator(network)))
    if compact.is_file():
        dense = build_network(config.model.name, images.num_classes).to(world.device)
        rows.append(Variant("compact", evaluator(load(compact, dense))))
    if not rows:
        raise ConfigError(f"A run must have a checkpoint to evaluate. Got none yet in {path}.")
    return rows


def _config_for(compact: Path, model: str, data: str, data_dir: str | None) -> RunConfig:
    run = compact.parent
    origin = None if (run / "config.toml").is_file() else known_origin(compact)
    if origin is not None:
        model, data = model or origin.model, data or origin.data
    if (run / "config.toml").is_file():
        config = RunFolder(run).read_config()
    elif model and data:
        config = RunConfig()
    else:
        raise ConfigError(
            "A compact network outside its run needs --model and --data, unless its file says that it comes from one "
            "of softprune's own networks. "
            f"Got {'only --model' if model else 'only --data' if data else 'neither'}."
        )
    if model:
        config = config.replace(model=ModelConfig(name=model))
    images = config.data.replace(name=data or config.data.name, dir=data_dir or config.data.dir)
    return config.replace(data=images)
