"""A run from its configuration to its result: start or resume, then epochs of steps, cuts, checkpoints, the record.

Read `start`, `_train` and `Trainer.run`. `stage.py` makes what is trained, `step.py` runs one step.
"""

import copy
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from softprune.costs import Cost, cost
from softprune.cut import plans_of, remap_optimizer, save
from softprune.devices import broadcast_from_rank0_, has_fast_bf16
from softprune.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    ModelError,
    NonFiniteLoss,
    SoftpruneError,
    first_few,
    first_line,
    import_optional,
    show,
)
from softprune.lab.config.recipes import changed_settings, config_to_dict, show_changes
from softprune.lab.config.settings import BASELINE, START, DistillConfig, MethodConfig, RunConfig
from softprune.lab.data import DataBundle
from softprune.lab.runs.checkpoint import (
    newest_path,
    random_state,
    read_checkpoint,
    read_newest,
    restoring,
    save_checkpoint,
    set_random_state,
)
from softprune.lab.runs.environment import describe_session, warn_of_changes
from softprune.lab.runs.folder import RunFolder, check_folder_name
from softprune.lab.runs.networks import inputs_of, origin_of
from softprune.lab.runs.result import Epoch, Module, Moment, Pruned, Result, SiteRecord, Totals, Variant, best_epoch
from softprune.lab.train.control import Listener, RunLog, StopSignal, run_log
from softprune.lab.train.evaluate import Evaluator, latency_ms
from softprune.lab.train.stage import (
    Stage,
    StartingPoint,
    check_method,
    check_one_shot,
    first_stage,
    load_teacher,
    open_data,
    restored_stage,
    set_arithmetic,
)
from softprune.lab.world import World, is_lost_process, join_world, leave_world, may_restart
from softprune.log import get_logger
from softprune.methods import Pruner
from softprune.module_state import evaluating, non_finite

logger = get_logger(__name__)

# Several processes agree on whether to stop or save only from time to time, since each time costs a round trip.
_AGREE_EVERY = 10
_CONTINUE, _SAVE, _STOP = 0, 1, 2
_LATENCY_BATCH = 64


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


@dataclass(frozen=True)
class RunContext:
    """What a run is trained with, and who listens to it and stops it."""

    config: RunConfig
    folder: RunFolder
    data: DataBundle
    world: World
    listener: Listener
    stop: StopSignal


# --- from the configuration to the loop ------------------------------------------------------------------------------


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
    with _world(device, time_limit) as world, run_log(listener) as log:
        if out is not None and may_restart():
            made = RunFolder(out)  # one of another configuration is refused below, like any existing run
            if world.broadcast(made.config.is_file() and made.read_config() == config):
                return _train_all(config, made, world, log, time_limit)
        prepared = _prepare(config, world)
        folder = RunFolder(world.broadcast(str(out or _free_folder(config.name or "run"))))
        if world.is_writer:
            RunFolder.create(folder.path, config)
        world.barrier()
        return _train_all(config, folder, world, log, time_limit, prepared)


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
    with _world(device, time_limit) as world, run_log(listener) as log:
        return _train_all(config, folder, world, log, time_limit)


def _prepare(config: RunConfig, world: World) -> tuple[DataBundle, StartingPoint]:
    """Everything that can be wrong is raised before there is a folder, so that a mistake leaves no files."""
    check_method(config)
    check_one_shot(config)
    set_arithmetic(config, world.device)
    data = open_data(config, world.device)
    begin = first_stage(config, data, world)
    if config.distill.teacher not in ("", BASELINE):
        begin.stage.step.teacher = load_teacher(config, None, data, world)
    return data, begin


