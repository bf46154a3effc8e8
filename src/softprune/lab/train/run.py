"""A run from its configuration to its result, in the order of execution.

`start` validates the configuration, `_run` trains the dense baseline and then the run. A `Trainer` creates pruner and
optimizer (`_set_up`), loops over epochs and batches (`train`), and evaluates, cuts, saves checkpoints and writes the
result. `step.py` runs one step. The commands on the folder of a run are at the end of this file.
"""

import copy
import itertools
import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from softprune.costs import Cost, cost
from softprune.cut import Origin, PrunePlan, apply_plan, load, plans_of, remap_optimizer, save
from softprune.devices import broadcast_from_rank0_
from softprune.errors import CheckpointError, ConfigError, SoftpruneError, first_few
from softprune.lab.config.recipes import changed_settings, config_to_dict, show_changes
from softprune.lab.config.settings import BASELINE, START, DistillConfig, MethodConfig, RunConfig, known_settings
from softprune.lab.data import DataBundle, EpochSampler, open_data
from softprune.lab.runs import checkpoint
from softprune.lab.runs.environment import command_line, describe_environment
from softprune.lab.runs.folder import RunFolder, check_folder_name
from softprune.lab.runs.networks import build_network, check_outputs, named_config, starting_network
from softprune.lab.runs.result import (
    Environment,
    Epoch,
    Module,
    Moment,
    Pruned,
    Result,
    SiteRecord,
    Totals,
    Variant,
    best_epoch,
    totals_of,
)
from softprune.lab.train.control import Listener, StopSignal, begin_phase, log_kept, open_log, run_log
from softprune.lab.train.evaluate import EvalTotals, Evaluator, latency_ms
from softprune.lab.train.method import check_method, load_teacher, make_pruner
from softprune.lab.train.step import (
    Teacher,
    TrainStep,
    learning_rate,
    load_optimizer_state,
    make_optimizer,
    optimizer_state,
    placed,
    set_arithmetic,
)
from softprune.lab.world import World, join_world
from softprune.log import get_logger
from softprune.methods import Pruner
from softprune.methods.pruner import undecayed_biases
from softprune.module_state import evaluating, non_finite

logger = get_logger(__name__)

# Batches between two all-reduces in which the processes agree to save or stop, since each costs a round trip.
_AGREE_EVERY = 10
_CONTINUE, _SAVE, _STOP = 0, 1, 2
_LATENCY_BATCH = 64
_FEW_STEPS = 300
"""Fewer training steps than this cost accuracy when there is a target."""


class Outcome(NamedTuple):
    """The outcome of a run: finished or stopped."""

    folder: RunFolder
    """The folder of the run."""
    result: Result | None = None
    """The content of result.json; None if the run is not finished."""
    stopped: str | None = None
    """The reason for stopping early; None if the run is finished."""


# --- from the configuration to the loop ------------------------------------------------------------------------------


def start(
    config: RunConfig,
    out: Path | str | None = None,
    *,
    device: str = "auto",
    time_limit: float | None = None,
    listener: Listener | None = None,
) -> Outcome:
    """Train a new run in the folder ``out``, or in the first free one of runs/NAME, runs/NAME-2, ..."""
    config = absolute_paths(config)
    with join_world(device) as world, log_kept() as log:
        folder = RunFolder(world.broadcast(str(out or _free_folder(config))))
        trainer = _prepare(config, folder, world)
        if world.is_writer:
            RunFolder.create(folder.path, config)
        return _run(config, folder, world, log, listener or Listener(), time_limit, trainer)


def check(config: RunConfig, out: Path | str | None = None, *, device: str = "auto") -> "Trainer":
    """Return the trainer of a new run without training; raise the errors that :func:`start` would raise before it."""
    folder = RunFolder(out or _free_folder(config))
    folder.check_new()
    with join_world(device) as world:
        return _prepare(absolute_paths(config), folder, world)


