"""How long a forward takes: the number for the table of a run, not a benchmark."""

import time

import torch
from torch import Tensor, nn

_REPEATS = 30
_SECONDS = 1.5
_WARM_UP = 3


@torch.no_grad()
def latency_ms(network: nn.Module, batch: Tensor) -> float:
    """Time of a forward in eval mode, in milliseconds; at most about two seconds are spent on it.

    The fastest of the repeats: the others say more about what else the machine was doing.
    """
    training = network.training
    network.eval()
    times: list[float] = []
    began = time.perf_counter()
    for number in range(_WARM_UP + _REPEATS):
        start = time.perf_counter()
        network(batch)
        if batch.device.type == "cuda":
            torch.cuda.synchronize(batch.device)
        end = time.perf_counter()
        if number >= _WARM_UP:
            times.append(end - start)
        if times and end - began > _SECONDS:
            break
    network.train(training)
    return 1000 * min(times)
