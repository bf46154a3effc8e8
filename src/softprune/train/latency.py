"""How long a forward takes: the number for the table of a run, not a benchmark."""

import logging
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from softprune.hardware import seconds, synchronizer
from softprune.module_state import evaluating
from softprune.train.cuda_graph import capture_graph

log = logging.getLogger(__name__)

_REPEATS = 30
_SECONDS = 1.5
_WARM_UP = 3


@torch.no_grad()
def latency_ms(network: nn.Module, batch: Tensor) -> float:
    """Time of a forward in eval mode, in milliseconds; at most about two seconds are spent on it.

    The fastest of the repeats: the others say more about what else the machine was doing. On CUDA a recorded forward is
    replayed, so that the time is the GPU's own: small networks otherwise take as long as Python needs to launch them.
    """
    with evaluating(network):
        return 1000 * min(_times(network, batch))


def _times(network: nn.Module, batch: Tensor) -> list[float]:
    call = _recorded(network, batch) if batch.device.type == "cuda" else lambda: network(batch)
    wait = synchronizer(batch.device)
    began = time.perf_counter()
    times = [seconds(call, 1, wait) for _ in range(_WARM_UP + 1)][_WARM_UP:]
    while len(times) < _REPEATS and time.perf_counter() - began < _SECONDS:
        times.append(seconds(call, 1, wait))
    return times


def _recorded(network: nn.Module, batch: Tensor) -> Callable[[], object]:
    """The forward as a CUDA graph; as it is where it cannot be recorded."""

    def forward() -> None:
        network(batch)

    try:
        graph = capture_graph(forward, batch.device, trial=forward, undo=lambda: None)
    except RuntimeError as error:
        log.info("the forward is timed from Python, since it cannot be recorded: %s", error)
        return forward
    return lambda: graph.replay()
