"""The training step: batch, augmentation, forward, loss, backward, optimizer and counters, without the host.

Everything that changes from step to step (the batch's indices, the learning rate, the noise) is read from tensors on
the device by counters on the device. Every step therefore makes the same calls: eager, or compiled, and on CUDA
captured once as a graph that a single call replays.
"""

import copy
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from softprune.devices import capture_graph
from softprune.errors import NonFiniteLoss
from softprune.lab.config.settings import Mode
from softprune.lab.data import BatchSource, Mixing, mixed
from softprune.lab.train.optim import Schedule, match_gradients, share_rate
from softprune.lab.train.teacher import Teacher
from softprune.log import get_logger
from softprune.masks import Chain, Clock, draw_chain
from softprune.methods import Pruner

logger = get_logger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """How a step computes. Only label smoothing and mixing change the result by more than rounding."""

    mode: Mode = "auto"
    """`auto` means `compile` on CUDA and `eager` elsewhere."""
    bf16: bool = False
    """Compute convolutions and matrix products in bfloat16 (autocast)."""
    channels_last: bool = False
    """Give the network images in channels-last memory order, which its convolution weights have, too."""
    label_smoothing: float = 0.0
    """Share of the label that is spread evenly over all classes."""
    mixing: Mixing = field(default_factory=Mixing)
    """Mixup and CutMix."""
    backend: str = "inductor"
    """The backend of torch.compile."""


@dataclass(frozen=True)
class TrainTotals:
    """Sums over the epoch so far, in all processes."""

    images: int
    loss: float
    """Mean cross-entropy."""
    penalty: float
    """Mean of what the pruner adds to the loss."""
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
        teacher: Teacher | None = None,
        options: StepOptions | None = None,
    ) -> None:
        self.options = options or StepOptions()
        self.model, self.optimizer, self.batches = model, optimizer, batches
        self.pruner, self.schedule, self.teacher = pruner, schedule, teacher
        self.device = batches.device
        self.steps = batches.sampler.steps
        self.mode = None
        self.startup_seconds = 0.0
        self._distributed = isinstance(model, DistributedDataParallel)
        self._epoch = self._next = 0
        self._run: Callable[[], None] = self._first_run
        self._forward: Callable[[Tensor, Tensor], Tensor] = self._loss_of
        self._chain: Chain = draw_chain

        self._clock = Clock(batches.sampler.seed, self.device)
        self._position = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._rates = torch.zeros(self.steps, device=self.device)
        self._rate = torch.zeros(1, device=self.device)
        share_rate(optimizer, self._rate)
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
        images, loss, penalty, correct = self._summed().tolist()
        count = max(images, 1.0)
        return TrainTotals(int(images), loss / count, penalty / count, 100 * correct / count)

    def _summed(self) -> Tensor:
        """Return the totals of all processes together."""
        sums = self._totals.clone()
        if self._distributed:
            torch.distributed.all_reduce(sums)
        return sums

    def state_dict(self) -> dict[str, Any]:
        """Return the position in training. Model, optimizer and pruner have their own state."""
        return {"epoch": self._epoch, "next": self._next, "totals": self._summed().tolist()}

    def load_state_dict(self, state: dict[str, Any], *, has_totals: bool = True) -> None:
        """Restore :meth:`state_dict`; continue with `epoch(state["epoch"], start=state["next"])`.

        Of several processes one has the totals.
        """
        self._epoch, self._next = state["epoch"], state["next"]
        if has_totals:
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
        if self.options.mixing:
            shape = self.batches.image_shape[-2], self.batches.image_shape[-1]
            self._mixes.copy_(self.options.mixing.draws(self.batches.sampler.seed, steps, shape))
        self.batches.begin(epoch, start)
        self.model.train()

    def _step(self) -> None:
        """Run one step: every call reads its position, rate and batch from tensors that it advances."""
        torch.index_select(self._rates, 0, self._position, out=self._rate)
        if self.options.mixing:
            torch.index_select(self._mixes, 0, self._position, out=self._mix)
        self.optimizer.zero_grad(set_to_none=True)
        if self.pruner is not None:
            self.pruner.draw_ahead(self._chain)
        batch = self.batches.rows(self._position)
        self._forward(*batch).backward()
        if self.device.type == "cuda":
            match_gradients(self.optimizer)
        self.optimizer.step()
        self._clock.end_step()
        self._position.add_(1)

    def _loss_of(self, first: Tensor, second: Tensor) -> Tensor:
        """Return what is minimised for a batch, and add it to the totals. This function is compiled."""
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
        joint = task
        if self.teacher is not None and taught is not None:
            joint = self.teacher.joint_loss(task, logits.float(), taught, labels)
        objective = joint if self.pruner is None else self.pruner.loss(joint)
        with torch.no_grad():
            count = torch.full_like(task, len(labels), dtype=torch.float64)
            right = (logits.argmax(1) == labels).sum()
            self._totals.add_(torch.stack([count, count * task, count * (objective - joint), right.double()]))
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

    def _first_run(self) -> None:
        """Prepare steps as the mode says, and run the first one. Where compiling fails, steps run eagerly."""
        began = time.perf_counter()
        self.mode, self._run = self.options.mode, self._step
        if self.mode == "auto":
            self.mode = "compile" if self.device.type == "cuda" else "eager"
        if self.mode == "compile" and (why_not := self._try_compiled()):
            logger.warning("softprune: training steps cannot be compiled, and run eagerly: %s", why_not)
            self.mode = "eager"
        self.startup_seconds = time.perf_counter() - began
        level = logging.DEBUG if self.mode == "eager" else logging.INFO
        logger.log(level, "training steps run in mode %s, prepared in %.1f s", self.mode, self.startup_seconds)
        self._run()

    @property
    def _captures(self) -> bool:
        """Whether a compiled step is captured as a CUDA graph.

        Gradients are averaged over processes outside a graph, and a method may work on the host in each step.
        """
        return self.device.type == "cuda" and not self._distributed and getattr(self.pruner, "capturable", True)

    def _try_compiled(self) -> str | None:
        """Compile the step and capture it, if it can be captured. If that fails, undo it and return why."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        tensors += [self._clock.step, self._clock.forward, self._position, self._rate, self._totals, self._first_bad]
        snapshot = Snapshot(tensors, self.optimizer, self.pruner)
        try:
            # What is created at first use must exist before the compiler traces, or it compiles twice.
            self._trial()
            self._compiler = Compiler(self.options, self.device)
            self._forward, self._chain = self._compiler(self._loss_of), self._compiler(draw_chain)
            # Every TrainStep compiles the same function again, which must not count as endless recompilation.
            with torch._dynamo.config.patch(recompile_limit=1024):
                if self._captures:
                    self._run = capture_graph(self._step, self.device, trial=self._trial, undo=snapshot.restore).replay
                else:
                    self._trial()
                    snapshot.restore()
        except Exception as error:
            logger.debug("compiling failed", exc_info=True)
            self._forward, self._chain, self._run = self._loss_of, draw_chain, self._step
            self.optimizer.zero_grad(set_to_none=True)
            snapshot.restore()
            # Compilers put the cause into the second line.
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            return f"{type(error).__name__}: {' '.join(lines[:2])}"
        return None

    def _trial(self) -> None:
        """Run a step that stays at the current position, whose batch is ready."""
        self._step()
        self._position.sub_(1)


class Compiler:
    """Compiles functions and keeps what the backend returned.

    A captured CUDA graph holds no reference to the kernels and constants that it uses, and torch.compile may drop its
    entry when an object that it guards is deleted. The compiler's owner keeps them alive.
    """

    def __init__(self, options: StepOptions, device: torch.device) -> None:
        from torch._dynamo import lookup_backend  # a second to import, which only compiling needs

        # Networks for small images are hundreds of kernels of a few microseconds each, such as the casts of every
        # weight. Combined kernels launch them side by side (benchmarks/records/step_time.json, call 4).
        combined = options.backend == "inductor" and device.type == "cuda"
        self._patches: dict[str, Any] = {"config_patches": {"combo_kernels": True}} if combined else {}
        self._backend = lookup_backend(options.backend)
        self._compiled: list[Any] = []

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return ``function`` compiled."""
        return torch.compile(function, backend=self._compile, dynamic=False)

    def _compile(self, graph: Any, inputs: Any) -> Any:
        self._compiled.append(self._backend(graph, inputs, **self._patches))
        return self._compiled[-1]


