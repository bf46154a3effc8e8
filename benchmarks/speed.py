"""Milliseconds per forward of dense networks and of cuts at half of their MACs.

    python benchmarks/speed.py --device cuda --masks FOLDER --cuts chosen streams
    python benchmarks/speed.py --device cpu --backends onnxruntime --batches 1 --threads 1 --masks FOLDER

Cuts are those that SCP has chosen from trained weights ("chosen": masks that from_trained.py left in a folder for half
of the MACs; "chosen 0.25" and "latency 0.6" for other targets), or take about the same share of every site ("activated"
without residual streams, "streams" with them). "dense:small" times two networks of timm as they are. Rows that the
record has are not measured again: a call that ended with its time can be repeated.
"""

import argparse
import itertools
import json
import platform
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from from_trained import TASKS
from from_trained import build as trainable
from revision import revision
from torch import Tensor, nn
from vision import import_torchvision

import softprune
from softprune.bench import Runtime, alternate, paired_ratio
from softprune.budget.limit import CutSearch, PrunableNetwork, trained_like
from softprune.cut import PrunePlan, blocks_of_sites, make_plan, required_sites
from softprune.cut.apply import apply_plan
from softprune.cut.selection import read_graph
from softprune.devices import synchronizer
from softprune.graph import ChannelGraph
from softprune.graph.channels import DEFAULT_KINDS, KINDS

CUTS = {"chosen": KINDS, "latency": KINDS, "streams": KINDS, "activated": DEFAULT_KINDS}
GPU = ["resnet50", "mobilenet_v2", "efficientnet_lite0", "regnet_y_400mf"]
CONTROLS = ["ecaresnet50d:ecaresnet50d_pruned", "efficientnet_b3:efficientnet_b3_pruned"]
CPU = [*GPU, "resnet18", "mobilenet_v3_small", "efficientnet_b0", "mnasnet1_0", "vgg16_bn", "densenet121"]


def build(name: str) -> nn.Module:
    """Return a network of the comparison, of torchvision or of timm, with random weights and shifts."""
    torch.manual_seed(0)
    if name in TASKS:
        network = trainable(name, 1000)
    elif name in import_torchvision().models.list_models():
        network = import_torchvision().models.get_model(name, weights=None)
    else:
        import timm

        network = timm.create_model(name)
    return trained_like(network.eval())


