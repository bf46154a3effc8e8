"""softprune beside Torch-Pruning 1.6.1: who removes channels that are exactly dead, and is the result exact?

    pip install --no-deps --target build/torch-pruning torch-pruning==1.6.1
    python benchmarks/beside_torch_pruning.py --package build/torch-pruning

Torch-Pruning chooses: its pruner takes half of every group of coupled channels, at random. The BatchNorms of those
channels then get scale and shift zero in a copy of the network, so that exactly what Torch-Pruning wants to remove is
silent there. Both tools remove it, and both results are compared with that copy in float64. Groups without a BatchNorm
(the inside of a squeeze-and-excitation, say) are left alone, since nothing makes their channels silent. Where
Torch-Pruning crashes before it has chosen, half of the channels of softprune's own sites are made silent instead.
"""

import argparse
import copy
import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree
from zoo_networks import Entry, entries
from zoo_row import randomise_

import softprune
from softprune.cut import make_plan
from softprune.cut.selection import read_graph
from softprune.lab.runs.environment import describe_environment

ROOT = Path(__file__).parent
RECORD = ROOT / "records" / "torch_pruning.json"
# fmt: off
NETWORKS = [
    ("softprune", "vgg16"), ("softprune", "resnet20"), ("softprune", "resnet56_a"), ("softprune", "resnet20_a_centred"),
    ("softprune", "densenet40"),
    ("torchvision", "resnet18"), ("torchvision", "resnet50"), ("torchvision", "resnext50_32x4d"),
    ("torchvision", "mobilenet_v2"), ("torchvision", "mobilenet_v3_small"), ("torchvision", "efficientnet_b0"),
    ("torchvision", "mnasnet0_5"), ("torchvision", "regnet_y_400mf"), ("torchvision", "googlenet"),
    ("torchvision", "shufflenet_v2_x0_5"), ("torchvision", "densenet121"),
    ("torchvision segmentation", "fcn_resnet50"), ("timm", "dla34"), ("timm", "ghostnet_050"), ("timm", "resnest14d"),
]
# fmt: on
"""Twenty of the zoo's: chains, shortcuts with and without convolutions, concatenation, groups, gates, shuffles."""
TOLERANCE = 1e-9
"""Largest difference that counts as exact, relative to the largest output."""


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run what the command line asks for and return the record."""
    options = _parser().parse_args(arguments)
    if options.package is not None:
        sys.path.insert(0, str(options.package))
    torch.set_num_threads(1)
    known = {(entry.source, entry.name): entry for entry in entries()}
    rows = []
    for key in NETWORKS:
        if options.only and key[1] not in options.only:
            continue
        rows.append(compare(known[key]))
        print(json.dumps(rows[-1]), flush=True)
        record = {
            "format": 1,
            "what": "softprune and Torch-Pruning remove the same exactly dead channels",
            "command": "python benchmarks/beside_torch_pruning.py",
            "torch_pruning": version("torch-pruning"),
            "environment": describe_environment(torch.device("cpu")).model_dump()
            | {name: version(name) for name in ("torchvision", "timm")},
            "rows": rows,
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return record


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, help="folder that Torch-Pruning was installed to")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these networks")
    parser.add_argument("--out", type=Path, default=RECORD)
    return parser


def compare(entry: Entry) -> dict[str, Any]:
    """One network under both tools."""
    torch.manual_seed(0)
    model = entry.build().eval().double()
    randomise_(model, 0)
    example = entry.example().double()
    theirs = copy.deepcopy(model)
    dead: dict[str, set[int]] = {}
    outcome: dict[str, Any] = {}
    try:
        outcome = _torch_pruning(theirs, example, dead)
    except Exception as error:
        outcome = {"status": "crash", "reason": f"{type(error).__name__}: {error}"[:300]}
        dead.clear()
    silent_(model, dead)
    if "status" not in outcome:
        outcome |= _judge(model, theirs, example)
    ours = _softprune(model, example, dead)
    return {
        "name": entry.name,
        "source": entry.source,
        "dead_channels": sum(map(len, dead.values())),
        "torch_pruning": outcome,
        "softprune": ours,
    }


def silent_(model: nn.Module, dead: dict[str, set[int]]) -> None:
    """Scale and shift zero for the dead channels of every BatchNorm."""
    with torch.no_grad():
        for name, channels in dead.items():
            norm = model.get_submodule(name)
            index = torch.tensor(sorted(channels), dtype=torch.long)
            norm.weight[index] = 0
            norm.bias[index] = 0


def _torch_pruning(model: nn.Module, example: Tensor, dead: dict[str, set[int]]) -> dict[str, Any]:
    """Let Torch-Pruning cut half of every group; notes in `dead` which channels of which BatchNorms went."""
    import torch_pruning as tp

    names = {module: name for name, module in model.named_modules()}
    heads = [
        module
        for module in model.modules()
        if getattr(module, "out_features", getattr(module, "out_channels", 0)) in (10, 21, 1000)
        and isinstance(module, (nn.Linear, nn.Conv2d))
    ]
    start = time.perf_counter()
    pruner = tp.pruner.BasePruner(
        model,
        example[:1],
        importance=tp.importance.RandomImportance(),
        pruning_ratio=0.5,
        ignored_layers=heads,
        output_transform=lambda output: sum(leaf.sum() for leaf in _leaves(output)),
    )
    analysed = time.perf_counter()
    for group in pruner.step(interactive=True):
        gone = _norm_channels(group, names)
        if gone:
            for name, channels in gone.items():
                dead.setdefault(name, set()).update(channels)
            group.prune()
    # What the pruner passes over without a word (the stream after an option-A shortcut) is asked for group by group.
    graph = tp.DependencyGraph().build_dependency(model, example[:1])
    for conv in [module for module in model.modules() if isinstance(module, nn.Conv2d) and module not in heads]:
        lot = torch.randperm(conv.out_channels)[: conv.out_channels // 2].tolist()
        group = graph.get_pruning_group(conv, tp.prune_conv_out_channels, idxs=lot)
        gone = _norm_channels(group, names)
        if gone and not gone.keys() & dead.keys() and graph.check_pruning_group(group):
            dead.update(gone)
            group.prune()
    return {"seconds": {"analyse": analysed - start, "cut": time.perf_counter() - analysed}}


def _norm_channels(group: Any, names: dict[nn.Module, str]) -> dict[str, set[int]]:
    """The channels that a group takes from each BatchNorm; empty for a group without any."""
    taken: dict[str, set[int]] = {}
    for item in group:
        if isinstance(item.dep.target.module, _BatchNorm):
            taken.setdefault(names[item.dep.target.module], set()).update(item.idxs)
    return taken


def _softprune(model: nn.Module, example: Tensor, dead: dict[str, set[int]]) -> dict[str, Any]:
    """Let softprune remove the same channels wherever they are silent."""
    try:
        start = time.perf_counter()
        graph = read_graph(model, example, every_norm=bool(dead))
        analysed = time.perf_counter()
        if not dead:
            for site in graph.sites:
                dead[site.name] = set(torch.randperm(site.width)[: site.width // 2].tolist())
            silent_(model, dead)
        masks = {}
        for site in graph.sites:
            masks[site.name] = torch.ones(site.width, dtype=torch.bool)
            masks[site.name][sorted(dead.get(site.name, ()))] = False
        compact = softprune.apply_plan(make_plan(graph, model, masks), model)
        seconds = {"analyse": analysed - start, "cut": time.perf_counter() - analysed}
    except Exception as error:
        return {"status": "crash", "reason": f"{type(error).__name__}: {error}"[:300]}
    return {"seconds": seconds} | _judge(model, compact, example)


def _judge(reference: nn.Module, small: nn.Module, example: Tensor) -> dict[str, Any]:
    """Whether `small` computes what `reference` does, and how much of it is left."""
    try:
        with torch.no_grad():
            expected, got = _leaves(reference(example)), _leaves(small.eval()(example))
        difference = max((a - b).abs().max().item() for a, b in zip(expected, got, strict=True))
        before, after = softprune.cost(reference, example[:1]), softprune.cost(small, example[:1])
    except Exception as error:
        return {"status": "crash", "reason": f"forward: {type(error).__name__}: {error}"[:300]}
    scale = max(leaf.abs().max().item() for leaf in expected)
    exact = difference <= TOLERANCE * scale
    smaller = after.macs < before.macs
    return {
        "status": "exact" if exact and smaller else "not smaller" if exact else "inexact",
        "difference": difference,
        "scale": scale,
        "macs_kept": after.macs / before.macs,
    }


def _leaves(output: Any) -> list[Tensor]:
    plain = dict(output) if hasattr(output, "keys") else output
    return [leaf for leaf in pytree.tree_leaves(plain) if isinstance(leaf, Tensor)]


if __name__ == "__main__":
    main()