class Snapshot:
    """Everything that a step changes, restored after a trial so that the first real step starts from it.

    Tensors are restored in place. Tensors that the optimizer created in the trial are set to zero, the initial value
    of momentum and of Adam's averages.
    """

    def __init__(self, tensors: Iterable[Tensor], optimizer: torch.optim.Optimizer, pruner: Pruner | None) -> None:
        strength = [] if pruner is None else [pruner.strength]
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in (*tensors, *strength)]
        self._optimizer = optimizer
        self._optimizer_values = {id(t): (t, t.detach().clone()) for t in self._current_optimizer_tensors()}
        self._pruner = pruner
        self._pruner_state = None if pruner is None else copy.deepcopy(pruner.state_dict())
        self._cpu_generator = torch.get_rng_state()
        self._cuda_generators = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    @torch.no_grad()
    def restore(self) -> None:
        for tensor, value in self._tensors:
            tensor.copy_(value)
        for tensor in self._current_optimizer_tensors():
            if id(tensor) in self._optimizer_values:
                tensor.copy_(self._optimizer_values[id(tensor)][1])
            else:
                tensor.zero_()
        if self._pruner is not None and self._pruner_state is not None:
            self._pruner.load_state_dict(copy.deepcopy(self._pruner_state))
        torch.set_rng_state(self._cpu_generator)
        if self._cuda_generators:
            torch.cuda.set_rng_state_all(self._cuda_generators)

    def _current_optimizer_tensors(self) -> list[Tensor]:
        states = self._optimizer.state.values()
        return [value for state in states for value in state.values() if isinstance(value, Tensor)]
