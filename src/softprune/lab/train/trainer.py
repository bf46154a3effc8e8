"""The training loop: epochs for any method, checkpoints at any step, physical cuts on the way."""

import copy
import time
from dataclasses import dataclass
from typing import Any

from torch import nn

from softprune.cut import plans_of, remap_optimizer
from softprune.distributed import World, broadcast_from_rank0_
from softprune.errors import ConfigError, DataError, ModelError, NonFiniteLoss, SoftpruneError, first_few
from softprune.lab.config.recipes import config_to_dict
from softprune.lab.config.settings import RunConfig
from softprune.lab.data import DataBundle
from softprune.lab.runs.checkpoint import random_state, restoring, save_checkpoint, set_random_state
from softprune.lab.runs.environment import describe_session
from softprune.lab.runs.folder import RunFolder
from softprune.lab.runs.result import Epoch, Pruned
from softprune.lab.runs.resume import (
    PlainAttributes,
    describe_images,
    restart_hint,
    resume_hint,
    unsaved_buffers,
    warn_of_changes,
)
from softprune.lab.train.control import Listener, StopSignal
from softprune.lab.train.evaluate import Evaluator
from softprune.lab.train.history import CostTracker, RunHistory, SiteHistory
from softprune.lab.train.stage import Stage, StartingPoint, recalibrate
from softprune.lab.train.trackers import Trackers
from softprune.log import get_logger
from softprune.methods import Pruner
from softprune.module_state import non_finite

logger = get_logger(__name__)

# Several processes agree on whether to stop or save only from time to time, since each time costs a round trip.
_AGREE_EVERY = 10
_CONTINUE, _SAVE, _STOP = 0, 1, 2


@dataclass(frozen=True)
class RunContext:
    """What a run is trained with, and who listens to it and stops it."""

    config: RunConfig
    folder: RunFolder
    data: DataBundle
    world: World
    listener: Listener
    stop: StopSignal


