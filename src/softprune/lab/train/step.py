"""The training step: batch, augmentation, forward, loss, backward, optimizer and counters, all on the device.

Everything that changes from step to step (batch indices, learning rate, noise) is read from device tensors, at
positions counted on the device. All steps therefore launch the same kernels. They run eagerly or compiled, and on CUDA
can be captured once as a CUDA graph and replayed. The optimizer and its learning rate are made for that, too.
"""

import copy
import math
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from softprune.devices import capture_graph
from softprune.errors import ConfigError, NonFiniteLoss, first_few
from softprune.lab.config.settings import OptimizerConfig, RunConfig, TrainConfig
from softprune.lab.data import ArrayBatches, LoaderBatches
from softprune.lab.world import World
from softprune.log import get_logger
from softprune.masks import Chain, draw_chain
from softprune.methods import Pruner
from softprune.methods.distillation import distillation_loss
from softprune.rng import Clock

logger = get_logger(__name__)

Schedule = Callable[[int], float]
"""Maps a step of the run to its learning rate. A pure function, so a resumed run needs only the step number."""

_CHECK_EVERY = 100
"""Steps between synchronisations with the device, which check that the loss is finite."""


def learning_rate(config: RunConfig, steps: int, finetune: bool = False) -> Schedule:
    """Return the learning rate schedule of training, or of fine-tuning, with ``steps`` steps per epoch."""
    train, tuning, schedule = config.train.epochs, config.finetune, config.schedule
    if finetune:
        first, total, warmup, factor = train * steps, tuning.epochs * steps, 0, 0.1
        base, kind, epochs = tuning.lr, tuning.schedule, tuning.milestones
    else:
        first, total, warmup, factor = 0, train * steps, round(schedule.warmup_epochs * steps), schedule.factor
        base, kind, epochs = config.optimizer.lr, schedule.kind if train else "constant", schedule.milestones
    if kind == "cosine" and total <= warmup:
        raise ConfigError(
            "A cosine schedule must end after its warm-up. Got schedule.warmup_epochs = "
            f"{schedule.warmup_epochs:g} of train.epochs = {train}; lower it."
        )

    def rate(step: int) -> float:
        step -= first
        if step < warmup:
            return base * (step + 1) / warmup
        if kind == "step":
            return base * factor ** sum(step >= epoch * steps for epoch in epochs)
        if kind == "cosine":
            return base * (1 + math.cos(math.pi * min(1.0, (step - warmup) / (total - warmup)))) / 2
        return base

    return rate


def set_arithmetic(config: TrainConfig, device: torch.device) -> None:
    """Set threads, precision and determinism, which are global in PyTorch."""
    if config.threads:
        torch.set_num_threads(config.threads)
    tf32 = config.precision != "fp32"
    torch.backends.cudnn.allow_tf32 = tf32
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    if config.deterministic and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def layout_of(device: torch.device) -> torch.memory_format:
    """Return the memory format of images and convolution weights: channels last on GPUs, where it is faster."""
    return torch.channels_last if device.type == "cuda" else torch.contiguous_format


def placed(network: nn.Module, device: torch.device) -> nn.Module:
    """Move a network to a device and its memory format. Replaces storage, so call it before creating the optimizer."""
    for parameter in network.to(device).parameters():
        if parameter.ndim == 4:
            parameter.data = parameter.data.contiguous(memory_format=layout_of(device))
    return network


# --- the optimizer ---------------------------------------------------------------------------------------------------