def resume(
    run: Path | str,
    *,
    device: str = "auto",
    time_limit: float | None = None,
    data_dir: str | None = None,
    listener: Listener | None = None,
) -> Outcome:
    """Resume the run in the folder ``run``. A finished run is left unchanged."""
    folder = RunFolder.open(run)
    config = folder.read_config()
    if data_dir is not None:
        config = config.replace(data=config.data.replace(dir=_absolute(data_dir)))
    with join_world(device) as world, log_kept() as log:
        return _run(config, folder, world, log, listener or Listener(), time_limit)


def _prepare(config: RunConfig, folder: RunFolder, world: World) -> "Trainer":
    """Build the trainer and raise all configuration errors before a folder is created."""
    check_method(config)
    trainer = Trainer(config, folder, open_data(config.data, config.seed, world.device), world)
    if config.distill.teacher not in ("", BASELINE):
        trainer.load_teacher()
    steps = trainer.step.steps
    if config.method.target and 0 < config.train.epochs * steps < _FEW_STEPS:
        logger.warning(
            "softprune: %d training steps are too few to meet a target accurately; train at least %d epochs",
            *(config.train.epochs * steps, math.ceil(_FEW_STEPS / steps)),
        )
    return trainer


def _run(
    config: RunConfig,
    folder: RunFolder,
    world: World,
    log: MemoryHandler,
    listener: Listener,
    time_limit: float | None,
    trainer: "Trainer | None" = None,
) -> Outcome:
    """Train the dense baseline, if the run has one, and then the run. Resume each from its checkpoint, if any."""
    if world.broadcast(folder.result.is_file()):
        result = folder.read_result()
        logger.info("%s is finished; nothing to do", folder.path)
        return Outcome(folder=folder, result=result)
    with folder.lock() if world.is_writer else nullcontext(), StopSignal(time_limit) as stop:
        if world.is_writer:
            open_log(log, folder.log)
        data = open_data(config.data, config.seed, world.device) if trainer is None else trainer.data
        if config.train.dense_baseline:
            baseline, dense = RunFolder(folder.dense), dense_config(config)
            if world.broadcast(baseline.result.is_file()):
                check_same_config(dense, baseline.read_result().config, baseline.result)
            else:
                begin_phase("training the dense baseline", listener)
                if world.is_writer and not baseline.config.exists():
                    RunFolder.create(baseline.path, dense)
                with baseline.lock() if world.is_writer else nullcontext():
                    outcome = _resumed(dense, baseline, data, world).train(listener, stop)
                if outcome.stopped:
                    return outcome._replace(folder=folder)
            begin_phase(f"training and pruning ({config.method.name})", listener)
        return _resumed(config, folder, data, world, trainer).train(listener, stop)


def _resumed(
    config: RunConfig, folder: RunFolder, data: DataBundle, world: World, trainer: "Trainer | None" = None
) -> "Trainer":
    """Return the run at its newest checkpoint, as found by rank 0; without one, return ``trainer`` or a new trainer."""
    name, state = None, dict[str, Any]()
    if world.is_writer and checkpoint.checkpoints_in(folder.checkpoints):
        path, state = checkpoint.read_newest(folder.checkpoints)
        name = path.name
    name = world.broadcast(name)
    if name is None:
        if trainer is None or config.model.weights == BASELINE:  # the baseline was trained after `trainer` was built
            trainer = Trainer(config, folder, data, world)
        return trainer
    path = folder.checkpoints / name
    if not world.is_writer:
        state = checkpoint.read_checkpoint(path)
    check_same_config(config, RunConfig(**known_settings(state["config"])), path)
    _check_same_images(data, state["data"])
    logger.info("resuming from %s", path)
    return Trainer(config, folder, data, world, state)