def _train_all(
    config: RunConfig,
    folder: RunFolder,
    world: World,
    log: RunLog,
    time_limit: float | None,
    prepared: tuple[DataBundle, StartingPoint] | None = None,
) -> Outcome:
    """Train the dense baseline, if the run has one, and then the run; resume either where there is a checkpoint."""
    if world.broadcast(folder.result.is_file()):
        finished = folder.read_result()
        logger.info("%s is finished; nothing to do", folder.path)
        return Outcome(folder=folder, result=finished, stopped=None, is_writer=world.is_writer)
    with folder.lock() if world.is_writer else nullcontext():
        if world.is_writer:
            log.open(folder.log)
        if config.train.precision == "bf16" and not has_fast_bf16(world.device):
            logger.warning("softprune: train.precision = bf16 is slow on this CPU; fp32 is faster")
        set_arithmetic(config, world.device)
        data, begin = prepared or (open_data(config, world.device), None)
        with StopSignal(time_limit) as stop:
            context = RunContext(config, folder, data, world, log, stop)
            reason = _train_baseline(context) if config.train.dense_baseline else None
            result = None
            if reason is None:
                reason, result = _train(context, begin)
    return Outcome(folder=folder, result=result, stopped=reason, is_writer=world.is_writer)


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


def describe_images(data: DataBundle) -> dict[str, Any]:
    """Return what a checkpoint records of the images, to notice when they are others."""
    return {
        "training images": len(data.train),
        "test images": len(data.test),
        "classes": data.num_classes,
        "class names": list(data.class_names),
    }


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


# --- the loop --------------------------------------------------------------------------------------------------------


class History(BaseModel):
    """What a run has done so far. Checkpoints hold it."""

    model_config = ConfigDict(strict=True)

    epoch: int = 0
    """Epochs that are finished, of training and fine-tuning together."""
    batch: int = 0
    """Batches of the current epoch that are finished."""
    epoch_ended: bool = False
    """Whether the pruner has been told of the end of the epoch, which is not recorded yet."""
    epochs: list[Epoch] = Field(default_factory=list)
    cuts: list[str] = Field(default_factory=list)
    """The plans that cut the network, as JSON."""
    sites: list[SiteRecord] = Field(default_factory=list)
    """The sites of the dense network, as they were at the last cut, or at the start."""
    alive: dict[str, list[int]] = Field(default_factory=dict)
    """Of each site, the channels of the dense network that the network in training still has."""
    pruned: Pruned | None = None
    finalised_step: int | None = None
    """With a target: the step from which the removed channels were fixed."""
    given: tuple[float | None, float | None] = (None, None)
    """Top-1 and top-5 accuracy of the trained weights that the run began with, if it did."""
    seconds: float = 0.0
    epoch_seconds: float = 0.0
    started: str = Field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    _counted_at: float = PrivateAttr(default_factory=time.monotonic)

    def count_time(self) -> None:
        now = time.monotonic()
        self.seconds += now - self._counted_at
        self.epoch_seconds += now - self._counted_at
        self._counted_at = now

    def next_epoch(self) -> None:
        self.epoch, self.batch, self.epoch_ended, self.epoch_seconds = self.epoch + 1, 0, False, 0.0


