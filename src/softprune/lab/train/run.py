"""Start or resume a run: the dense baseline first if the recipe asks for it, then the run itself."""

import inspect
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from softprune.devices import has_fast_bf16
from softprune.errors import CheckpointError, ConfigError, DataError, SoftpruneError, first_line, show
from softprune.lab.config.method import MethodConfig
from softprune.lab.config.recipes import changed_settings, show_changes
from softprune.lab.config.settings import BASELINE, START, DataConfig, DistillConfig, RunConfig
from softprune.lab.data import DataBundle, load_data
from softprune.lab.runs.checkpoint import newest_path, read_checkpoint, read_newest, restoring
from softprune.lab.runs.folder import RunFolder, check_folder_name
from softprune.lab.runs.result import Result
from softprune.lab.train.control import Listener, StopSignal, early_messages, run_log
from softprune.lab.train.pruner import check_method, check_one_shot
from softprune.lab.train.stage import StartingPoint, first_stage, restored_stage
from softprune.lab.train.teacher import load_teacher
from softprune.lab.train.trainer import RunContext, Trainer, describe_images
from softprune.lab.world import World, is_lost_process, join_world, leave_world, may_restart
from softprune.log import get_logger

logger = get_logger(__name__)

DATA_SETTINGS = DataConfig.model_fields.keys() & inspect.signature(load_data).parameters.keys() - {"name"}
"""What of the section [data] decides which images there are; the rest is the training's business."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended."""

    folder: RunFolder
    """Where its files are."""
    result: Result | None
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
    """Train a new run in its own folder (``out``, or the first free one under runs/).

    torchrun repeats the command when it restarts the processes: the run that they have made in ``out`` is resumed.
    """
    config = absolute_paths(config)
    if may_restart() and out is None:
        raise ConfigError(
            "A run that torchrun restarts (--max-restarts) must name its folder, which the restarted processes resume. "
            "Got none; name it with --out."
        )
    with _world(device, time_limit) as world, early_messages() as early:
        if out is not None and may_restart():
            made = RunFolder(out)  # one of another configuration is refused below, like any existing run
            if world.broadcast(made.config.is_file() and made.read_config() == config):
                return _resume(config, made, world, time_limit, listener)
        data, begin = _prepare(config, world)
        folder = RunFolder(world.broadcast(str(out or _free_folder(config.name or "run"))))
        if world.is_writer:
            RunFolder.create(folder.path, config)
        world.barrier()
        with (
            folder.lock() if world.is_writer else nullcontext(),
            run_log(folder, listener or Listener(), write=world.is_writer, early=early) as logged,
            StopSignal(time_limit) as stop,
        ):
            return _train_all(RunContext(config, folder, data, world, logged, stop), begin)


def check(
    config: RunConfig, out: Path | str | None = None, *, device: str = "auto"
) -> tuple[DataBundle, StartingPoint, torch.device, Path]:
    """Return what a new run would start with, its device and its folder; raise what it would raise before training."""
    path = Path(out or _free_folder(config.name or "run"))
    RunFolder.check_new(path)
    with _world(device) as world:
        return *_prepare(absolute_paths(config), world), world.device, path


def resume(
    run: Path | str,
    *,
    device: str = "auto",
    time_limit: float | None = None,
    data_dir: str | None = None,
    listener: Listener | None = None,
) -> Outcome:
    """Resume the run in the folder ``run``. A finished run is not changed."""
    folder = RunFolder.open(run)
    config = folder.read_config()
    if data_dir is not None:
        config = config.replace(data=config.data.replace(dir=_absolute(data_dir)))
    with _world(device, time_limit) as world:
        return _resume(config, folder, world, time_limit, listener)


def _resume(
    config: RunConfig, folder: RunFolder, world: World, time_limit: float | None, listener: Listener | None
) -> Outcome:
    if world.broadcast(folder.result.is_file()):
        logger.info("%s is finished; nothing to do", folder.path)
        return Outcome(folder=folder, result=folder.read_result(), stopped=None, is_writer=world.is_writer)
    with (
        folder.lock() if world.is_writer else nullcontext(),
        run_log(folder, listener or Listener(), write=world.is_writer) as logged,
    ):
        set_arithmetic(config, world.device)
        data = open_data(config, world.device)
        with StopSignal(time_limit) as stop:
            return _train_all(RunContext(config, folder, data, world, logged, stop), None)