# --- the loop --------------------------------------------------------------------------------------------------------


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class History(BaseModel):
    """Progress and records of a run, saved in its checkpoints."""

    model_config = ConfigDict(strict=True)

    epoch: int = 0
    """Number of finished epochs of training and fine-tuning."""
    batch: int = 0
    """Number of finished batches of the current epoch."""
    epochs: list[Epoch] = Field(default_factory=list)
    cuts: list[str] = Field(default_factory=list)
    """The plans applied to the network so far, as JSON."""
    sites: list[SiteRecord] = Field(default_factory=list)
    """The sites of the dense network, with the channels kept by the last cut."""
    pruned: Pruned | None = None
    finalised_step: int | None = None
    """With a target: the step at which the removed channels became final."""
    given: tuple[float | None, float | None] = (None, None)
    """Top-1 and top-5 accuracy of the trained weights that the run started from; None for random weights."""
    seconds: float = 0.0
    epoch_seconds: float = 0.0
    started: str = Field(default_factory=_now)
    command: str = Field(default_factory=command_line)
    environment: Environment | None = None


class Trainer:
    """Trains a run, from the start or from ``state``, a checkpoint written by :meth:`save`.

    Writes nothing to the run's folder before :meth:`train`.
    """

    def __init__(
        self, config: RunConfig, folder: RunFolder, data: DataBundle, world: World, state: dict[str, Any] | None = None
    ) -> None:
        self.config, self.folder, self.data, self.world = config, folder, data, world
        set_arithmetic(config.train, world.device)
        self.evaluate = Evaluator(data, config, world)
        self.origin = Origin(config.model.name, config.data.name, data.input_shape)
        self.total_epochs = config.train.epochs + config.finetune.epochs
        self.pruner: Pruner | None = None
        self.teacher: Teacher | None = None
        self._last_kept: tuple[dict[str, Tensor], Totals] | None = None
        self._is_trained = self._warned_of_loss = False
        if state is None:
            self._begin()
        else:
            self._restore(state)
        self.dense_cost = cost(self.dense, data.example(1))

    def _begin(self) -> None:
        """Build network and pruner of a new run. Errors in either are raised here."""
        model = self.config.model
        if model.weights == BASELINE and RunFolder(self.folder.dense).result.is_file():
            model = model.replace(weights=str(self.folder.dense), pretrained=False)
        network, self._is_trained = starting_network(model, self.data.num_classes, self.config.seed)
        self.dense, self.history = copy.deepcopy(network), History()
        remedy = "choose another model.name, data.name or image_size"
        check_outputs(self.dense, self.data, f"The network {model.name}", remedy)
        self._set_up(network)
        self.random = checkpoint.random_state(self.world.device)
        for site in () if self.pruner is None else self.pruner.sites:
            record = SiteRecord(name=site.name, activation=site.activation, width=site.width, kept=site.width)
            self.history.sites.append(record)

    def _restore(self, state: dict[str, Any]) -> None:
        """Restore a checkpoint: build the dense network, apply its cuts, and load weights and training state."""
        model, stage = self.config.model, state["stage"]
        self.dense = build_network(model.name, self.data.num_classes, model.options)
        self.history, self.random = History.model_validate(state["history"]), state["random"]
        network = copy.deepcopy(self.dense)
        try:
            for plan in self.history.cuts:
                network = apply_plan(PrunePlan.from_json(plan), network)
            network.load_state_dict(state["model"])
            buffers = dict(network.named_buffers())
            for name, value in state["unsaved_buffers"].items():
                buffers[name].copy_(value)
        except (KeyError, RuntimeError) as error:
            raise CheckpointError(
                f"A run must be resumed with the network that it started with. Got another {model.name}: {error}. "
                "Restore its definition, or start a new run."
            ) from error
        # There is no pruner for a dense run, and none while a compact network is fine-tuned.
        prunes = stage["pruner"] is not None or self.config.method.name == "dense"
        self._set_up(network, prunes=prunes, saved=stage["pruner"], momentum=stage["optimizer"])
        if self.world.is_writer:
            self.step.load_state_dict(stage["step"])

    def _set_up(
        self,
        network: nn.Module,
        *,
        prunes: bool = True,
        saved: dict[str, Any] | None = None,
        momentum: dict[str, dict[str, Tensor]] | None = None,
    ) -> None:
        """Create pruner, optimizer and step for a network, at the start and after each cut.

        Args:
            prunes: False for fine-tuning the compact network, which has no pruner.
            saved: State of the pruner to resume. Without it, the new pruner continues the noise of the previous one.
            momentum: State of the optimizer to continue with.
        """
        config, world, data = self.config, self.world, self.data
        network = placed(network, world.device)
        example = data.example(device=world.device)
        sampler = EpochSampler(len(data.train), config.data.batch_size, config.seed, world.rank, world.size)
        earlier, self.pruner = self.pruner, None
        groups = undecayed_biases(network, config.optimizer.weight_decay)
        if prunes and config.method.name != "dense":
            method = config.method
            if self.history.cuts and method.target:  # the cut network already meets the target
                method = method.replace(target={}, strength=0.0)
            steps = config.train.epochs * sampler.steps
            self.pruner = make_pruner(config.replace(method=method), network, example, steps, saved, earlier)
            groups = self.pruner.parameter_groups(weight_decay=config.optimizer.weight_decay)
        self.optimizer = make_optimizer(config.optimizer, groups)
        if momentum is not None:
            load_optimizer_state(self.optimizer, network, momentum)
        if self.pruner is not None:
            self.pruner.attach(self.optimizer)
        self.network, self._last_kept = network, None
        self.step = TrainStep(
            world.wrap(network),
            self.optimizer,
            data.batches(sampler, world.device, config.data.workers),
            schedule=learning_rate(config, sampler.steps, finetune=not prunes),
            train=config.train,
            pruner=self.pruner,
            teacher=self.teacher,
            world=world,
        )

    def load_teacher(self) -> None:
        """Load the teacher named in the configuration and add it to the training step."""
        name = self.config.distill.teacher
        path = self.folder.dense if name == BASELINE else Path(name).expanduser()
        self.teacher = self.step.teacher = load_teacher(path, self.config, self.data, self.world.device)

    @property
    def in_finetuning(self) -> bool:
        return self.history.epoch >= self.config.train.epochs and self.config.finetune.epochs > 0

    @property
    def _steps_done(self) -> int:
        return self.history.epoch * self.step.steps + self.history.batch

    def train(self, listener: Listener, stop: StopSignal) -> Outcome:
        """Train to the end, or until ``stop`` requests a stop. Everything is saved in both cases."""
        self.listener, self.stop = listener, stop
        self._saved_at = self._counted_at = time.monotonic()
        history, world, every = self.history, self.world, self.config.records.checkpoint_epochs
        if self.config.distill.teacher and self.teacher is None:
            self.load_teacher()
        checkpoint.set_random_state(self.random, world.device)
        history.environment = history.environment or describe_environment(world.device, world.size)
        if world.is_writer:
            self.folder.write_metrics(history.epochs)
        if self._is_trained and self.pruner is not None:
            begin_phase("testing the trained network", listener)
            history.given = self._test(placed(copy.deepcopy(self.dense), world.device))
        while history.epoch < self.total_epochs:
            self._cut_if_due()
            step, pruner = self.step, self.pruner
            listener.on_epoch_start(history.epoch, self.total_epochs, step.steps)
            for position in step.epoch(history.epoch, history.batch):
                history.batch = position + 1
                if pruner is not None:
                    pruner.update_strength(self._steps_done)
                listener.on_step(history.batch)
                if history.batch < step.steps and self._saves_or_stops():
                    return self._ended()
            self._end_epoch()
            is_last = history.epoch == self.total_epochs
            if self._saves_or_stops(is_last or (every > 0 and history.epoch % every == 0)) and not is_last:
                return self._ended()
        return self._ended(self._finish())

    def _saves_or_stops(self, saves: bool = False) -> bool:
        """Save a checkpoint if one is due or the run must stop. Return whether to stop, the same in all processes."""
        if self.world.size > 1 and self.history.batch % _AGREE_EVERY:
            return False
        saves = saves or 0 < self.config.records.checkpoint_seconds < time.monotonic() - self._saved_at
        own = _STOP if self.stop.reason() is not None else _SAVE if saves else _CONTINUE
        action = self.world.max(own)
        if action != _CONTINUE:
            self.save()
        return action == _STOP

    def _ended(self, result: Result | None = None) -> Outcome:
        # torchrun ends all processes as soon as one has exited, so wait until rank 0 has written its files.
        self.world.barrier()
        stopped = None if result is not None else self.stop.reason() or "another process"
        return Outcome(folder=self.folder, result=result, stopped=stopped)

    def _end_epoch(self) -> None:
        """Evaluate the network, write the epoch's line of metrics.jsonl, and advance to the next epoch."""
        self._check_weights()
        pruner, step, history = self.pruner, self.step, self.history
        images, loss, penalty, top1 = step.totals()
        self._count_time()
        if pruner is not None:
            pruner.end_epoch(history.epoch)
        number, tested = history.epoch + 1, dict[str, Any]()
        with evaluating(self.network):
            if pruner is not None and number == self.config.train.epochs:
                # A method that decides once, after training, is evaluated with the masks of its decision.
                pruner.decide()
            if number % self.config.records.eval_epochs == 0 or number in (self.config.train.epochs, self.total_epochs):
                found = self.evaluate(self.network)
                tested = {"test_loss": found.loss, "test_top1": found.top1, "test_top5": found.top5}
                self._warn_of_loss(found.top1)
            kept = self._kept()
            budget = None if pruner is None else pruner.status
        last_step = number * step.steps - 1
        penalised = pruner is not None and pruner.penalised and float(pruner.strength) > 0
        row = Epoch(
            epoch=history.epoch,
            step=last_step + 1,
            phase="finetune" if self.in_finetuning else "train",
            decided=pruner is None or pruner.decided,
            lr=step.schedule(last_step),
            strength=float(pruner.strength) if pruner is not None and penalised else None,
            margin=None if budget is None else budget.margin,
            train_loss=loss,
            penalty=penalty if penalised else None,
            train_top1=top1,
            **tested,
            **dict(kept),
            seconds=history.epoch_seconds,
            images_per_second=images / max(history.epoch_seconds, 1e-9),
        )
        history.epochs.append(row)
        self._count_time()
        history.epoch, history.batch, history.epoch_seconds = number, 0, 0.0
        if self.world.is_writer:
            self.folder.write_metrics(history.epochs)
        numbers = (("loss", row.train_loss), ("top-1", row.test_top1), ("MACs", row.macs))
        facts = [f"{title} {value:,.7g}" for title, value in numbers if value is not None]
        run_log.info("epoch %d, lr %.4g, %s, %.1f s", row.number, row.lr, ", ".join(facts), row.seconds)
        self.listener.on_epoch(row, totals_of(self.dense_cost))

    def _count_time(self) -> None:
        now = time.monotonic()
        self.history.seconds += now - self._counted_at
        self.history.epoch_seconds += now - self._counted_at
        self._counted_at = now

    def _warn_of_loss(self, top1: float) -> None:
        """Warn once if the network has lost more than half of the accuracy of its initial weights."""
        before = self.history.given[0]
        if before is not None and top1 < before / 2 and not self._warned_of_loss:
            self._warned_of_loss, numbers = True, (self.history.epoch + 1, top1, before)
            logger.warning(
                "softprune: after epoch %d the accuracy is %.1f%%; the initial weights had %.1f%%. If it does not "
                "recover, lower optimizer.lr, train more epochs, or relax the target",
                *numbers,
            )

    def _kept(self) -> Totals:
        """Return the cost of the network that a cut would leave now.

        Before a method has decided, this is the whole network, since its accuracy is measured without masks too.
        """
        pruner = self.pruner
        if self.history.pruned is not None:
            return self.history.pruned.kept
        if pruner is None or not pruner.decided:
            return totals_of(self.dense_cost)
        masks = pruner.masks()
        # Masks rarely change late in training, and planning the cut of a deep network is slow.
        if self._last_kept is not None and all(masks[name].equal(mask) for name, mask in self._last_kept[0].items()):
            return self._last_kept[1]
        plan = pruner.plan()
        norms = [module for module in self.network.modules() if isinstance(module, _BatchNorm)]
        dropped = sum(int((~mask).sum()) for mask in masks.values())
        kept = Totals(channels=sum(norm.num_features for norm in norms) - dropped, params=plan.params, macs=plan.macs)
        self._last_kept = (masks, kept)
        return kept

    # --- cuts ------------------------------------------------------------------------------------------------------

    def _cut_if_due(self) -> None:
        if self.pruner is None:
            return
        if self.history.epoch == self.config.train.compact_at > 0 and not self.history.cuts:
            begin_phase(f"cutting the network before epoch {self.history.epoch + 1}", self.listener)
            # The constants that the cut folds into biases depend on the running statistics.
            broadcast_from_rank0_(*self.network.buffers())
            network = self._cut(self.pruner)
            # The compact network continues with the momentum and the noise of the uncut one.
            remap_optimizer(self.optimizer, self.network, network)
            self._set_up(network.train(), momentum=optimizer_state(self.optimizer, network))
        elif self.in_finetuning:
            network = self._finish_pruning(self.pruner)
            begin_phase("fine-tuning the compact network", self.listener)
            self._set_up(network.train(), prunes=False)

    def _cut(self, pruner: Pruner) -> nn.Module:
        """Return the compact network and record the cut in the history."""
        history, masks = self.history, pruner.decide()
        compact = pruner.compact()
        if pruner.status is not None:  # None for a pruner that continues after a cut
            history.finalised_step = pruner.status.finalised_step
        for number, site in enumerate(history.sites):
            if site.name in masks:  # an earlier cut may have removed it
                history.sites[number] = site.model_copy(update={"kept": int(masks[site.name].sum())})
        history.cuts.append(plans_of(compact)[-1].to_json())
        return compact

    def _finish_pruning(self, pruner: Pruner) -> nn.Module:
        """Evaluate the masked network, record the result, and return the compact network cut from it."""
        with evaluating(self.network):
            pruner.decide()
            (top1, top5), kept = self._test(self.network), self._kept()
            compact = self._cut(pruner)
        self.history.pruned = Pruned(kept=kept, top1=top1, top5=top5, round_to=pruner.round_to)
        return compact

    def _test(self, network: nn.Module) -> tuple[float, float | None]:
        """Return top-1 and top-5 accuracy on the test images."""
        found = self.evaluate(network, on_test=True)
        return found.top1, found.top5

    # --- checkpoints and errors ------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint. All processes must call it together; rank 0 writes."""
        self.step.check()
        self._check_weights()
        stage = {
            "pruner": None if self.pruner is None else self.pruner.state_dict(),
            "optimizer": optimizer_state(self.optimizer, self.network),
            "step": self.step.state_dict(),
        }
        self._count_time()
        self._saved_at = time.monotonic()
        if not self.world.is_writer:
            return
        weights, buffers = self.network.state_dict(), self.network.named_buffers()
        state = {
            "config": config_to_dict(self.config),
            "data": _describe_images(self.data),
            "history": self.history.model_dump(),
            "model": weights,
            # Of `persistent=False`.
            "unsaved_buffers": {name: value for name, value in buffers if name not in weights},
            "stage": stage,
            "random": checkpoint.random_state(self.world.device),
        }
        checkpoint.save_checkpoint(self.folder.checkpoints, self._steps_done, state)

    def _check_weights(self) -> None:
        """Raise a SoftpruneError if weights or running statistics are not finite in any process."""
        bad = non_finite(self.network)
        if self.world.max(len(bad)) == 0:
            return
        epoch, batch = divmod(self._steps_done - 1, self.step.steps)
        raise SoftpruneError(
            "The weights and BatchNorm's statistics must be finite. Got infinity or NaN in "
            f"{first_few(bad) or 'another process'} after step {self._steps_done - 1} (epoch {epoch}, batch {batch}). "
            "Start a new run with a lower learning rate or strength."
        )

    # --- the end ---------------------------------------------------------------------------------------------------

    def _finish(self) -> Result:
        """Cut the trained network, measure the dense, masked and compact network, and write and return the result.

        All processes take part in the measurements; rank 0 writes the files.
        """
        begin_phase("measuring accuracy, cost and latency", self.listener)
        history, network, pruner = self.history, self.network, self.pruner
        if pruner is None and history.pruned is None:
            table = [self._row("dense", network, self._test(network), self.dense_cost)]
            return self._write_result(table, self.dense_cost)
        accuracy, baseline = history.given, RunFolder(self.folder.dense)
        if baseline.result.is_file():
            row = baseline.read_result().table[0]
            accuracy = (row.top1, row.top5)
        dense = self._row("dense", placed(self.dense, self.world.device), accuracy, self.dense_cost)
        compact = network if pruner is None else self._finish_pruning(pruner)
        assert history.pruned is not None
        pruned = (history.pruned.top1, history.pruned.top5)
        masked = self._row("masked", None if pruner is None else network, pruned, self.dense_cost)
        # Masks are not saved, so the file would be as large as that of the dense network.
        masked = masked.model_copy(update={"file_bytes": dense.file_bytes})
        counted = cost(compact, self.data.example(1, self.world.device))
        table = [dense, masked, self._row("compact", compact, self._test(compact), counted)]
        if self.world.is_writer:
            save(compact, self.folder.compact, origin=self.origin)
        return self._write_result(table, counted)

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

    def _write_result(self, table: list[Variant], counted: Cost) -> Result:
        history, config, rows = self.history, self.config, self.history.epochs
        best = best_epoch(rows)
        assert best is not None, "the last epoch is always tested"
        assert history.environment is not None
        images = sum(row.seconds * row.images_per_second for row in rows)
        result = Result(
            name=config.name,
            command=history.command,
            model=config.model.name,
            data=config.data.name,
            method=config.method.name,
            seed=config.seed,
            started=history.started,
            finished=_now(),
            wall_seconds=history.seconds,
            images_per_second=images / max(sum(row.seconds for row in rows), 1e-9),
            dense=totals_of(self.dense_cost),
            compact=totals_of(counted),
            best=Moment.of(best),
            last=Moment.of(next(row for row in reversed(rows) if row.test_top1 is not None)),
            table=tuple(table),
            latency_batch=_LATENCY_BATCH,
            round_to=None if history.pruned is None else history.pruned.round_to,
            finalised_step=history.finalised_step,
            sites=tuple(history.sites),
            modules=_modules(self.dense_cost, counted),
            config=config,
            environment=history.environment,
            epochs=tuple(rows),
        )
        if self.world.is_writer:
            self.folder.write_result(result)
        return result