class Trainer:
    """A run in training. A new Trainer resumes from ``state``, the checkpoint that :meth:`save` wrote.

    ``start`` is from :func:`first_stage` or, with ``state``, from :func:`restored_stage`.
    """

    def __init__(self, context: RunContext, start: StartingPoint, state: dict[str, Any] | None) -> None:
        config, folder, data, world = context.config, context.folder, context.data, context.world
        self.config, self.folder, self.data, self.world = config, folder, data, world
        self.listener, self.stop = context.listener, context.stop
        self.evaluator = Evaluator(data, config, world)
        self.stage, self.teacher = start.stage, start.stage.step.teacher
        self.dense, self.dense_cost = start.dense, cost(start.dense, data.example(1))
        self.total_epochs = config.train.epochs + config.finetune.epochs
        self._last_kept: tuple[dict[str, Tensor], Totals] | None = None
        self._saved_at = time.monotonic()
        self._warned_of_loss = False
        with restoring():
            self.history = at = History() if state is None else History.model_validate(state["history"])
            set_random_state(start.random, world.device)
        if state is None and self.stage.pruner is not None:
            for site in self.stage.pruner.sites:
                at.sites.append(
                    SiteRecord(name=site.name, activation=site.activation, width=site.width, kept=site.width)
                )
                at.alive[site.name] = list(range(site.width))
            if start.is_trained:
                self.listener.on_phase("testing the trained network")
                tested = self.evaluator(copy.deepcopy(start.dense).to(world.device), on_test=True)
                at.given = (tested.top1, tested.top5)
        self.session = describe_session(world.device, world.size, epoch=at.epoch, batch=at.batch)
        self._writer: Any = None
        if world.is_writer:
            warn_of_changes(folder.read_sessions()[-1:], self.session)
            folder.add_session(self.session)
            folder.write_history(at.epochs)
            if config.records.tensorboard:
                module = import_optional("torch.utils.tensorboard", "records.tensorboard", "tensorboard")
                # Events after the checkpoint that the run resumes from are purged: those epochs are trained again.
                last = max((row.step for row in at.epochs), default=0)
                self._writer = module.SummaryWriter(str(folder.tensorboard), purge_step=last + 1)

    @property
    def in_finetuning(self) -> bool:
        return self.history.epoch >= self.config.train.epochs and self.config.finetune.epochs > 0

    @property
    def _steps_done(self) -> int:
        return self.history.epoch * self.stage.step.steps + self.history.batch

    def run(self) -> str | None:
        """Train to the end and return None, or the reason to stop early. Everything is saved either way."""
        history, every = self.history, self.config.records.checkpoint_epochs
        with self._failures_explained():
            while history.epoch < self.total_epochs:
                self._cut_if_due()
                steps = self.stage.step.steps
                self.listener.on_epoch_start(history.epoch, self.total_epochs, steps)
                for position in self.stage.step.epoch(history.epoch, history.batch):
                    history.batch = position + 1
                    self._update_strength()
                    self.listener.on_step(history.batch)
                    if history.batch < steps and self._saves_or_stops():
                        return self._stopped()
                self._end_epoch()
                is_last = history.epoch == self.total_epochs
                if self._saves_or_stops(is_last or (every > 0 and history.epoch % every == 0)) and not is_last:
                    return self._stopped()
        return None

    def _update_strength(self) -> None:
        if self.stage.pruner is None:
            return
        try:
            self.stage.pruner.update_strength(self._steps_done)
        except ModelError:  # of weights that are not finite: say where it began, and how to start again
            self.stage.step.check()
            self._check_weights()
            raise

    def _saves_or_stops(self, saves: bool = False) -> bool:
        """Save if it is time to, or to stop; return whether to stop, the same in all processes."""
        if self.world.size > 1 and self.history.batch % _AGREE_EVERY:
            return False
        saves = saves or 0 < self.config.records.checkpoint_seconds < time.monotonic() - self._saved_at
        own = _STOP if self.stop.reason() is not None else _SAVE if saves else _CONTINUE
        action = self.world.max(own)
        if action != _CONTINUE:
            self.save()
        return action == _STOP

    def _stopped(self) -> str:
        # torchrun ends all processes as soon as one has ended; none may while the file is written.
        self.world.barrier()
        return self.stop.reason() or "another process"

    def _end_epoch(self) -> None:
        """Evaluate the network, write the epoch's line, and advance to the next epoch."""
        self._check_weights()
        pruner, step, history = self.stage.pruner, self.stage.step, self.history
        totals = step.totals()
        history.count_time()
        if pruner is not None and not history.epoch_ended:
            # Once per epoch, even if a test image that cannot be read stops the run right afterwards.
            pruner.end_epoch(history.epoch)
        history.epoch_ended = True
        number, tested = history.epoch + 1, dict[str, Any]()
        with evaluating(self.stage.network):
            if pruner is not None and number == self.config.train.epochs:
                # A method that decides once, after training, is evaluated with its decision.
                pruner.decide()
            if number % self.config.records.eval_epochs == 0 or number in (self.config.train.epochs, self.total_epochs):
                found = self.evaluator(self.stage.network)
                tested = {"test_loss": found.loss, "test_top1": found.top1, "test_top5": found.top5}
                self._warn_of_loss(found.top1)
            kept = self._kept()
            budget = None if pruner is None else pruner.status
        last_step = number * step.steps - 1
        penalised = pruner is not None and pruner.penalised
        row = Epoch(
            epoch=history.epoch,
            step=last_step + 1,
            phase="finetune" if self.in_finetuning else "train",
            decided=pruner is None or pruner.decided,
            lr=step.schedule(last_step),
            strength=float(pruner.strength) if pruner is not None and penalised else None,
            margin=None if budget is None else budget.margin,
            train_loss=totals.loss,
            penalty=totals.penalty if penalised else None,
            train_top1=totals.top1,
            **tested,
            **dict(kept),
            seconds=history.epoch_seconds,
            images_per_second=totals.images / max(history.epoch_seconds, 1e-9),
        )
        history.epochs.append(row)
        history.count_time()
        history.next_epoch()
        if self.world.is_writer:
            self.folder.append_metrics(row)
        if self._writer is not None:
            for name, value in row:
                if isinstance(value, int | float) and not isinstance(value, bool) and name not in ("epoch", "step"):
                    self._writer.add_scalar(name, float(value), row.step)
            self._writer.flush()
        self.listener.on_epoch(row, _totals(self.dense_cost))

    def _warn_of_loss(self, top1: float) -> None:
        """Warn once if the network has lost more than half of the accuracy that it came with."""
        before = self.history.given[0]
        if before is not None and top1 < before / 2 and not self._warned_of_loss:
            self._warned_of_loss = True
            logger.warning(
                "softprune: after epoch %d the accuracy is %.1f%%; the given weights had %.1f%%. If it does not come "
                "back: lower optimizer.lr, train more epochs, or relax the target",
                self.history.epoch + 1,
                top1,
                before,
            )

    def _kept(self) -> Totals:
        """Return what a cut at this moment would leave.

        While a method has not decided, that is the whole network, whose accuracy is measured too.
        """
        pruner = self.stage.pruner
        if self.history.pruned is not None:
            return self.history.pruned.kept
        if pruner is None or not pruner.decided:
            return _totals(self.dense_cost)
        masks = pruner.masks()
        # Late in training masks hardly change, and planning the cut of a deep network is slow.
        if self._last_kept is not None and all(masks[name].equal(mask) for name, mask in self._last_kept[0].items()):
            return self._last_kept[1]
        plan = pruner.plan()
        norms = [module for module in self.stage.network.modules() if isinstance(module, _BatchNorm)]
        dropped = sum(int((~mask).sum()) for mask in masks.values())
        kept = Totals(channels=sum(norm.num_features for norm in norms) - dropped, params=plan.params, macs=plan.macs)
        self._last_kept = (masks, kept)
        return kept

    # --- cuts ------------------------------------------------------------------------------------------------------

    def _cut_if_due(self) -> None:
        if self.stage.pruner is None:
            return
        if self.history.epoch == self.config.train.compact_at > 0 and not self.history.cuts:
            self.listener.on_phase(f"cutting the network before epoch {self.history.epoch + 1}")
            # What folds into a bias depends on the running statistics.
            broadcast_from_rank0_(*self.stage.network.buffers())
            network = self._cut(self.stage.pruner)
            # The smaller network continues with the momentum and the noise of the larger.
            remap_optimizer(self.stage.optimizer, self.stage.network, network)
            self._next_stage(network, cut=True, before=self.stage)
        elif self.in_finetuning:
            network = self.finish_pruning()
            self.listener.on_phase("fine-tuning the compact network")
            self._next_stage(network, finetune=True)

    def _next_stage(self, network: nn.Module, **options: Any) -> None:
        self._last_kept = None
        self.stage = Stage(self.config, network.train(), self.data, self.world, teacher=self.teacher, **options)

    def _cut(self, pruner: Pruner) -> nn.Module:
        """Return the compact network, and record what was cut."""
        history, masks = self.history, pruner.decide()
        compact = pruner.compact()
        plan = plans_of(compact)[-1]
        if pruner.status is not None:  # a pruner that continues after a cut does not know
            history.finalised_step = pruner.status.finalised_step
        for number, site in enumerate(history.sites):
            alive, found = history.alive[site.name], masks.get(site.name)
            keep = [True] * len(alive) if found is None else found.tolist()
            dense = [False] * site.width
            for index, kept in zip(alive, keep, strict=True):
                dense[index] = kept
            history.sites[number] = site.model_copy(update={"kept": sum(keep), "keep": tuple(dense)})
            if site.name in plan.modules:
                cut = plan.modules[site.name]
                history.alive[site.name] = [] if cut.constant else [alive[index] for index in cut.outputs]
        history.cuts.append(plan.to_json())
        return compact

    def finish_pruning(self) -> nn.Module:
        """Record what was pruned, and return the compact network, cut from the network that was evaluated."""
        pruner = self.stage.pruner
        assert pruner is not None
        with evaluating(self.stage.network):
            pruner.decide()
            tested = self.evaluator(self.stage.network, on_test=True)
            kept = self._kept()
            compact = self._cut(pruner)
        self.history.pruned = Pruned(kept=kept, top1=tested.top1, top5=tested.top5, round_to=pruner.round_to)
        return compact

    # --- checkpoints and errors ------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint. All processes must call it together; rank 0 writes."""
        stage, network = self.stage.state_dict(), self.stage.network
        self._check_weights()
        self.history.count_time()
        self._saved_at = time.monotonic()
        if not self.world.is_writer:
            return
        weights = network.state_dict()
        state = {
            "config": config_to_dict(self.config),
            "data": describe_images(self.data),
            "history": self.history.model_dump(),
            "model": weights,
            # Of `persistent=False`.
            "unsaved_buffers": {name: value for name, value in network.named_buffers() if name not in weights},
            "stage": stage,
            "teacher": None if self.teacher is None else self.teacher.checksum,
            "random": random_state(self.world.device),
        }
        save_checkpoint(self.folder.checkpoints, self._steps_done, state)

    def _check_weights(self) -> None:
        """Raise if weights are not finite in any process: no training can continue from them."""
        bad = non_finite(self.stage.network)
        if self.world.max(len(bad)) == 0:
            return
        steps, step = self.stage.step.steps, self._steps_done - 1
        raise SoftpruneError(
            "The weights and BatchNorm's statistics must be finite. Got infinity or NaN in "
            f"{first_few(bad) or 'another process'} after step {step} (epoch {step // steps}, batch {step % steps}). "
            f"Lower the learning rate or the strength. {self._restart_hint()}"
        )

    def _restart_hint(self) -> str:
        """Return what to do after training diverged. A run keeps its settings, so that other ones are another run."""
        rate = "finetune.lr" if self.in_finetuning else "optimizer.lr"
        return f"Start a new run with `{self.folder.again_command} --set {rate}=...`."

    @contextmanager
    def _failures_explained(self) -> Iterator[None]:
        """Add to what stops the loop how the run is resumed, or started again."""
        try:
            yield
        except NonFiniteLoss as error:
            raise SoftpruneError(f"{error} {self._restart_hint()}") from error
        except DataError as error:
            raise DataError(f"{error} {self._save_after_error()}") from error
        except RuntimeError as error:
            if "deterministic" not in str(error):
                raise
            raise ConfigError(
                "train.deterministic needs operators that PyTorch can run deterministically here. Got: "
                f"{str(error).partition('. ')[0]}. Set train.deterministic = false, or use --device cpu."
            ) from error
        finally:
            if self._writer is not None:
                self._writer.close()

    def _save_after_error(self) -> str:
        """Save the last finished step when an image cannot be read. Return how to resume."""
        how = f"Repair the images; `{self.folder.resume_command}` then resumes the run."
        if self.world.size > 1:
            # All processes must save together, and the others are in the middle of a step.
            return f"Several processes cannot save at such a moment. {how}"
        try:
            self.save()
        except Exception as error:  # whatever it is, it must not hide the first error
            return f"The steps since the last checkpoint could not be saved: {type(error).__name__}: {error}. {how}"
        return f"Every finished step is saved. {how}"

    # --- the end ---------------------------------------------------------------------------------------------------

    def finish(self) -> Result:
        """Cut the trained network, measure dense, masked and compact, write everything, and return the result.

        All processes take part in the measurements; rank 0 writes.
        """
        self.listener.on_phase("measuring accuracy, cost and latency")
        history, stage = self.history, self.stage
        if stage.pruner is None and history.pruned is None:
            tested = self.evaluator(stage.network, on_test=True)
            table = [self._row("dense", stage.network, (tested.top1, tested.top5), self.dense_cost)]
            return self._write_result(table, stage.network, self.dense_cost)
        accuracy = history.given
        baseline = RunFolder(self.folder.dense)
        if baseline.result.is_file():
            row = baseline.read_result().table[0]
            accuracy = (row.top1, row.top5)
        dense = self.dense.to(self.world.device)
        table = [self._row("dense", dense, accuracy, self.dense_cost)]
        masked = stage.network if stage.pruner is not None else None
        compact = self.finish_pruning() if stage.pruner is not None else stage.network
        assert history.pruned is not None
        # The masks are not saved, so that the file is as large as the dense network's.
        masked_row = self._row("masked", masked, (history.pruned.top1, history.pruned.top5), self.dense_cost)
        table.append(masked_row.model_copy(update={"file_bytes": table[0].file_bytes}))
        tested = self.evaluator(compact, on_test=True)
        counted = cost(compact, self.data.example(1, self.world.device))
        table.append(self._row("compact", compact, (tested.top1, tested.top5), counted))
        if self.world.is_writer:
            save(compact, self.folder.compact, origin=origin_of(self.config, self.data))
            for path in sorted(set(self.folder.path.glob("compact.*")) - {self.folder.compact}):
                logger.warning("softprune: %s is an export of an earlier cut; export it again", path)
        return self._write_result(table, compact, counted)

    def _row(
        self,
        name: Literal["dense", "masked", "compact"],
        network: nn.Module | None,
        accuracy: tuple[float | None, float | None],
        counted: Cost,
    ) -> Variant:
        batch = self.data.example(_LATENCY_BATCH, self.world.device)
        tensors = [] if network is None else network.state_dict().values()
        return Variant(
            name=name,
            top1=accuracy[0],
            top5=accuracy[1],
            params=counted.params,
            macs=counted.macs,
            file_bytes=sum(tensor.nbytes for tensor in tensors),
            latency_ms=None if network is None else latency_ms(network, batch),
        )

    def _write_result(self, table: list[Variant], final: nn.Module, counted: Cost) -> Result:
        history, config, rows = self.history, self.config, self.history.epochs
        sessions = self.folder.read_sessions() or [self.session]
        best = best_epoch(rows)
        assert best is not None, "the last epoch is always tested"
        images = sum(row.seconds * row.images_per_second for row in rows)
        result = Result(
            name=config.name,
            command=sessions[0].command,
            model=config.model.name,
            data=config.data.name,
            method=config.method.name,
            seed=config.seed,
            started=history.started,
            finished=datetime.now(UTC).isoformat(timespec="seconds"),
            wall_seconds=history.seconds,
            images_per_second=images / max(sum(row.seconds for row in rows), 1e-9),
            dense=_totals(self.dense_cost),
            compact=_totals(counted),
            best=Moment.of(best),
            last=Moment.of(next(row for row in reversed(rows) if row.test_top1 is not None)),
            table=tuple(table),
            latency_batch=_LATENCY_BATCH,
            round_to=None if history.pruned is None else history.pruned.round_to,
            finalised_step=history.finalised_step,
            inputs=inputs_of(self.data, config),
            sites=tuple(history.sites),
            modules=_modules(self.dense, self.dense_cost, final, counted),
            config=config,
            environment=self.session.environment,
            sessions=tuple(sessions),
            epochs=tuple(rows),
        )
        if self.world.is_writer:
            self.folder.write_result(result)
        return result


def _totals(counted: Cost) -> Totals:
    keys = ("channels", "params", "macs", "activations")
    return Totals(**{key: getattr(counted, key) for key in keys})


def _modules(dense: nn.Module, before: Cost, final: nn.Module, after: Cost) -> tuple[Module, ...]:
    """Return convolutions and linear layers before and after the cut; a removed one costs nothing after."""
    modules, left = [], dict(final.named_modules())
    for name, part in before.by_module.items():
        if not part.macs:
            continue
        now = after.by_module.get(name)
        modules.append(
            Module(
                name=name,
                kind=part.kind,
                macs_dense=part.macs,
                macs_compact=0 if now is None else now.macs,
                params_dense=part.params,
                params_compact=0 if now is None else now.params,
                out_dense=_width(dense.get_submodule(name)),
                out_compact=_width(left[name]) if now is not None and now.macs else 0,
            )
        )
    return tuple(modules)


def _width(module: nn.Module) -> int | None:
    width = getattr(module, "out_channels", getattr(module, "out_features", None))
    return width if isinstance(width, int) else None
