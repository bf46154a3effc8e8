"""Does the compact network in a run's folder classify every test image as the masked network does?

    python benchmarks/agreement.py RUN --data-dir data --out benchmarks/records/agreement.json

The masked network comes from the run's newest checkpoint, the compact one from its folder and the dense
definition. Full float32: TF32 is off.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import softprune as sp
from softprune.distributed import join_world
from softprune.lab.runs.checkpoint import read_newest
from softprune.lab.runs.environment import describe_environment
from softprune.lab.runs.folder import RunFolder
from softprune.lab.runs.networks import build_network
from softprune.lab.train.run import open_data
from softprune.lab.train.stage import restored_stage


def main() -> None:
    """Compare, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--data-dir")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False

    folder = RunFolder.open(options.run)
    config = folder.read_config()
    world = join_world(options.device)
    data = open_data(config, world.device, options.data_dir)
    stage = restored_stage(config, data, world, read_newest(folder.checkpoints)[1]).stage
    compact = sp.load(folder.compact, build_network(config.model.name, data.num_classes).to(world.device))
    with stage.eval_weights() as masked:
        masked_logits = _logits(masked, data.test)
    compact_logits = _logits(compact, data.test)
    labels = data.test.labels
    record: dict[str, Any] = {
        "format": 1,
        "what": "masked against compact network on every test image, float32, TF32 off",
        "run": config.name,
        "seed": config.seed,
        "images": len(labels),
        "classified_differently": int((masked_logits.argmax(1) != compact_logits.argmax(1)).sum()),
        "largest_difference_of_logits": float((masked_logits - compact_logits).abs().max()),
        "largest_logit": float(masked_logits.abs().max()),
        "top1_masked": 100 * float((masked_logits.argmax(1) == labels).float().mean()),
        "top1_compact": 100 * float((compact_logits.argmax(1) == labels).float().mean()),
        "environment": describe_environment(world.device).model_dump(),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record))


@torch.no_grad()
def _logits(network: nn.Module, data: Any) -> Tensor:
    network.eval()
    count = len(data.labels)
    batches = torch.arange(count, device=data.labels.device).split(500)
    return torch.cat([network(data.batch(indices)[0]).float() for indices in batches])


if __name__ == "__main__":
    main()
