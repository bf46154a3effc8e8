"""Start a run or go on with one: the dense baseline first where the recipe asks for it, then the run itself."""

import logging
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from softprune.config.recipes import config_from_dict
from softprune.config.settings import MethodConfig, RunConfig
from softprune.data import DataBundle, load_data
from softprune.distributed import World, join_world, leave_world
from softprune.errors import CheckpointError, DataError
from softprune.runs.checkpoint import has_damaged, newest_path, read_newest
from softprune.runs.folder import RunFolder, check_folder_name
from softprune.runs.networks import initial_network
from softprune.runs.resume_hints import way_on
from softprune.train.events import find_writer
from softprune.train.finish import finish
from softprune.train.method import check_method, make_pruner
from softprune.train.progress import Listener
from softprune.train.stop_signal import StopSignal
from softprune.train.trainer import Trainer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended."""

    folder: RunFolder
    """Where its files are."""
    result: dict[str, Any] | None
    """The content of result.json, if the run is finished."""
    stopped: str | None
    """Why it stopped early, if it did."""
    is_writer: bool
    """Whether this process is the one that writes and reports."""


def start(
    config: RunConfig,
    out: Path | str | None = None,
    *,
    device: str = "auto",
    time_limit: float | None = None,
    listener: Listener | None = None,
) -> Outcome:
    """Train from the beginning, in a folder of its own (``out``, or one under runs/ that is still free)."""
    with _World(device) as world:
        # What can be wrong is looked at before there is a folder, so that a mistake leaves none behind.
        check_method(config.method, compact_at=config.train.compact_at)
        if config.records.tensorboard:
            find_writer()
        data = open_data(config, world.device)
        _check_pruner(config, initial_network(config.model, data.num_classes, config.seed), data)
        path = world.broadcast(str(out or _free_folder(config.name or "run")))
        if world.is_writer:
            RunFolder.create(path, config)
        world.barrier()
        folder = RunFolder(path)
        with _claim(folder, world):
            return _run(config, folder, data, world, time_limit, listener or Listener())


def resume(
    run: Path | str,
    *,
    device: str = "auto",
    time_limit: float | None = None,
    data_dir: str | None = None,
    listener: Listener | None = None,
) -> Outcome:
    """Go on with the run in the folder ``run``; one that is finished is left as it is."""
    folder = RunFolder.open(run)
    config = folder.read_config()
    if data_dir is not None:
        config = config.replace(data=config.data.replace(dir=data_dir))
    with _World(device) as world, _claim(folder, world):
        data = open_data(config, world.device)
        return _run(config, folder, data, world, time_limit, listener or Listener())


def _claim(folder: RunFolder, world: World) -> AbstractContextManager[None]:
    """Holds the run's lock in the process that writes. Nobody writes a finished run, which may lie on a
    read-only disk."""
    return folder.lock() if world.is_writer and not folder.result.is_file() else nullcontext()


def _check_pruner(config: RunConfig, network: nn.Module, data: DataBundle) -> None:
    """Have the method refuse what it does not take of this network: a ratio out of range, a target below the floor.

    A target in milliseconds is left for later: its table takes a while to measure. So is what `round_to = "auto"`
    means, which is asked of the device that trains.
    """
    method = config.method
    if method.name != "dense" and "latency" not in method.target:
        if method.round_to == "auto":
            method = method.replace(round_to=1)
        steps = max(len(data.train) // config.data.batch_size, 1) * config.train.epochs
        make_pruner(method, network, data.example(), masks=config.masks, seed=config.seed, total_steps=steps)


def dense_config(config: RunConfig) -> RunConfig:
    """The baseline of a run: the same training without pruning."""
    return config.replace(
        name=f"{config.name}-dense",
        method=MethodConfig(name="dense"),
        train=config.train.replace(dense_baseline=False, compact_at=0, recalibrate=0),
        finetune=config.finetune.replace(epochs=0),
    )


def _run(
    config: RunConfig,
    folder: RunFolder,
    data: DataBundle,
    world: World,
    time_limit: float | None,
    listener: Listener,
) -> Outcome:
    def outcome(result: dict[str, Any] | None, stopped: str | None) -> Outcome:
        return Outcome(folder=folder, result=result, stopped=stopped, is_writer=world.is_writer)

    if folder.result.is_file():
        finished = folder.read_result()
        logger.info("%s is finished; nothing to do", folder.path)
        return outcome(finished, None)
    set_arithmetic(config, world.device)
    with StopSignal(time_limit) as stop:
        if config.train.dense_baseline:
            baseline = RunFolder(folder.dense)
            if baseline.result.is_file():
                baseline.read_result()  # one that cannot be read is told before the training, not behind it
            else:
                listener.on_stage("training the dense baseline")
                if world.is_writer and not baseline.config.exists():
                    RunFolder.create(baseline.path, dense_config(config))
                with _claim(baseline, world):
                    reason, _ = _train(dense_config(config), baseline, data, world, listener, stop)
                if reason is not None:
                    return outcome(None, reason)
            listener.on_stage(f"training and pruning ({config.method.name})")
        reason, result = _train(config, folder, data, world, listener, stop)
    return outcome(result, reason)


def _train(
    config: RunConfig, folder: RunFolder, data: DataBundle, world: World, listener: Listener, stop: StopSignal
) -> tuple[str | None, dict[str, Any] | None]:
    state = _newest_state(config, folder, mend=world.is_writer)
    trainer = Trainer(config, folder, data, world, listener=listener, stop=stop, state=state)
    reason = trainer.run()
    if reason is not None:
        return reason, None
    try:
        result = finish(trainer)
    except DataError as error:
        raise DataError(f"{error} All training is done and saved. {way_on(trainer.folder)}") from error
    world.barrier()
    return None, result


def _newest_state(config: RunConfig, folder: RunFolder, *, mend: bool) -> dict[str, Any] | None:
    """What to go on from; None when the run has not come as far as its first checkpoint."""
    if newest_path(folder.checkpoints) is None and not has_damaged(folder.checkpoints):
        if folder.sessions.is_file():
            logger.info(
                "there is no checkpoint in %s: training starts from the beginning", folder.checkpoints
            )
        return None
    path, state = read_newest(folder.checkpoints, mend=mend)
    saved = config_from_dict(state["config"])
    # Where the data lies may change between two machines; nothing else may.
    if saved.replace(data=saved.data.replace(dir=config.data.dir)) != config:
        raise CheckpointError(
            f"{path} must be of the run that config.toml describes. Got another configuration: restore "
            f"{folder.config}, or start a new run with `{folder.again_command}`."
        )
    logger.info("going on from %s (epoch %d, batch %d)", path.name, state["epoch"] + 1, state["batch"])
    return state


def open_data(config: RunConfig, device: torch.device, folder: str | None = None) -> DataBundle:
    """The run's images, from ``folder`` instead of where the configuration says if given."""
    return load_data(
        config.data.name,
        folder or config.data.dir or None,
        device=device,
        download=config.data.download,
        image_size=config.data.image_size,
        seed=config.seed,
        augment=config.data.augment,
    )


def set_arithmetic(config: RunConfig, device: torch.device) -> None:
    """Precision and determinism, which PyTorch keeps per process."""
    if config.train.precision == "bf16" and device.type == "cpu" and not _has_fast_bf16():
        logger.warning("train.precision = bf16 on this CPU is slow; fp32 is faster here")
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    tf32 = config.train.precision != "fp32"
    torch.backends.cudnn.allow_tf32 = tf32
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    if config.train.deterministic and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def _has_fast_bf16() -> bool:
    return bool(torch.backends.cpu.get_cpu_capability().startswith("AVX512"))


def _free_folder(name: str) -> Path:
    """runs/NAME, or the first of runs/NAME-2, runs/NAME-3, ... that is still free."""
    path, number = Path("runs") / check_folder_name(name), 1
    while path.exists():
        number += 1
        path = Path("runs") / f"{name}-{number}"
    return path


class _World:
    """Joins the other processes, and leaves them again also after an error."""

    def __init__(self, device: str) -> None:
        self._device = device

    def __enter__(self) -> World:
        return join_world(self._device)

    def __exit__(self, *details: object) -> None:
        leave_world()
