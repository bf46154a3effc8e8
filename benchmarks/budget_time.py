"""What a budget costs on the host: the time of its updates, as a share of a training.

    python benchmarks/budget_time.py --network resnet56 --training-seconds 400 --out benchmarks/records/budget-time.json

Times one update before the cut is finalised, the finalising, and one update after it, on weights as in the middle of a
training, and adds up the updates of a whole training of --training-seconds.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import softprune as sp
from softprune.lab.runs.environment import command_line, describe_environment

TOTAL = 10_000


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure what the command line asks for and return the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="resnet56")
    parser.add_argument("--training-seconds", type=float, default=400.0, help="length of the training")
    parser.add_argument("--out", type=Path, help="JSON record")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    model = sp.models.build(options.network, num_classes=10)
    pruner = sp.SoftPruner(model, torch.zeros(1, 3, 32, 32), target={"macs": 0.5}, total_steps=TOTAL)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            with torch.no_grad():
                module.weight.copy_(torch.rand_like(module.weight))
                module.bias.copy_(0.3 * torch.randn_like(module.bias))
    budget = pruner.budget
    assert budget is not None
    pursuing = min(_seconds(lambda step=step: budget.update(step)) for step in (100, 200, 300, 400, 500))
    finalising = _seconds(lambda: budget.update(budget.latest))
    holding = min(_seconds(lambda step=step: budget.update(step)) for step in (6200, 6400, 6600))
    before = after = step = 0
    budget.finalised_step = None
    while (following := budget.next_update(step)) is not None:
        step = following
        if step >= TOTAL // 3:
            budget.finalised_step = step
        before, after = (before + 1, after) if budget.finalised_step is None else (before, after + 1)
    total = before * pursuing + finalising + after * holding
    record = {
        "benchmark": "budget_time",
        "command": command_line(),
        "environment": describe_environment(torch.device("cpu")).model_dump(),
        "network": options.network,
        "update_seconds": pursuing,
        "finalise_seconds": finalising,
        "held_update_seconds": holding,
        "updates": before + after,
        "training_seconds": options.training_seconds,
        "share_percent": 100 * total / options.training_seconds,
    }
    print(json.dumps(record, indent=1))
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return record


def _seconds(call: Any) -> float:
    """Return the processor time of a call: other programs on the machine do not count."""
    begin = time.process_time()
    call()
    return time.process_time() - begin


if __name__ == "__main__":
    main()