class Trainer:
    """A run in training. A new Trainer resumes from ``state``, the checkpoint that :meth:`save` wrote.

    ``start`` is from :func:`first_stage` or, with ``state``, from :func:`restored_stage`.
    """

    def __init__(self, context: RunContext, start: StartingPoint, state: dict[str, Any] | None) -> None:
        config, folder, data, world = context.config, context.folder, context.data, context.world
        self.config, self.folder, self.data, self.world = config, folder, data, world
        self.listener, self.stop = context.listener, context.stop
        self.costs = CostTracker(start.dense, data)
        self.evaluator = Evaluator(data, config, world)
        self.stage, self.teacher = start.stage, start.stage.step.teacher
        self._saved_at = time.monotonic()
        if state is None:
            self.history = RunHistory(sites=SiteHistory.of(self.stage.pruner))
            if start.is_trained and self.stage.pruner is not None:
                self.listener.on_phase("testing the trained network")
                tested = self.evaluator(copy.deepcopy(start.dense).to(world.device), on_test=True)
                self.history.given = (tested.top1, tested.top5)
        else:
            with restoring():
                self.history = RunHistory.from_state(state)
        with restoring():
            set_random_state(start.random, world.device)
            at = self.history
            self.session = describe_session(world.device, world.size, epoch=at.epoch, batch=at.batch)
        self._attributes = PlainAttributes(self.stage.network)
        self.trackers: Trackers | None = None
        if world.is_writer:
            if state is not None:
                warn_of_changes(folder.read_sessions()[-1:], self.session)
            folder.add_session(self.session)
            folder.write_history(self.history.epochs)
            if config.records.trackers:
                self.trackers = Trackers(folder.path, config, max((row.step for row in self.history.epochs), default=0))

    @property
    def total_epochs(self) -> int:
        return self.config.train.epochs + self.config.finetune.epochs

    @property
    def in_finetuning(self) -> bool:
        return self.history.epoch >= self.config.train.epochs and self.config.finetune.epochs > 0

    def run(self) -> str | None:
        """Train to the end and return None, or the reason to stop early. Everything is saved either way."""
        every = self.config.records.checkpoint_epochs
        try:
            while self.history.epoch < self.total_epochs:
                self._cut_if_due()
                action = self._run_epoch()
                is_last = self.history.epoch == self.total_epochs
                if action != _CONTINUE or is_last or (every and self.history.epoch % every == 0):
                    self.save()
                if action == _STOP and not is_last:
                    # torchrun ends all processes as soon as one has ended; none may while the file is written.
                    self.world.barrier()
                    return self.stop.reason() or "another process"
            return None
        except DataError as error:
            raise DataError(f"{error} {self._save_after_error()}") from error
        finally:
            if self.trackers is not None:
                self.trackers.close()

    def _run_epoch(self) -> int:
        """Train and record an epoch, and return whether to continue, save or stop; a stop may come within the epoch."""
        step = self.stage.step
        self.listener.on_epoch_start(self.history.epoch, self.total_epochs, step.steps)
        try:
            for position in step.epoch(self.history.epoch, self.history.batch):
                self.history.batch = position + 1
                self._update_strength()
                self.listener.on_step(self.history.batch)
                if self.history.batch == step.steps:
                    break
                action = self._agreed_action()
                if action == _STOP:
                    return action
                if action == _SAVE:
                    self.save()
        except NonFiniteLoss as error:
            raise SoftpruneError(f"{error} {self._restart_hint()}") from error
        except RuntimeError as error:
            if "deterministic" not in str(error):
                raise
            raise ConfigError(
                "train.deterministic needs operators that PyTorch can run deterministically here. Got: "
                f"{str(error).partition('. ')[0]}. Set train.deterministic = false, or use --device cpu."
            ) from error
        self._end_epoch()
        return self._agreed_action()

    def _update_strength(self) -> None:
        if self.stage.pruner is None:
            return
        try:
            self.stage.pruner.update_strength(self._steps_done)
        except ModelError:  # of weights that are not finite: say where it began, and how to start again
            self.stage.step.check()
            self._check_weights()
            raise

    def _agreed_action(self) -> int:
        """Return whether to continue, save or stop, the same in all processes."""
        every = self.config.records.checkpoint_steps
        due = every > 0 and self._steps_done % every == 0
        if self.world.size > 1 and self.history.batch % _AGREE_EVERY:
            return _SAVE if due else _CONTINUE
        due |= 0 < self.config.records.checkpoint_seconds < time.monotonic() - self._saved_at
        own = _STOP if self.stop.reason() is not None else _SAVE if due else _CONTINUE
        return self.world.max(own)

    @property
    def _steps_done(self) -> int:
        return self.history.epoch * self.stage.step.steps + self.history.batch

    def _end_epoch(self) -> None:
        """Evaluate the network, write the epoch's line, and advance to the next epoch."""
        self._check_weights()
        stage, step, history = self.stage, self.stage.step, self.history
        totals = step.totals()
        history.count_time()
        if stage.pruner is not None and not history.epoch_ended:
            # Once per epoch, even if a test image that cannot be read stops the run right afterwards.
            stage.pruner.end_epoch(history.epoch)
        history.epoch_ended = True
        number, tested = history.epoch + 1, dict[str, Any]()
        with stage.eval_weights() as network:
            if stage.pruner is not None and number == self.config.train.epochs:
                # A method that decides once, after training, is evaluated with its decision.
                stage.pruner.decide()
            if number % self.config.records.eval_epochs == 0 or number in (self.config.train.epochs, self.total_epochs):
                found = self.evaluator(network)
                tested = {"test_loss": found.loss, "test_top1": found.top1, "test_top5": found.top5}
            kept = self.costs.kept(stage.pruner, history.sites) if history.pruned is None else history.pruned.kept
            budget = None if stage.pruner is None else stage.pruner.status
        last_step = number * step.steps - 1
        row = Epoch(
            epoch=history.epoch,
            step=last_step + 1,
            phase="finetune" if self.in_finetuning else "train",
            decided=stage.pruner is None or stage.pruner.decided,
            lr=step.schedule(last_step),
            strength=stage.strength(last_step),
            margin=None if budget is None else budget.margin,
            train_loss=totals.loss,
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
            if self.trackers is not None:
                self.trackers.log_epoch(row)
        self.listener.on_epoch(row, self.costs.dense)

    def _cut_if_due(self) -> None:
        if self.stage.pruner is None:
            return
        if self.history.epoch == self.config.train.compact_at > 0 and not self.history.cuts:
            self._cut_and_continue()
        elif self.in_finetuning:
            network = self.finish_pruning()
            self.listener.on_phase("fine-tuning the compact network")
            self.stage = Stage(self.config, network.train(), self.data, self.world, finetune=True, teacher=self.teacher)

    def _cut_and_continue(self) -> None:
        """Cut the network physically, and train the smaller one with the momentum and the noise of the larger."""
        old = self.stage
        assert old.pruner is not None
        self.listener.on_phase(f"cutting the network before epoch {self.history.epoch + 1}")
        broadcast_from_rank0_(*old.network.buffers())  # what folds into a bias depends on the running statistics
        old.pruner.decide()
        self._note_finalised_step(old.pruner)
        self.history.sites.note(old.network)
        network = old.pruner.compact()
        remap_optimizer(old.optimizer, old.network, network)
        plan = plans_of(network)[-1]
        self.history.cuts.append(plan.to_json())
        self.history.sites.cut(plan)
        self.stage = Stage(
            self.config, network.train(), self.data, self.world, cut=True, before=old, teacher=self.teacher
        )

    def finish_pruning(self) -> nn.Module:
        """Record what was pruned, and return the compact network, cut from the network that was evaluated."""
        pruner = self.stage.pruner
        assert pruner is not None
        with self.stage.eval_weights() as network:
            masks = pruner.decide()
            tested = self.evaluator(network, on_test=True)
            self.history.sites.note(network)
            kept = self.costs.kept(pruner, self.history.sites)
            compact = pruner.compact()
        self._note_finalised_step(pruner)
        # Reads images, which may fail: before the cut is recorded.
        if self.config.train.recalibrate:
            recalibrate(compact, self.stage.step.batches, self.config.train.recalibrate)
        self.history.pruned = Pruned(
            kept=kept,
            top1=tested.top1,
            top5=tested.top5,
            round_to=pruner.round_to,
            finalised_step=self.history.finalised_step,
            sites=self.history.sites.records(masks),
        )
        self.history.cuts.append(plans_of(compact)[-1].to_json())
        return compact

    def _note_finalised_step(self, pruner: Pruner) -> None:
        """Remember when a target's cut became final; a pruner that continues after the cut does not know."""
        if pruner.status is not None:
            self.history.finalised_step = pruner.status.finalised_step

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
        return restart_hint(self.folder, finetuning=self.in_finetuning, cut=bool(self.history.cuts))

    def _save_after_error(self) -> str:
        """Save the last finished step when an image cannot be read. Return how to resume."""
        if self.world.size > 1:
            # All processes must save together, and the others are in the middle of a step.
            return f"Several processes cannot save at such a moment. {resume_hint(self.folder)}"
        try:
            self.save()
        except Exception as error:  # whatever it is, it must not hide the first error
            why = error if isinstance(error, SoftpruneError) else f"{type(error).__name__}: {error}."
            return f"The steps since the last checkpoint could not be saved: {why} {resume_hint(self.folder)}"
        return f"Every finished step is saved. {resume_hint(self.folder)}"

    def save(self) -> None:
        """Write a checkpoint. All processes must call it together; rank 0 writes."""
        stage = self.stage.state_dict()
        self._check_weights()
        self.history.count_time()
        self._saved_at = time.monotonic()
        if not self.world.is_writer:
            return
        self._attributes.check(self.stage.network)
        state = {
            "config": config_to_dict(self.config),
            "data": describe_images(self.data),
            **self.history.state_dict(),
            "model": self.stage.network.state_dict(),
            "unsaved_buffers": unsaved_buffers(self.stage.network),
            "stage": stage,
            "teacher": None if self.teacher is None else self.teacher.checksum,
            "random": random_state(self.world.device),
        }
        save_checkpoint(self.folder.checkpoints, self._steps_done, state)
