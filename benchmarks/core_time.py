"""Seconds to inspect a network and to cut it, proof included, and how they grow with depth.

    python benchmarks/core_time.py --out benchmarks/records/core_time.json

Goals on one thread: ResNet-164 in at most 4 s, EfficientNetV2-L (with torchvision) in at most 15 s, growth close to
linear in depth (pre-activation ResNets of depth 56 to 998).
"""

import argparse
import json
import time
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vision import import_torchvision

import softprune as sp
from softprune import models
from softprune.lab.runs.environment import describe_environment
from softprune.models import PreActResNet

DEPTHS = (56, 110, 218, 434, 998)


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--depths", type=int, nargs="+", default=list(DEPTHS))
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = [
        # What torch imports on the first call of a process would otherwise count as ResNet-164's.
        _measure("resnet20, with what torch imports first", models.resnet20(num_classes=10), torch.randn(1, 3, 32, 32)),
        _measure("resnet164", models.resnet164(num_classes=10), torch.randn(1, 3, 32, 32)),
        _measure("resnet50", models.resnet50(num_classes=1000), torch.randn(1, 3, 224, 224)),
    ]
    if find_spec("torchvision"):
        network = import_torchvision().models.efficientnet_v2_l(weights=None)
        rows.append(_measure("efficientnet_v2_l", network, torch.randn(1, 3, 224, 224)))
    for depth in options.depths:
        network = PreActResNet((depth - 2) // 6, num_classes=10)
        rows.append(_measure(f"pre-activation resnet{depth}", network, torch.randn(1, 3, 32, 32)))
    record = {
        "format": 1,
        "what": "seconds to inspect and to compact (plan, cut, proof), half of each site's channels dropped",
        "date": date.today().isoformat(),
        "threads": options.threads,
        "environment": describe_environment(torch.device("cpu")).model_dump(),
        "rows": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _measure(name: str, network: nn.Module, example: torch.Tensor) -> dict[str, Any]:
    wall, cpu = time.perf_counter(), time.process_time()
    sp.inspect(network, example)
    inspected = time.perf_counter() - wall
    pruner = sp.SoftPruner(network, example)
    with torch.no_grad():
        for site in pruner.sites:
            network.get_submodule(site.name).bias[: site.width // 2] = -9.0  # type: ignore[index, operator]
    began = time.perf_counter()
    small = pruner.compact()
    row = {
        "network": name,
        "layers": sum(isinstance(module, nn.Conv2d) for module in network.modules()),
        "inspect_seconds": round(inspected, 2),
        "compact_seconds": round(time.perf_counter() - began, 2),
        "inspect_and_compact_seconds": round(inspected + time.perf_counter() - began, 2),
        "all_with_pruner_seconds": round(time.perf_counter() - wall, 2),
        "cpu_seconds": round(time.process_time() - cpu, 2),
        "macs_kept": round(sp.cost(small, example).macs / sp.cost(network, example).macs, 3),
    }
    print(json.dumps(row), flush=True)
    return row


if __name__ == "__main__":
    main()
