"""Run the Python blocks of docs/yolo.md with each network; record accuracy, MACs, ONNX and time on the CPU.

    python benchmarks/yolo.py yolo11n yolov8n

The control is the dense network trained for as many further epochs as pruning takes. Where torchvision's operators do
not fit the installed torch, ultralytics' own function for non-maximum suppression takes their place.
"""

import contextlib
import json
import os
import platform
import re
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from revision import revision
from vision import import_torchvision

import softprune as sp

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks/records/yolo.json"


def measure(network: str) -> None:
    """Record what the guide finds with `network` in the place of YOLO11n, then the control."""
    from ultralytics import YOLO

    page = (ROOT / "docs/yolo.md").read_text().replace("yolo11n", network)
    blocks = re.findall(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    found: dict[str, Any] = {"__name__": "__main__"}
    begin, commit = time.perf_counter(), revision("src", "docs/yolo.md")
    with tempfile.TemporaryDirectory() as empty, contextlib.chdir(empty):
        exec(compile("\n".join(blocks), "yolo.md", "exec"), found)
        dense, small = found["dense"], found["small"]
        networks = {"dense": dense.model, "compact": small.model}
        accuracy = {"dense": found["before"], "compact": small.metrics.box, "reloaded": found["after"]}
        row = {
            "network": network,
            "date": date.today().isoformat(),
            "commit": commit,
            "versions": {name: sys.modules[name].__version__ for name in ("torch", "ultralytics", "onnxruntime")},
            "machine": f"{platform.machine()}, {os.cpu_count()} shared CPU cores, {torch.get_num_threads()} threads",
            "seed": dense.trainer.args.seed,
            "epochs": {"dense": dense.trainer.epochs, "pruning": small.trainer.epochs},
            "seconds": round(time.perf_counter() - begin),
            "macs": {name: sp.cost(each, found["image"]).macs for name, each in networks.items()},
            "parameters": {name: sum(map(torch.numel, each.parameters())) for name, each in networks.items()},
            "onnx_difference": float(found["difference"]),
            "latency": [each.to_dict() for each in found["times"].rows],
        }
        write(row, accuracy)
        control = YOLO(dense.trainer.best)
        control.train(epochs=small.trainer.epochs, name="control", **found["settings"])
        write(row, accuracy | {"control": control.metrics.box})


def write(row: dict[str, Any], accuracy: dict[str, Any]) -> None:
    """Put a row into the record, in the place of one of the same network."""
    row["map50"] = {name: round(float(box.map50), 4) for name, box in accuracy.items()}
    row["map50_95"] = {name: round(float(box.map), 4) for name, box in accuracy.items()}
    rows = {each["network"]: each for each in json.loads(RECORD.read_text())["rows"]} if RECORD.exists() else {}
    rows = sorted((rows | {row["network"]: row}).items())
    RECORD.write_text(json.dumps({"rows": [each for _, each in rows]}, indent=1) + "\n")


def main() -> None:
    from ultralytics.utils.nms import TorchNMS

    torchvision = import_torchvision()
    if torch.version.cuda is None:
        torchvision.ops.nms = TorchNMS.nms
    for network in sys.argv[1:]:
        measure(network)


if __name__ == "__main__":
    main()
