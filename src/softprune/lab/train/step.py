"""The training step: batch, augmentation, forward, loss, backward, optimizer and counters, without the host.

Everything that changes from step to step (the batch's indices, the learning rate, the noise) is read from tensors on
the device by counters on the device. Every step therefore makes the same calls, and on CUDA the whole step is captured
once and replayed by a single call.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from softprune.errors import CheckpointError, NonFiniteLoss
from softprune.hardware import capture_graph
from softprune.lab.config.settings import Mode
from softprune.lab.data import BatchSource
from softprune.lab.data.augment import Mixing, mixed
from softprune.lab.train.capture import Snapshot, StepCompiler, in_short, modes_to_try
from softprune.lab.train.optim import Schedule, WeightAverage, match_gradients, share_rate
from softprune.lab.train.teacher import Teacher
from softprune.log import get_logger
from softprune.masks import Chain, Clock, draw_chain
from softprune.methods import Pruner

logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """How a step computes. Only label smoothing changes the result by more than rounding."""

    mode: Mode = "auto"
    """How a step runs; `auto` means `compile+cuda_graph` on CUDA and `eager` elsewhere."""
    bf16: bool = False
    """Compute convolutions and matrix products in bfloat16 (autocast)."""
    channels_last: bool = False
    """Give the network images in channels-last memory order, which its convolution weights have, too."""
    label_smoothing: float = 0.0
    """Share of the label that is spread evenly over all classes."""
    mixing: Mixing = field(default_factory=Mixing)
    """Mixup and CutMix."""
    compile_backend: str = "inductor"
    """The backend of torch.compile."""
    compile_options: tuple[tuple[str, Any], ...] = ()
    """Settings of the backend."""
    fit_convolutions: bool | None = None
    """Rewrite compiled convolutions for tensor cores; None means in bfloat16 on CUDA, where it is faster."""

    def fits(self, device: torch.device) -> bool:
        """Return whether convolutions are rewritten on this device."""
        return self.bf16 and device.type == "cuda" if self.fit_convolutions is None else self.fit_convolutions


@dataclass(frozen=True)
class TrainTotals:
    """Sums over the epoch so far, in all processes."""

    images: int
    loss: float
    """Mean cross-entropy."""
    objective: float
    """Mean of what is minimised, which includes distillation and sparsity loss."""
    top1: float
    """Percentage of the (augmented) images classified correctly at the time."""


class TrainStep:
    """Runs training steps: `for position in step.epoch(number): ...`.

    Create it after the states of optimizer and pruner are loaded and their hooks attached, since capturing a step fixes
    their addresses. The step controls the optimizer's learning rate.

    Args:
        model: The network, possibly wrapped in DistributedDataParallel.
        optimizer: From :func:`softprune.lab.train.optim.make_sgd`, or any whose rate may be a tensor.
        schedule: The learning rate of each step of the run.
        pruner: Adds its sparsity loss; None trains the network without pruning.
        strength: The pruner's strength in each step; None does not change it.
        teacher: Adds a distillation loss; it may be set until the first step.
    """

    mode: Mode | None
    """How steps run; None before the first step."""
    startup_seconds: float
    """Time that compiling and capturing took."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batches: BatchSource,
        *,
        schedule: Schedule,
        pruner: Pruner | None = None,
        strength: Schedule | None = None,
        average: WeightAverage | None = None,
        teacher: Teacher | None = None,
        options: StepOptions | None = None,
    ) -> None:
        self.options = options or StepOptions()
        self.model, self.optimizer, self.batches = model, optimizer, batches
        self.pruner, self.schedule, self.strength, self.average = pruner, schedule, strength, average
        self.teacher = teacher
        self.device = batches.device
        self.steps = batches.sampler.steps
        self.mode = None
        self.startup_seconds = 0.0
        self._distributed = isinstance(model, DistributedDataParallel)
        self._epoch = self._next = 0
        self._run: Callable[[], None] = self._first_run
        self._forward: Callable[[Tensor, Tensor], Tensor] = self._loss_of
        self._chain: Chain = draw_chain
        self._compiler: StepCompiler | None = None

        self._clock = Clock(batches.sampler.seed, self.device)
        self._position = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._rates = torch.zeros(self.steps, device=self.device)
        self._rate = torch.zeros(1, device=self.device)
        share_rate(optimizer, self._rate)
        self._strengths = torch.zeros(self.steps, device=self.device)
        self._mixes = torch.zeros(self.steps, 6, device=self.device)
        self._mix = torch.zeros(1, 6, device=self.device)
        self._totals = torch.zeros(4, dtype=torch.float64, device=self.device)
        self._first_bad = torch.full((), -1, dtype=torch.int64, device=self.device)
        if self.device.type == "cuda":
            # Shapes never change, so the first step may search for the fastest convolutions.
            torch.backends.cudnn.benchmark = not torch.are_deterministic_algorithms_enabled()

    def epoch(self, number: int, start: int = 0, *, check_every: int = 100) -> Iterator[int]:
        """Run the steps of an epoch from `start`, and yield the position of each step once it is launched.

        Every `check_every` steps, and at the end, wait for the device and raise NonFiniteLoss if a loss was not
        finite. Call :meth:`check` before you save anything in between.
        """
        self._begin(number, start)
        for position in range(start, self.steps):
            self.batches.before_step()
            self._run()
            self._next = position + 1
            if self._next % check_every == 0 or self._next == self.steps:
                self.check()
            yield position

    def check(self) -> None:
        """Wait for the launched steps, and raise NonFiniteLoss if a loss was not finite in any process."""
        first = self._first_bad.clone()
        if self._distributed:
            torch.distributed.all_reduce(first, op=torch.distributed.ReduceOp.MAX)
        step = int(first)
        if step >= 0:
            position = step % self.steps
            raise NonFiniteLoss(step, step // self.steps, position, self.batches.indices(position))

    def totals(self) -> TrainTotals:
        """Return the sums of the epoch so far. Waits for the device."""
        sums = self._totals.clone()
        if self._distributed:
            torch.distributed.all_reduce(sums)
        images, loss, objective, correct = sums.tolist()
        count = max(images, 1.0)
        return TrainTotals(int(images), loss / count, objective / count, 100 * correct / count)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in training. Model, optimizer, pruner and average have their own state."""
        return {"epoch": self._epoch, "next": self._next, "totals": self._totals.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`; continue with `epoch(state["epoch"], start=state["next"])`."""
        if set(state) != {"epoch", "next", "totals"}:
            raise CheckpointError(f"A step's state must have epoch, next and totals. Got {sorted(state)}.")
        self._epoch, self._next = state["epoch"], state["next"]
        self._totals.copy_(torch.tensor(state["totals"], dtype=torch.float64))

    def _begin(self, epoch: int, start: int) -> None:
        first = epoch * self.steps
        if (epoch, start) != (self._epoch, self._next):
            self._totals.zero_()
        self._epoch, self._next = epoch, start
        self._clock.step.fill_(first + start)
        self._position.fill_(start)
        steps = range(first, first + self.steps)
        self._rates.copy_(torch.tensor([self.schedule(step) for step in steps]))
        if self.strength is not None:
            self._strengths.copy_(torch.tensor([self.strength(step) for step in steps]))
        if self.options.mixing:
            shape = self.batches.image_shape[-2], self.batches.image_shape[-1]
            self._mixes.copy_(self.options.mixing.draws(self.batches.sampler.seed, steps, shape))
        self.batches.begin(epoch, start)
        self.model.train()

    def _loss_of(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the objective of a micro-batch, and add it to the totals. This function is compiled."""
        options = self.options
        images, labels = self.batches.batch(first, second, self._clock)
        if options.mixing:
            images = mixed(images, self._mix[0])
        if options.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        # A cache of cast weights would outlive the capture, and each weight is used only once.
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=options.bf16, cache_enabled=False):
            logits = self.model(images)
            taught = None if self.teacher is None else self.teacher.outputs(images)
        task = self._task_loss(logits.float(), labels)
        objective = task
        if self.teacher is not None and taught is not None:
            objective = self.teacher.joint_loss(task, logits.float(), taught, labels)
        if self.pruner is not None:
            objective = self.pruner.loss(objective)
        with torch.no_grad():
            count = torch.full_like(task, len(labels), dtype=torch.float64)
            right = (logits.argmax(1) == labels).sum()
            self._totals.add_(torch.stack([count, count * task, count * objective, right.double()]))
            bad = (self._first_bad < 0) & ~torch.isfinite(objective)
            self._first_bad.copy_(torch.where(bad, self._clock.step, self._first_bad))
        return objective

    def _task_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        smoothing = self.options.label_smoothing
        loss = F.cross_entropy(logits, labels, label_smoothing=smoothing)
        if not self.options.mixing:
            return loss
        other = F.cross_entropy(logits, labels.roll(1), label_smoothing=smoothing)
        share = self._mix[0, 5]
        return share * loss + (1 - share) * other

    def _step(self) -> None:
        torch.index_select(self._rates, 0, self._position, out=self._rate)
        if self.options.mixing:
            torch.index_select(self._mixes, 0, self._position, out=self._mix)
        if self.strength is not None and self.pruner is not None:
            torch.index_select(self._strengths, 0, self._position, out=self.pruner.strength.view(1))
        self.optimizer.zero_grad(set_to_none=True)
        micro_batches = self.batches.micro_batches(self._position)
        for number, micro_batch in enumerate(micro_batches, start=1):
            with self._no_sync(number < len(micro_batches)):
                if self.pruner is not None:
                    self.pruner.draw_ahead(self._chain)
                loss = self._forward(*micro_batch)
                (loss if len(micro_batches) == 1 else loss / len(micro_batches)).backward()
        if self.device.type == "cuda":
            match_gradients(self.optimizer)
        self.optimizer.step()
        if self.average is not None:
            self.average.update()
        self._clock.end_step()
        self._position.add_(1)

    def _no_sync(self, more_to_come: bool) -> AbstractContextManager[Any]:
        """Skip the averaging of gradients over processes, except after the last micro-batch."""
        if more_to_come and isinstance(self.model, DistributedDataParallel):
            return self.model.no_sync()
        return nullcontext()

    def _first_run(self) -> None:
        """Find the fastest mode that works, and run the first step."""
        began = time.perf_counter()
        for mode in modes_to_try(self.options.mode, self.device, distributed=self._distributed):
            why_not = self._why_not(mode) or self._try(mode)
            if why_not is None:
                self.mode = mode
                break
            logger.warning("softprune: training steps cannot run as %s: %s", mode, why_not)
        self.startup_seconds = time.perf_counter() - began
        level = logging.DEBUG if self.mode == "eager" else logging.INFO
        logger.log(level, "training steps run as %s, prepared in %.1f s", self.mode, self.startup_seconds)
        self._run()

    def _why_not(self, mode: Mode) -> str | None:
        """Return why a mode cannot be tried, or None."""
        if "cuda_graph" not in mode:
            return None
        if self.device.type != "cuda":
            return f"CUDA graphs need a CUDA device, and this is {self.device}"
        if self._distributed:
            return "gradients are averaged over several processes outside a graph"
        if not getattr(self.pruner, "capturable", True):
            return f"{type(self.pruner).__name__} does work on the host in each step"
        return None

    def _try(self, mode: Mode) -> str | None:
        """Prepare steps to run in ``mode``. If that fails, undo it and return why."""
        self._forward, self._chain, self._run = self._loss_of, draw_chain, self._step
        if mode == "eager":
            return None
        counters = [self._clock.step, self._clock.forward, self._position, self._rate]
        tensors = [*self.model.parameters(), *self.model.buffers(), *counters, self._totals, self._first_bad]
        if self.pruner is not None:
            tensors.append(self.pruner.strength)
        others = [other for other in (self.pruner, self.average) if other is not None]
        snapshot = Snapshot(tensors, self.optimizer, others)
        try:
            if "compile" in mode:
                # What is created at first use must exist before the compiler traces, or it compiles twice.
                self._trial()
                self._compile()
            # Every TrainStep compiles the same function again, which must not count as endless recompilation.
            with torch._dynamo.config.patch(recompile_limit=1024):
                if "cuda_graph" in mode:
                    graph = capture_graph(self._step, self.device, trial=self._trial, undo=snapshot.restore)
                    self._run = graph.replay
                else:
                    self._trial()
                    snapshot.restore()
        except Exception as error:
            logger.debug("%s failed", mode, exc_info=True)
            self._forward, self._chain, self._run = self._loss_of, draw_chain, self._step
            self.optimizer.zero_grad(set_to_none=True)
            snapshot.restore()
            return in_short(error)
        return None

    def _trial(self) -> None:
        """Run a step that stays at the current position, whose batch is ready."""
        self._step()
        self._position.sub_(1)

    def _compile(self) -> None:
        backend = self.options.compile_backend, dict(self.options.compile_options)
        self._compiler = StepCompiler(*backend, self.device, fit_convolutions=self.options.fits(self.device))
        self._forward = self._compiler(self._loss_of)
        self._chain = self._compiler(draw_chain)