def _modules(before: Cost, after: Cost) -> tuple[Module, ...]:
    """Return the MACs of convolutions and linear layers before and after the cut; 0 after it for removed ones."""
    left = {name: part.macs for name, part in after.by_module.items()}
    return tuple(
        Module(name=name, kind=part.kind, macs_dense=part.macs, macs_compact=left.get(name, 0))
        for name, part in before.by_module.items()
        if part.macs
    )


# --- configurations and images of a run ------------------------------------------------------------------------------


def check_same_config(
    config: RunConfig, saved: RunConfig, path: Path, renamed: Sequence[str] = ("distill.teacher", "method.options.plan")
) -> None:
    """Raise a CheckpointError if ``path``, a file of a run, was written with another configuration.

    Files named in settings may be moved. Those of ``renamed`` may also be renamed, since their content is checked.
    """
    changed = {
        key: (now, before)
        for key, (now, before) in changed_settings(config, saved).items()
        if key not in ("data.dir", "data.workers", *renamed)  # the number of workers has no effect on the result
        and not (isinstance(now, str) and "/" in now and Path(now).name == Path(str(before)).name)
    }
    if changed:
        raise CheckpointError(
            f"{path} must have the configuration of the run that is resumed. Got {show_changes(changed)}. Restore "
            "config.toml or the recipe, or start a new run."
        )


