"""torch.compile for the functions of a training step, with convolutions fitted to tensor cores."""

import logging
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch._dynamo import lookup_backend

from softprune.fused.training import rewrite_graph

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

# Networks for small images are hundreds of kernels of a few microseconds each, such as the casts of every weight.
# Combined kernels launch them side by side (benchmarks/records/step_time.json, call 4).
_INDUCTOR_ON_CUDA = {"combo_kernels": True}


class StepCompiler:
    """Compiles functions with one backend and keeps what the backend returned.

    A captured CUDA graph holds no reference to the kernels and constants that it uses, and torch.compile may drop its
    entry when an object that it guards is deleted. The compiler's owner keeps them alive.

    Args:
        backend: A backend of torch.compile.
        options: Settings of the backend.
        device: Where the step runs.
        fit_convolutions: Rewrite convolutions for tensor cores.
    """

    def __init__(self, backend: str, options: dict[str, Any], device: torch.device, *, fit_convolutions: bool) -> None:
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
            log.warning("softprune: convolutions are left as they are: %s", in_short(error))
        if compiled is None:
            compiled = self._backend(graph, inputs, **self._patches)
        self._compiled.append(compiled)
        return compiled


def in_short(error: Exception) -> str:
    """Return the type of an error and its first two lines, since compilers put the cause into the second."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"
