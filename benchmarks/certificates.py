"""What a cut is off by in float64 and in the network's own precision: ten networks in float32, bfloat16 and float16.

    python benchmarks/certificates.py

Networks have BatchNorms as after a training (random scales, shifts and statistics) and random masks that drop half of
all channels and a tenth of the sites. Writes records/certificates.json and prints its table.
"""

import json
from pathlib import Path
from typing import Any

import torch
from zoo_networks import Entry, entries
from zoo_row import random_masks, randomise_

from softprune.cut import cut_and_verify, make_plan, required_sites
from softprune.cut.selection import read_graph
from softprune.errors import VerificationError

RECORD = Path(__file__).parent / "records" / "certificates.json"
NETWORKS = {
    "softprune": ["resnet20", "densenet40"],
    "torchvision": ["resnet18", "mobilenet_v2", "shufflenet_v2_x0_5", "regnet_y_400mf", "mnasnet0_5"],
    "timm": ["repvgg_a0", "seresnet18", "lcnet_050"],
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rows_of(entry: Entry) -> list[dict[str, Any]]:
    """Cut one network in every dtype."""
    torch.manual_seed(0)
    model, example = entry.build().eval(), entry.example()
    randomise_(model, 0)
    example = example if entry.shape else example[:, :, :32, :32]  # bfloat16 is slow on a CPU
    graph = read_graph(model, example)
    masks = random_masks({site.name: site.width for site in graph.sites}, required_sites(graph), 0)
    rows = []
    for dtype in DTYPES:
        model = model.to(dtype)
        plan = make_plan(graph, model, masks)
        row: dict[str, Any] = {"network": entry.name, "dtype": str(dtype).removeprefix("torch.")}
        row |= {"macs_kept": plan.macs / plan.dense_macs}
        try:
            found = cut_and_verify(plan, model, graph.member_masks(masks), example)[1]
        except VerificationError as error:
            rows.append(row | {"refused": str(error)})
            continue
        difference = found.max_difference / found.scale
        rows.append(row | {"float64": difference, "own": found.own_difference, "own_masked": found.own_masked})
    return rows


def main() -> None:
    """Cut all networks, write the record and print it as a table."""
    rows: list[dict[str, Any]] = []
    print("| network | precision | compact - masked in float64 | compact, own precision | masked, own precision |")
    print("|---|---|---:|---:|---:|")
    for entry in entries():
        for row in rows_of(entry) if entry.name in NETWORKS.get(entry.source, ()) else ():
            refused = row.get("refused")
            numbers = refused or f"{row['float64']:.0e} | {row['own']:.1e} | {row['own_masked']:.1e}"
            print(f"| {row['network']} | {row['dtype']} | {numbers} |", flush=True)
            rows.append(row)
    RECORD.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