def _prepare(config: RunConfig, world: World) -> tuple[DataBundle, StartingPoint]:
    """Everything that can be wrong is raised before there is a folder, so that a mistake leaves no files."""
    check_method(config.method, compact_at=config.train.compact_at)
    check_one_shot(config)
    set_arithmetic(config, world.device)
    data = open_data(config, world.device)
    begin = first_stage(config, data, world)
    if config.distill.teacher not in ("", BASELINE):
        begin.stage.step.teacher = load_teacher(config, None, data, world)
    return data, begin


def _train_all(context: RunContext, begin: StartingPoint | None) -> Outcome:
    """Train the dense baseline, if the run has one, and then the run."""
    if context.config.train.precision == "bf16" and not has_fast_bf16(context.world.device):
        logger.warning("softprune: train.precision = bf16 is slow on this CPU; fp32 is faster")
    reason = _train_baseline(context) if context.config.train.dense_baseline else None
    result = None
    if reason is None:
        reason, result = _train(context, begin)
    return Outcome(folder=context.folder, result=result, stopped=reason, is_writer=context.world.is_writer)


def _train_baseline(context: RunContext) -> str | None:
    """Train the dense baseline of a run unless it is finished; return the reason to stop early, if there is one."""
    config, world, listener = context.config, context.world, context.listener
    baseline, dense, reason = RunFolder(context.folder.dense), dense_config(config), None
    if world.broadcast(baseline.result.is_file()):
        _check_same_config(dense, baseline.read_result().config, baseline, baseline.result)
    else:
        listener.on_phase("training the dense baseline")
        if world.is_writer and not baseline.config.exists():
            RunFolder.create(baseline.path, dense)
        with baseline.lock() if world.is_writer else nullcontext():
            reason, _ = _train(replace(context, config=dense, folder=baseline), None)
    if reason is None:
        listener.on_phase(f"training and pruning ({config.method.name})")
    return reason


def _train(context: RunContext, begin: StartingPoint | None) -> tuple[str | None, Result | None]:
    """Train one run to its end; return the reason to stop early, or the result."""
    config, folder, data, world = context.config, context.folder, context.data, context.world
    state = _newest_state(config, folder, world)
    if state is not None:
        _check_same(describe_images(data), state["data"], "images")
        begin = restored_stage(config, data, world, state)
    elif config.model.weights == BASELINE:
        trained = config.model.replace(weights=str(folder.dense), pretrained=False)
        begin = first_stage(config.replace(model=trained), data, world)
    elif begin is None:
        begin = first_stage(config, data, world)
    step = begin.stage.step
    if config.distill.teacher and step.teacher is None:
        step.teacher = load_teacher(config, folder, data, world)
    if state is not None and step.teacher is not None:
        _check_same({"checksum": step.teacher.checksum}, {"checksum": state["teacher"]}, "teacher")
    trainer = Trainer(context, begin, state)
    reason = trainer.run()
    if reason is not None:
        return reason, None
    try:
        result = trainer.finish()
    except DataError as error:
        raise DataError(f"{error} All training is done and saved; `{folder.resume_command}` finishes it.") from error
    world.barrier()
    return None, result


def _newest_state(config: RunConfig, folder: RunFolder, world: World) -> dict[str, Any] | None:
    """Return the checkpoint to resume from, the one that rank 0 finds, or None if the run has none yet."""
    name, state = None, dict[str, Any]()
    if world.is_writer and newest_path(folder.checkpoints) is not None:
        path, state = read_newest(folder.checkpoints, repair=True)
        name = path.name
    name = world.broadcast(name)
    if name is None:
        return None
    path = folder.checkpoints / name
    if not world.is_writer:
        if not path.is_file():
            raise CheckpointError(
                f"All processes must resume from the checkpoint of rank 0. Got no {path} on {platform.node()}: every "
                "node must mount the folder of the run."
            )
        state = read_checkpoint(path)
    with restoring():
        saved = RunConfig(**state["config"])
        at = state["history"]
    _check_same_config(config, saved, folder, path)
    logger.info("resuming from %s (epoch %d, batch %d)", path.name, at["epoch"] + 1, at["batch"])
    return state


def _check_same(now: dict[str, Any], then: dict[str, Any], what: str) -> None:
    """Raise a CheckpointError if the images or the teacher are not those that the run began with."""
    changed = [f"{key} {show(now[key])} instead of {show(then[key])}" for key in now if now[key] != then[key]]
    if changed:
        raise CheckpointError(
            f"A run must be resumed with the {what} that it began with. Got {'; '.join(changed)}. Restore the files, "
            "or start a new run."
        )


