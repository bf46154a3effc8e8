"""Milliseconds per forward of dense networks and of cuts at half of their MACs, with random weights.

    python benchmarks/speed.py --device cuda --budget-seconds 120
    python benchmarks/speed.py --device cpu --backends onnxruntime --batches 1 --threads 1 --budget-seconds 600

Of every site the same share of the channels is removed, in multiples of 1 to 32 and as `round_to="auto"` chooses, with
the default sites and with those of residual streams too; the largest cut that keeps at most half of the MACs is timed.
"dense:small" times two networks of timm as they are. Rows that the record has are not measured again: a call that
ended with its time can be repeated.
"""

import argparse
import itertools
import json
import platform
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from revision import revision
from torch import nn
from vision import import_torchvision

import softprune
from softprune.bench import Runtime, alternate, paired_ratio
from softprune.cut import make_plan, required_sites
from softprune.cut.apply import apply_plan
from softprune.cut.selection import read_graph
from softprune.devices import default_multiple, fitting_multiple, synchronizer
from softprune.graph.sites import DEFAULT_KINDS

KINDS = {"default": tuple(DEFAULT_KINDS), "streams": ("sum", "linear", "stream")}
GPU = ["resnet50", "mobilenet_v2", "efficientnet_lite0", "regnet_y_400mf"]
CONTROLS = ["ecaresnet50d:ecaresnet50d_pruned", "efficientnet_b3:efficientnet_b3_pruned"]
CPU = [*GPU, "resnet18", "mobilenet_v3_small", "efficientnet_b0", "mnasnet1_0", "vgg16_bn", "densenet121"]


def build(name: str) -> nn.Module:
    """Return a network of torchvision or timm, with random weights."""
    torch.manual_seed(0)
    networks = import_torchvision().models
    if name in networks.list_models():
        return networks.get_model(name, weights=None).eval()
    import timm

    return timm.create_model(name).eval()


class Networks:
    """A dense network, its cuts, and what runs them."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.dense, *self.twin = (build(part) for part in name.split(":"))
        self.example, self.seed = torch.randn(1, 3, options.input, options.input), options.seed
        self.cost = cache(lambda network: softprune.cost(network, self.example))
        self.graph = cache(lambda kinds: read_graph(self.dense, self.example, kinds=KINDS[kinds]))
        self.compact, self.dense_call = cache(self._compact), cache(lambda how: how.call(self.dense, self.example))

    def auto(self, kinds: str, how: Runtime) -> int:
        """Return what `round_to="auto"` chooses."""
        graph = self.graph(kinds)
        multiple = default_multiple("cpu" if how.backend == "onnxruntime" else how.device)
        return fitting_multiple(multiple, [site.width for site in graph.sites], len(required_sites(graph)))

    def _compact(self, kinds: str, multiple: int) -> nn.Module:
        """Return the largest network with at most half of the MACs."""
        if not kinds:
            return self.twin[0]
        graph, most = self.graph(kinds), self.cost(self.dense).macs / 2

        def plan(share: float) -> Any:
            masks = {}
            for site in graph.sites:
                count = -(-max(1, round(share * site.width)) // multiple) * multiple
                order = torch.randperm(site.width, generator=torch.Generator().manual_seed(self.seed))
                masks[site.name] = order < count
            return make_plan(graph, self.dense, masks, round_to=multiple)

        low, high = 0.0, 1.0
        for _ in range(7):
            middle = (low + high) / 2
            low, high = (middle, high) if plan(middle).macs <= most else (low, middle)
        return apply_plan(plan(low), self.dense)

    def row(self, kinds: str, multiple: int, how: Runtime, repeats: int) -> dict[str, Any]:
        """Time dense and compact network in turns."""
        compact = self.compact(kinds, multiple)
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
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--round-to", nargs="+", type=int, default=[0, 32, 16, 8, 1], help="0: as auto chooses")
    parser.add_argument("--backends", nargs="+", default=["compile"])
    parser.add_argument("--dtypes", nargs="+")
    parser.add_argument("--batches", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--cpu-time", action="store_true", help="count the time of the CPU alone, on a busy machine")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--commit", default="", help="of this source, where git cannot tell")
    parser.add_argument("--seed", type=int, default=0)
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
    record["what"] = "milliseconds per forward with random weights, the least of several blocks in turns"
    versions = {"python": platform.python_version(), "torch": torch.__version__, "softprune": softprune.__version__}
    stamp = {
        "clock": "CPU time" if options.cpu_time else "wall",
        "seed": options.seed,
        "versions": versions,
        "commit": options.commit or revision("src"),
    }
    torch._dynamo.config.recompile_limit = 1000
    own, current = None, ""
    ways = list(itertools.product(options.batches, options.dtypes, options.backends))
    for network in options.networks:
        cuts = [("", 0)] if ":" in network else list(itertools.product(options.kinds, options.round_to))
        for (kinds, wanted), (batch, dtype, backend) in itertools.product(cuts, ways):
            if time.monotonic() > end:
                print("out of time; the same call continues")
                return
            how = Runtime(backend=backend, device=options.device, dtype=dtype, batch=batch, threads=options.threads)
            if own is None or current != network:  # one network at a time, for the memory of the device
                own, current = Networks(network, options), network
            auto = own.auto(kinds, how) if kinds else 0
            key = {"network": network, "input": options.input, "dtype": dtype, "runtime": backend, "batch": batch}
            key |= {"device": options.place, "sites": kinds, "round_to": wanted or auto}
            if all(any(row[name] != value for name, value in key.items()) for row in record["rows"]):
                row = key | own.row(kinds, wanted or auto, how, options.repeats)
                row["defaults"] = kinds == "default" and row["round_to"] == auto
                record["rows"].append(row | stamp)
                options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
                print(row, flush=True)


if __name__ == "__main__":
    main()