def make_optimizer(config: OptimizerConfig, groups: Iterable[dict[str, Any]]) -> Optimizer:
    """Return SGD or AdamW whose groups share one learning rate, a tensor on the parameters' device.

    Only the fused kernels read the learning rate from the device. The optimizer state is created here rather than in
    the first step, so that a checkpoint can be loaded into it. Momentum starts at zero; without dampening this equals
    PyTorch, which starts it at the first gradient.
    """
    groups = list(groups)
    parameters = [parameter for group in groups for parameter in group["params"]]
    rate = torch.full((1,), config.lr, device=parameters[0].device)
    optimizer: Optimizer
    if config.name == "adamw":
        keys = ["exp_avg", "exp_avg_sq"]
        betas, on_cuda = (0.9, 0.999), rate.device.type == "cuda"
        optimizer = torch.optim.AdamW(groups, lr=rate, betas=betas, fused=True, capturable=on_cuda)
    else:
        keys = ["momentum_buffer"]
        optimizer = torch.optim.SGD(groups, lr=rate, momentum=0.9, nesterov=True, fused=True)
    for parameter in parameters:
        for key in keys:
            optimizer.state[parameter][key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        if config.name == "adamw":
            optimizer.state[parameter]["step"] = torch.zeros((), device=rate.device)
    return optimizer


def match_gradients(optimizer: Optimizer) -> None:
    """Give gradients the strides of their parameters.

    Fused kernels compare the strides of all dimensions, but autograd may choose any stride for dimensions of size 1.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is not None and gradient.stride() != parameter.stride():
                parameter.grad = gradient.as_strided(parameter.shape, parameter.stride())


def optimizer_state(optimizer: Optimizer, network: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return the optimizer state by parameter name, which does not depend on the order of the parameters."""
    return {name: optimizer.state[parameter] for name, parameter in _named_parameters(optimizer, network).items()}


@torch.no_grad()
def load_optimizer_state(optimizer: Optimizer, network: nn.Module, state: dict[str, dict[str, Tensor]]) -> None:
    """Copy the result of :func:`optimizer_state` into the optimizer's tensors, in place."""
    parameters = _named_parameters(optimizer, network)
    for name, values in state.items():
        for key, value in values.items():
            optimizer.state[parameters[name]][key].copy_(value)


def _named_parameters(optimizer: Optimizer, network: nn.Module) -> dict[str, Tensor]:
    """Return the optimizer's parameters by name. Parameters of the method, not of the network, are numbered."""
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own = (f"method.{number}" for number in range(len(parameters)))
    return {names[id(p)] if id(p) in names else next(own): p for p in parameters}


# --- the step --------------------------------------------------------------------------------------------------------


class Teacher(NamedTuple):
    """The teacher network and the settings of the distillation loss."""

    network: nn.Module
    """In eval mode, without gradients, on the training device."""
    weight: float
    temperature: float


class TrainStep:
    """Runs training steps: `for position in step.epoch(number): ...`.

    Create it after loading the states of optimizer and pruner and attaching their hooks, since a captured step keeps
    the addresses of their tensors. The step sets the optimizer's learning rate.

    Args:
        model: The network, possibly wrapped in DistributedDataParallel.
        optimizer: From :func:`make_optimizer`, or any optimizer that accepts a tensor as learning rate.
        schedule: The learning rate of each step of the run.
        pruner: Adds its sparsity loss; None trains without pruning.
        teacher: Adds a distillation loss; can be set until the first step.
        world: The process group; a single process by default.
    """

    backend = "inductor"
    """The backend of torch.compile."""
    mode: str | None = None
    """The mode in use: `eager`, `graph` or `compile`; None before the first step."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        batches: ArrayBatches | LoaderBatches,
        *,
        schedule: Schedule,
        train: TrainConfig,
        pruner: Pruner | None = None,
        teacher: Teacher | None = None,
        world: World | None = None,
    ) -> None:
        self.model, self.optimizer, self.batches = model, optimizer, batches
        self.pruner, self.schedule, self.teacher = pruner, schedule, teacher
        # Plain values, which torch.compile can trace.
        self._mode, self._smoothing, self._layout = train.mode, train.label_smoothing, layout_of(batches.device)
        self._bf16 = train.precision == "bf16"
        self.device, self.steps = batches.device, batches.sampler.steps
        self.world = world or World(rank=0, size=1, device=self.device)
        self._run: Callable[[], None] = self._first_run
        self._forward: Callable[[Tensor], Tensor] = self._loss_of
        self._chain: Chain = draw_chain
        self._kernels: list[Any] = []

        self._clock = Clock(batches.sampler.seed, self.device)
        self._position = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._rates = torch.zeros(self.steps, device=self.device)
        self._rate = torch.zeros(1, device=self.device)
        for group in optimizer.param_groups:
            group["lr"] = self._rate
        self._totals = torch.zeros(4, dtype=torch.float64, device=self.device)
        self._first_bad = torch.full((), -1, dtype=torch.int64, device=self.device)
        if self.device.type == "cuda":
            # Shapes never change, so searching for the fastest convolutions in the first step pays off.
            torch.backends.cudnn.benchmark = not torch.are_deterministic_algorithms_enabled()

    # --- an epoch ---------------------------------------------------------------------------------------------------

    def epoch(self, number: int, start: int = 0) -> Iterator[int]:
        """Run the steps of an epoch from `start` on, and yield the position of each step once it is launched.

        Calls :meth:`check` every 100 steps and at the end of the epoch. Call it yourself before saving anything in
        between.
        """
        if start == 0:
            self._totals.zero_()
        first = number * self.steps
        self._clock.step.fill_(first + start)
        self._position.fill_(start)
        self._rates.copy_(torch.tensor([self.schedule(first + position) for position in range(self.steps)]))
        self.batches.begin(number, start)
        self.model.train()
        for position in range(start, self.steps):
            self.batches.before_step()
            self._run()
            if self.mode != "eager" and self.pruner is not None and self.pruner.measures_at(first + position + 1):
                self.pruner.note_inputs(self._last_images())
            if (position + 1) % _CHECK_EVERY == 0 or position + 1 == self.steps:
                self.check()
            yield position

    def _step(self) -> None:
        """Run one step. Position, learning rate and batch are read from tensors, which the step advances."""
        torch.index_select(self._rates, 0, self._position, out=self._rate)
        self.optimizer.zero_grad(set_to_none=True)
        if self.pruner is not None:
            self.pruner.site_masks.draw_ahead(self._chain)
        self._forward(self._position).backward()
        if self.device.type == "cuda":
            match_gradients(self.optimizer)
        self.optimizer.step()
        self._clock.end_step()
        self._position.add_(1)

    def _loss_of(self, position: Tensor) -> Tensor:
        """Return the loss of a batch, including all penalties, and update the totals. Mode `compile` compiles this."""
        images, labels = self.batches.batch(position, self._clock)
        images = images.contiguous(memory_format=self._layout)
        # A cache of cast weights would outlive the capture, and each weight is used only once.
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._bf16, cache_enabled=False):
            logits = self.model(images)
            with torch.no_grad():
                taught = None if self.teacher is None else self.teacher.network(images)
        joint = task = F.cross_entropy(logits.float(), labels, label_smoothing=self._smoothing)
        if self.teacher is not None and taught is not None:
            _, weight, temperature = self.teacher
            soft = distillation_loss(logits.float(), taught, labels, weight=1.0, temperature=temperature)
            joint = weight * soft + (1 - weight) * task
        objective = joint if self.pruner is None else self.pruner.loss(joint)
        with torch.no_grad():
            count = torch.full_like(task, len(labels), dtype=torch.float64)
            right = (logits.argmax(1) == labels).sum()
            self._totals.add_(torch.stack([count, count * task, count * (objective - joint), right.double()]))
            bad = (self._first_bad < 0) & ~torch.isfinite(objective)
            self._first_bad.copy_(torch.where(bad, self._clock.step, self._first_bad))
        return objective

    # --- its numbers and its state ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Wait for the launched steps; raise NonFiniteLoss if a loss was not finite in any process."""
        step = self.world.max(int(self._first_bad))
        if step >= 0:
            epoch, position = divmod(step, self.steps)
            images = first_few([*map(str, self.batches.sampler.indices(epoch)[position].tolist())], 8)
            raise NonFiniteLoss(
                f"The loss must be finite. Got infinity or NaN in step {step} (epoch {epoch}, batch {position}), with "
                f"images {images}. Lower the learning rate or the strength, or check these images."
            )

    def totals(self) -> tuple[int, float, float, float]:
        """Return image count, mean cross-entropy, mean penalty and top-1 accuracy in percent of the epoch so far.

        The numbers are over all processes. The accuracy is that of the augmented images, each with the weights of its
        step. Waits for the device.
        """
        images, loss, penalty, correct = self.world.sum_(self._totals.clone()).tolist()
        count = max(images, 1.0)
        return int(images), loss / count, penalty / count, 100 * correct / count

    def state_dict(self) -> dict[str, Any]:
        """Return the totals of the epoch so far. Model, optimizer and pruner have their own state."""
        return {"totals": self.world.sum_(self._totals.clone()).tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`. Call it in one process only, since the totals are summed over all processes."""
        self._totals.copy_(torch.tensor(state["totals"], dtype=torch.float64))

    def _last_images(self) -> Tensor:
        """Return the images of the last step again, with the same augmentation."""
        clock = Clock(self.batches.sampler.seed, self.device)
        clock.step.copy_(self._clock.step - 1)
        return self.batches.batch(self._position - 1, clock)[0]

    # --- compiled and captured --------------------------------------------------------------------------------------

    def _first_run(self) -> None:
        """Compile and capture the step as the mode requires and run it. If this fails, try the next simpler mode."""
        self.mode = self._mode
        if self.mode == "auto":
            self.mode = "compile" if self.device.type == "cuda" else "eager"
        if self.mode == "graph" and not self._captures:
            self.mode = "eager"
        while self.mode != "eager" and (why_not := self._try_prepared()):
            simpler = "graph" if self.mode == "compile" and self._captures else "eager"
            logger.warning("softprune: training steps run in mode %s: mode %s failed: %s", simpler, self.mode, why_not)
            self.mode = simpler
        if self.mode == "eager":
            self._run = self._step
        self._run()

    @property
    def _captures(self) -> bool:
        """Whether the step is captured as a CUDA graph.

        It is not if DDP averages gradients, or if the method needs the host in each step.
        """
        return self.device.type == "cuda" and self.world.size == 1 and getattr(self.pruner, "capturable", True)

    def _try_prepared(self) -> str | None:
        """Compile the step in mode `compile` and capture it if possible. On failure, undo it and return the reason."""
        undo = self._undo()
        try:
            # Tensors created on first use must exist before tracing, or the step is compiled twice.
            self._trial()
            if self.mode == "compile":
                self._forward, self._chain = self._compiled(self._loss_of), self._compiled(draw_chain)
            # Each TrainStep compiles the same function again, which must not exhaust the recompilation limit.
            with torch._dynamo.config.patch(recompile_limit=1024):
                if self._captures:
                    self._run = capture_graph(self._step, self.device, trial=self._trial, undo=undo).replay
                else:
                    self._run = self._step
                    self._trial()
                    undo()
        except Exception as error:
            logger.debug("preparing the step failed", exc_info=True)
            self._forward, self._chain = self._loss_of, draw_chain
            self.optimizer.zero_grad(set_to_none=True)
            undo()
            # Compiler errors give the cause in the second line.
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            return f"{type(error).__name__}: {' '.join(lines[:2])}"
        return None

    def _trial(self) -> None:
        """Run a step on the current batch without advancing the position."""
        self._step()
        self._position.sub_(1)

    def _compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` compiled.

        A captured CUDA graph does not reference the kernels and constants that it uses, and torch.compile may drop its
        cache entry when a guarded object is deleted. The step therefore keeps the compiled kernels alive.
        """
        from torch._dynamo import lookup_backend  # takes a second to import and is needed only here

        backend, options = lookup_backend(self.backend), dict[str, Any]()
        if self.backend == "inductor" and self.device.type == "cuda":
            # Networks for small images launch hundreds of kernels of a few microseconds each, such as one cast per
            # weight. Combo kernels merge independent ones (benchmarks/records/step_time.json, call 4).
            options["config_patches"] = {"combo_kernels": True}

        def keeping(graph: Any, inputs: Any) -> Any:
            self._kernels.append(backend(graph, inputs, **options))
            return self._kernels[-1]

        return torch.compile(function, backend=keeping, dynamic=False)

    def _undo(self) -> Callable[[], None]:
        """Return a function that restores, in place, all state that a step changes."""
        tensors = [*self.model.parameters(), *self.model.buffers(), self._clock.step, self._clock.forward]
        tensors += [self._position, self._rate, self._totals, self._first_bad]
        tensors += [each for s in self.optimizer.state.values() for each in s.values() if isinstance(each, Tensor)]
        values = [tensor.detach().clone() for tensor in tensors]
        pruner = None if self.pruner is None else copy.deepcopy(self.pruner.state_dict())
        generators = torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

        @torch.no_grad()
        def undo() -> None:
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
            if self.pruner is not None and pruner is not None:
                self.pruner.load_state_dict(copy.deepcopy(pruner))
            torch.set_rng_state(generators[0])
            if generators[1]:
                torch.cuda.set_rng_state_all(generators[1])

        return undo