def _check_same_images(data: DataBundle, then: dict[str, Any]) -> None:
    """Raise a CheckpointError if the images differ from those described in the checkpoint."""
    now = _describe_images(data)
    changed = {key: (now[key], then[key]) for key in now if now[key] != then[key]}
    if changed:
        raise CheckpointError(
            f"A run must be resumed with the images that it started with. Got {show_changes(changed)}. Restore the "
            "files, or start a new run."
        )


def _describe_images(data: DataBundle) -> dict[str, Any]:
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
                f'distill.teacher = "{START}" needs trained initial weights. Got model.weights = ""; set it to the '
                "folder of a run or to a file with weights."
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
    """Return the configuration of the run's dense baseline: the same training without pruning."""
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


def _free_folder(config: RunConfig) -> Path:
    """Return the first of runs/NAME, runs/NAME-2, runs/NAME-3, ... that does not exist."""
    name = check_folder_name(config.name or "run")
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(path for path in map(Path("runs").joinpath, names) if not path.exists())


# --- commands on a run ----------------------------------------------------------------------------------------------


def evaluate_run(
    run: Path, *, device: str = "auto", data_dir: str | None = None, **names: str
) -> dict[str, EvalTotals]:
    """Evaluate a run's trained ("masked") and compact network on the test set; ``names`` are for named_config."""
    folder, config, found = *_opened(run, data_dir, names), dict[str, EvalTotals]()
    with join_world(device) as world:
        set_arithmetic(config.train, world.device)
        images = open_data(config.data, config.seed, world.device)
        evaluator = Evaluator(images, config, world)
        if checkpoint.checkpoints_in(folder.checkpoints) or not folder.compact.is_file():
            trainer = Trainer(config, folder, images, world, checkpoint.read_newest(folder.checkpoints)[1])
            found["masked" if trainer.pruner is not None else "trained"] = evaluator(trainer.network, on_test=True)
        if folder.compact.is_file():
            dense = build_network(config.model.name, images.num_classes, config.model.options).to(world.device)
            found["compact"] = evaluator(load(folder.compact, dense).float(), on_test=True)
    return found


