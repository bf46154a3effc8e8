"""Trial steps whose effects are undone, and whole steps captured as CUDA graphs."""

import copy
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

# The number that PyTorch's documentation asks for before a capture.
_WARM_UP_STEPS = 3


class Stateful(Protocol):
    """An object whose state a step changes."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Snapshot:
    """Everything that a step changes, restored after a trial so that the first real step starts from it.

    Tensors are restored in place. Tensors that the optimizer created in the trial are set to zero, the initial value
    of momentum and of Adam's averages.
    """

    def __init__(self, tensors: Iterable[Tensor], optimizer: torch.optim.Optimizer, others: Iterable[Stateful]) -> None:
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in tensors]
        self._optimizer = optimizer
        self._optimizer_values = {id(t): (t, t.detach().clone()) for t in self._current_optimizer_tensors()}
        self._others = [(other, copy.deepcopy(other.state_dict())) for other in others]
        self._cpu_generator = torch.get_rng_state()
        self._cuda_generators = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    @torch.no_grad()
    def restore(self) -> None:
        """Restore everything."""
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


def capture_graph(
    body: Callable[[], None], device: torch.device, *, trial: Callable[[], None], undo: Callable[[], None]
) -> torch.cuda.CUDAGraph:
    """Capture `body` as a CUDA graph: one call replays all of its kernels.

    First run `trial`, which does the same as `body`, a few times, so that libraries choose their algorithms and
    compilers compile. Then `undo` reverts its effects. The capture itself executes nothing.
    """
    # Warm-up and capture share a stream, since autograd records the stream on which a gradient is accumulated.
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP_STEPS):
            trial()
    torch.cuda.current_stream(device).wait_stream(stream)
    undo()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    # Only this thread's calls must be capturable; a loader's thread may pin memory meanwhile.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        body()
    return graph