def _check_same_config(config: RunConfig, saved: RunConfig, folder: RunFolder, path: Path) -> None:
    """Raise a CheckpointError if the file ``path`` of a run was written with another configuration."""
    changed = changed_settings(config, saved)
    plan = ("method.options.plan",) if config.method.name == "scratch" else ()
    # Files may be moved, and what they hold is checked; loader processes decide nothing.
    for setting in ("data.dir", "data.workers", "distill.teacher", *plan):
        changed.pop(setting, None)
    if changed:
        raise CheckpointError(
            f"{path} must belong to the run that config.toml describes. Got another configuration, "
            f"{show_changes(changed)}: restore {folder.whole.config}, or start a new run with `{folder.again_command}`."
        )


def absolute_paths(config: RunConfig) -> RunConfig:
    """Return ``config`` with absolute paths, so that a run can be resumed and repeated from any folder.

    The teacher `start` becomes the path of ``model.weights``.
    """
    teacher = config.distill.teacher
    if teacher == START:
        teacher = config.model.weights
        if not teacher:
            raise ConfigError(
                f'distill.teacher = "{START}" needs the trained network to start from. Got model.weights = ""; set it '
                "to the folder of a run or a weights file."
            )
    options = config.method.options
    if config.method.name == "scratch" and isinstance(plan := options.get("plan"), str):
        options = {**options, "plan": _absolute(plan)}
    return config.replace(
        data=config.data.replace(dir=_absolute(config.data.dir)),
        model=config.model.replace(weights=_absolute(config.model.weights)),
        method=config.method.replace(latency_table=_absolute(config.method.latency_table), options=options),
        distill=config.distill.replace(teacher=_absolute(teacher)),
    )


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute()) if path not in ("", BASELINE) else path


def dense_config(config: RunConfig) -> RunConfig:
    """Return the configuration of a run's baseline: the same training without pruning."""
    weights = "" if config.model.weights == BASELINE else config.model.weights
    off = {"dense_baseline": False, "dense_epochs": 0, "compact_at": 0}
    return config.replace(
        name=f"{config.name}-dense",
        model=config.model.replace(weights=weights),
        method=MethodConfig(name="dense"),
        train=config.train.replace(epochs=config.train.dense_epochs or config.train.epochs, **off),
        finetune=config.finetune.replace(epochs=0),
        distill=DistillConfig(),
    )


def open_data(
    config: RunConfig, device: torch.device, folder: str | None = None, *, in_memory: bool = True
) -> DataBundle:
    """Return the run's images, from ``folder`` if given, or from the configuration's folder.

    Commands that do not train pass ``in_memory=False``: images in files are decoded when they are used, if they are.
    """
    settings = {key: getattr(config.data, key) for key in DATA_SETTINGS}
    settings["in_memory"] &= in_memory
    return load_data(config.data.name, folder or config.data.dir or None, device=device, seed=config.seed, **settings)


def set_arithmetic(config: RunConfig, device: torch.device) -> None:
    """Set precision and determinism, which PyTorch keeps per process."""
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    tf32 = config.train.precision != "fp32"
    torch.backends.cudnn.allow_tf32 = tf32
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    if config.train.deterministic and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def _free_folder(name: str) -> Path:
    """Return runs/NAME, or the first of runs/NAME-2, runs/NAME-3, ... that is free."""
    path, number = Path("runs") / check_folder_name(name), 1
    while path.exists():
        number += 1
        path = Path("runs") / f"{name}-{number}"
    return path


@contextmanager
def _world(device: str, time_limit: float | None = None) -> Iterator[World]:
    """Join the process group, and leave it again even after an error, which may be that of a lost process."""
    if time_limit is not None and may_restart():
        raise ConfigError(
            "Only one of --time-limit and torchrun's --max-restarts can be used. Got both: torchrun would start a run "
            "that the limit has stopped again. Leave one out; SIGTERM to torchrun stops a run that may be restarted."
        )
    try:
        yield join_world(device)
    except RuntimeError as error:
        if not is_lost_process(error):
            raise
        raise SoftpruneError(
            f"All processes of a run must work until it ends. Got {first_line(error)}: another process failed, and its "
            "own message says why, or it was killed. Start them again; a run resumes from its newest checkpoint."
        ) from error
    finally:
        leave_world()