def compact_run(
    run: Path,
    out: Path | None = None,
    *,
    device: str = "auto",
    data_dir: str | None = None,
    round_to: int | None = None,
    gathers: bool = True,
    **names: str,
) -> tuple[Path, Cost, Cost]:
    """Cut the network of a run's newest checkpoint and save it; return its path, the dense cost and the compact cost.

    For a finished run the result equals the network that the run wrote, on the same device. `round_to` and `gathers`
    are passed to Pruner.compact, `names` to named_config.
    """
    folder, config = _opened(run, data_dir, names)
    with join_world(device) as world:
        images = open_data(config.data, config.seed, world.device)
        trainer = Trainer(config, folder, images, world, checkpoint.read_newest(folder.checkpoints)[1])
        compact, pruner = trainer.network, trainer.pruner
        if (round_to is not None or not gathers) and (out is None or pruner is None):
            raise ConfigError(
                "--round-to and --no-gathers change the cut of a run, which needs --out and a run that has not started "
                f"fine-tuning. Got {'no --out' if out is None else 'a run in fine-tuning'}."
            )
        with evaluating(trainer.network):
            if pruner is not None:
                compact = pruner.compact(round_to=round_to, gathers=gathers)
            target = save(compact, out or folder.compact, origin=trainer.origin)
        return target, trainer.dense_cost, cost(compact, images.example(1, world.device))


def _opened(run: Path, data_dir: str | None, names: dict[str, str]) -> tuple[RunFolder, RunConfig]:
    """Open a run for evaluation: images in files are decoded on use, not kept in memory."""
    folder = RunFolder.open(run)
    config = named_config(folder, **names)
    return folder, config.replace(data=config.data.replace(dir=data_dir or config.data.dir, in_memory=False))