def alike(graph: ChannelGraph, unit: Sequence[str], block: int) -> Iterator[tuple[str, Tensor]]:
    """Yield scores of which the same share of every site is above a threshold."""
    width = next(site.width for site in graph.sites if site.name == unit[0])
    order = torch.randperm(width // block, generator=torch.Generator().manual_seed(0))
    for name in unit:
        yield name, ((order + 0.5) / len(order)).repeat_interleave(block)


class Networks:
    """A dense network, its cuts, and what runs them."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name, self.masks = name, options.masks
        self.dense, *self.twin = (build(part) for part in name.split(":"))
        self.example = torch.randn(1, 3, options.input, options.input)
        self.cost = cache(lambda network: softprune.cost(network, self.example))
        self.compact, self.dense_call = cache(self._compact), cache(lambda how: how.call(self.dense, self.example))

    def _compact(self, cut: str, multiple: int) -> nn.Module:
        """Return the network with half of the MACs."""
        if not cut:
            return self.twin[0]
        cut, _, target = cut.partition(" ")
        graph = read_graph(self.dense, self.example, kinds=CUTS[cut])

        def plan(masks: Any) -> PrunePlan:
            return make_plan(graph, self.dense, masks, round_to=multiple)

        if cut in ("chosen", "latency"):
            kind = "latency-" if cut == "latency" else ""
            file = self.masks / f"masks-{kind}{self.name}-{multiple}-{target or 0.5}-0.pt"
            masks = torch.load(file, map_location="cpu")
        else:
            floors = {site.name: int(site.name in required_sites(graph)) for site in graph.sites}
            coupled = blocks_of_sites(graph, multiple)
            prunable = PrunableNetwork(graph, self.dense, graph.example, floors, coupled, multiple)
            scores = {
                name: score for unit, block in prunable.units().items() for name, score in alike(graph, unit, block)
            }
            search = CutSearch(scores, prunable, lambda masks: plan(masks).macs, self.cost(self.dense).macs / 2)
            masks = search.masks(search.fit())
        return apply_plan(plan(masks), self.dense)

    def row(self, cut: str, multiple: int, how: Runtime, repeats: int) -> dict[str, Any]:
        """Time dense and compact network in turns."""
        compact = self.compact(cut, multiple)
        costs = self.cost(self.dense), self.cost(compact)
        calls = {"dense": self.dense_call(how), "compact": how.call(compact, self.example)}
        with how.threads_set():
            found = alternate(calls, repeats=repeats, finish=synchronizer(torch.device(how.device)))
        row: dict[str, Any] = {f"{name}_ms": round(min(timing.blocks), 4) for name, timing in found.items()}
        row["speed_up"] = round(paired_ratio(found["dense"], found["compact"]).median, 3)
        row["macs_ratio"] = round(costs[1].macs / costs[0].macs, 4)
        row["activations_ratio"] = round(costs[1].activations / costs[0].activations, 4)
        return row


def arguments() -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--networks", nargs="+")
    parser.add_argument("--input", type=int, default=224)
    parser.add_argument(
        "--cuts", nargs="+", default=["chosen"], help=f"{', '.join(CUTS)}; with its share: 'latency 0.6'"
    )
    parser.add_argument("--masks", type=Path, help="what from_trained.py left, for chosen cuts")
    parser.add_argument("--round-to", nargs="+", type=int, default=[8])
    parser.add_argument("--backends", nargs="+", default=["compile"])
    parser.add_argument("--dtypes", nargs="+")
    parser.add_argument("--batches", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--cpu-time", action="store_true", help="count the time of the CPU alone, on a busy machine")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--commit", default="", help="of this source, where git cannot tell")
    parser.add_argument("--budget-seconds", type=float, default=120)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "records" / "speed.json")
    options = parser.parse_args()
    on_gpu = options.device.startswith("cuda")
    options.networks = options.networks or ([*GPU, *CONTROLS] if on_gpu else CPU)
    options.dtypes = options.dtypes or (["bfloat16"] if on_gpu else ["float32"])
    if options.cpu_time:  # of this process: on one thread other programs do not count
        time.perf_counter = time.process_time
    options.place = torch.cuda.get_device_name() if on_gpu else f"CPU, {options.threads or 'all'} threads"
    return options


def main() -> None:
    """Measure what the record lacks, and write it after every row."""
    options = arguments()
    end = time.monotonic() + options.budget_seconds
    record = json.loads(options.out.read_text()) if options.out.is_file() else {"rows": []}
    record["what"] = "milliseconds per forward, the least of several blocks in turns; half of the MACs are cut"
    versions = {"python": platform.python_version(), "torch": torch.__version__, "softprune": softprune.__version__}
    stamp = {
        "clock": "CPU time" if options.cpu_time else "wall",
        "seed": 0,
        "versions": versions,
        "commit": options.commit or revision("src"),
    }
    torch._dynamo.config.recompile_limit = 1000
    own, current = None, ""
    ways = list(itertools.product(options.batches, options.dtypes, options.backends))
    for network in options.networks:
        cuts = [("", 0)] if ":" in network else list(itertools.product(options.cuts, options.round_to))
        for (cut, multiple), (batch, dtype, backend) in itertools.product(cuts, ways):
            if time.monotonic() > end:
                print("out of time; the same call continues")
                return
            how = Runtime(backend=backend, device=options.device, dtype=dtype, batch=batch, threads=options.threads)
            if own is None or current != network:  # one network at a time, for the memory of the device
                own, current = Networks(network, options), network
            key = {"network": network, "input": options.input, "dtype": dtype, "runtime": backend, "batch": batch}
            key |= {"device": options.place, "cut": cut, "round_to": multiple}
            if all(any(row[name] != value for name, value in key.items()) for row in record["rows"]):
                row = key | own.row(cut, multiple, how, options.repeats)
                row["defaults"] = cut == "chosen" and multiple == 8
                record["rows"].append(row | stamp)
                options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
                print(row, flush=True)


if __name__ == "__main__":
    main()
