"""How many BatchNorms of well-known networks can be masked, by kind of site, and that every cut is exact.

python benchmarks/reach.py            # prints the table
python benchmarks/reach.py --write    # and records it for docs/sites.md
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vision import import_timm, import_torchvision
from zoo_row import random_masks

from softprune import models
from softprune.cut import floor_masks, make_plan, required_sites, verify_plan
from softprune.graph import ChannelGraph, trace
from softprune.graph.sites import KINDS

NETWORKS = {
    "repvgg_a0": "timm",
    "resnet18": "torchvision",
    "resnet50": "torchvision",
    "mobilenet_v2": "torchvision",
    "efficientnet_b0": "torchvision",
    "regnet_y_400mf": "torchvision",
    "hrnet_w18_small": "timm",
    "resnet56_a": "softprune",
}
STEPS = ((), ("sum",), ("sum", "linear"), KINDS)
RECORD = Path(__file__).parent / "records" / "reach.json"
DOCUMENT = Path(__file__).parents[1] / "docs" / "sites.md"
BEGIN, END = "<!-- reach: begin -->", "<!-- reach: end -->"


def build(name: str) -> nn.Module:
    """Return a network with random weights."""
    torch.manual_seed(0)
    if NETWORKS[name] == "timm":
        return import_timm().create_model(name).eval()
    if NETWORKS[name] == "softprune":
        return models.build(name, 10).eval()
    return import_torchvision().models.get_model(name).eval()


def measure(name: str) -> dict[str, Any]:
    """Return the masked BatchNorms by kinds of sites, and the largest difference of a cut with all kinds."""
    model, example = build(name), torch.randn(2, 3, 64, 64)
    graph = trace(model, example)
    row: dict[str, Any] = {"name": name, "norms": len(graph.norms), "masked": [], "floor": []}
    for kinds in STEPS:
        chosen = graph.with_kinds(kinds)
        row["masked"].append(sum(len(site.members) for site in chosen.sites))
        row["floor"].append(_floor(chosen, model))
    masks = random_masks({site.name: site.width for site in chosen.sites}, required_sites(chosen), 0)
    certificate = verify_plan(make_plan(chosen, model, masks), model, masks, example)
    row["difference"] = certificate.max_difference / max(certificate.scale, 1e-30)
    return row


def _floor(graph: ChannelGraph, model: nn.Module) -> float:
    """Return the share of MACs that stays if every site goes to its floor."""
    plan = make_plan(graph, model, floor_masks(graph))
    return round(plan.macs / plan.dense_macs, 4)


def render(rows: list[dict[str, Any]]) -> str:
    """Return the table of the page."""
    lines = [
        "| network | BatchNorms | activated | + sum | + linear | + stream | MACs at the floor, before | after |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        shares = [f"{count} ({100 * count / row['norms']:.0f}%)" for count in row["masked"]]
        floors = [f"{100 * row['floor'][step]:.1f}%" for step in (0, -1)]
        lines.append(f"| {' | '.join([row['name'], str(row['norms']), *shares, *floors])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the record and the page")
    parser.add_argument("names", nargs="*", default=list(NETWORKS))
    arguments = parser.parse_args()
    rows = []
    for name in arguments.names:
        rows.append(measure(name))
        print(json.dumps(rows[-1]), flush=True)
    print(render(rows))
    if arguments.write:
        RECORD.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")
        head, rest = DOCUMENT.read_text().split(BEGIN)
        DOCUMENT.write_text(f"{head}{BEGIN}\n{render(rows)}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
