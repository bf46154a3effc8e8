"""How a training step runs: eager, compiled, or captured as a CUDA graph, and trial steps whose effects are undone."""

import copy
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from softprune.errors import check_choice
from softprune.fused.training import rewrite_graph
from softprune.lab.config.settings import Mode
from softprune.log import get_logger

logger = get_logger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

# Networks for small images are hundreds of kernels of a few microseconds each, such as the casts of every weight.
# Combined kernels launch them side by side (benchmarks/records/step_time.json, call 4).
_INDUCTOR_ON_CUDA = {"combo_kernels": True}


# From the fastest down; a mode that does not work is replaced by the next one.
_LADDER: tuple[Mode, ...] = ("compile+cuda_graph", "cuda_graph", "compile", "eager")


def modes_to_try(asked: Mode, device: torch.device, *, distributed: bool) -> tuple[Mode, ...]:
    """Return the modes from the one that is asked for, or the fastest for ``auto``, down to eager."""
    if asked == "auto":
        asked = "eager" if device.type != "cuda" else "compile" if distributed else "compile+cuda_graph"
    check_choice("A step's mode", asked, ("auto", *_LADDER))
    return _LADDER[_LADDER.index(asked) :]


class StepCompiler:
    """Compiles functions with one backend and keeps what the backend returned.

    A captured CUDA graph holds no reference to the kernels and constants that it uses, and torch.compile may drop its
    entry when an object that it guards is deleted. The compiler's owner keeps them alive. `fit_convolutions` rewrites
    convolutions for tensor cores.
    """

    def __init__(self, backend: str, options: dict[str, Any], device: torch.device, *, fit_convolutions: bool) -> None:
        from torch._dynamo import lookup_backend  # a second to import, which only compiling needs

        if backend == "inductor" and device.type == "cuda":
            options = {**_INDUCTOR_ON_CUDA, **options}
        self._patches = {"config_patches": options} if options else {}
        self._backend = lookup_backend(backend)
        self._fit = fit_convolutions
        self._compiled: list[Any] = []

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return ``function`` compiled."""
        return torch.compile(function, backend=self._compile, dynamic=False)

    def _compile(self, graph: Any, inputs: Any) -> Any:
        compiled = None
        try:
            fit_graph = rewrite_graph(graph) if self._fit else None
            compiled = self._backend(fit_graph, inputs, **self._patches) if fit_graph is not None else None
        except Exception as error:
            logger.warning("softprune: convolutions are left as they are: %s", in_short(error))
        if compiled is None:
            compiled = self._backend(graph, inputs, **self._patches)
        self._compiled.append(compiled)
        return compiled


def in_short(error: Exception) -> str:
    """Return the type of an error and its first two lines, since compilers put the cause into the second."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"


class Snapshot:
    """Everything that a step changes, restored after a trial so that the first real step starts from it.

    Tensors are restored in place. Tensors that the optimizer created in the trial are set to zero, the initial value
    of momentum and of Adam's averages. ``others`` have state_dict() and load_state_dict().
    """

    def __init__(self, tensors: Iterable[Tensor], optimizer: torch.optim.Optimizer, others: Iterable[Any]) -> None:
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in tensors]
        self._optimizer = optimizer
        self._optimizer_values = {id(t): (t, t.detach().clone()) for t in self._current_optimizer_tensors()}
        self._others = [(other, copy.deepcopy(other.state_dict())) for other in others]
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
        for other, state in self._others:
            other.load_state_dict(copy.deepcopy(state))
        torch.set_rng_state(self._cpu_generator)
        if self._cuda_generators:
            torch.cuda.set_rng_state_all(self._cuda_generators)

    def _current_optimizer_tensors(self) -> list[Tensor]:
        states = self._optimizer.state.values()
        return [value for state in states for value in state.values() if isinstance(value, Tensor)]
