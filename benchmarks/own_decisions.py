"""softprune beside Torch-Pruning 1.6.1, each with its own decisions, at equal MACs and equal training.

    pip install --no-deps --target build/torch-pruning torch-pruning==1.6.1
    python benchmarks/own_decisions.py --package build/torch-pruning --choose  # settings, on held-out training images
    python benchmarks/own_decisions.py --package build/torch-pruning           # the comparison, on the test images

Both write to benchmarks/records/own_decisions.json, and the second continues what it finds there; `python
benchmarks/beside_torch_pruning.py --render` writes the table. Each method starts from the same dense network, trained
on the embedded digits, and takes `EPOCHS` epochs in all. Four settings of each method are tried on
a fifth of the training images, with a seed of their own; the one with the smallest loss there is used from then on.
Torch-Pruning works as in its own reproduction script: channels are removed in small steps until the MACs are reached,
ranked over the whole network; sparse training takes the first half of the epochs. All MACs are counted by
`softprune.cost`.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from revision import revision
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import softprune
from softprune.lab.data.datasets import load_digits
from softprune.lab.runs.environment import describe_environment

RECORD = Path(__file__).parent / "records" / "own_decisions.json"
TARGETS = (0.5, 0.25)
SEEDS = (0, 1, 2)
CHOICE_SEED, CHOICE_TARGET = 100, 0.25
DENSE_EPOCHS, EPOCHS, BATCH = 10, 16, 64
DENSE_LR, WEIGHT_DECAY = 0.1, 5e-4
FINAL_AT = 0.3
"""What docs/own-model.md recommends for a short training from trained weights."""
LEARNING_RATES = (0.02, 0.05)
METHODS: dict[str, dict[str, tuple[Any, ...]]] = {
    "softprune, SCP": {"site_kinds": (("sum",), ("sum", "linear", "stream"))},
    "Torch-Pruning, L1": {"group_reduction": ("mean", "first")},
    "Torch-Pruning, group sparsity": {"reg": (5e-4, 5e-3)},
    "Torch-Pruning, BatchNorm scales": {"reg": (5e-4, 5e-3)},
}
"""Each method -> the settings that are tried with each learning rate."""


def conv_norm(inputs: int, outputs: int, size: int, *, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions, a shortcut with a projection where the shape changes, ReLU after the sum."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = conv_norm(inputs, outputs, 3, stride=stride)
        self.second = conv_norm(outputs, outputs, 3)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else conv_norm(inputs, outputs, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + self.shortcut(x))


class InvertedResidual(nn.Module):
    """1x1 expansion, 3x3 depthwise convolution, 1x1 projection without an activation, as in MobileNetV2."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int = 3) -> None:
        super().__init__()
        inner = expansion * inputs
        self.expand, self.depthwise = (
            conv_norm(inputs, inner, 1),
            conv_norm(inner, inner, 3, stride=stride, groups=inner),
        )
        self.project = conv_norm(inner, outputs, 1)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(F.relu6(self.depthwise(F.relu6(self.expand(x)))))
        return x + y if self.residual else y


class SmallNet(nn.Module):
    """A 3x3 stem, blocks, a 1x1 convolution to `last` channels if given, average pooling, a linear classifier."""

    def __init__(
        self, block: Callable[[int, int, int], nn.Module], stages: list[tuple[int, int, int]], last: int
    ) -> None:
        super().__init__()
        width = stages[0][0]
        layers: list[nn.Module] = [conv_norm(1, width, 3), nn.ReLU()]
        for outputs, count, stride in stages:
            for index in range(count):
                layers.append(block(width, outputs, stride if index == 0 else 1))
                width = outputs
        if last:
            layers += [conv_norm(width, last, 1), nn.ReLU()]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(last or width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((2, 3)))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "ResNet": lambda: SmallNet(BasicBlock, [(16, 2, 1), (32, 2, 2), (64, 2, 2)], 0),
    "MobileNetV2": lambda: SmallNet(InvertedResidual, [(16, 1, 1), (24, 2, 2), (32, 2, 2)], 96),
}


class Images:
    """Training images that are shifted by a pixel at random, and the images that a result is judged on."""

    def __init__(self, held_out: bool) -> None:
        data = load_digits()
        train = data.train.batch(torch.arange(len(data.train)))
        if held_out:
            chosen = torch.arange(len(train[0])) % 5 == 0
            self.train, self.judged = tuple(each[~chosen] for each in train), tuple(each[chosen] for each in train)
        else:
            self.train, self.judged = train, data.test.batch(torch.arange(len(data.test)))
        self.steps = len(self.train[0]) // BATCH
        self.example = train[0][:2]

    def batches(self, epochs: int, seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(epochs):
            order = torch.randperm(len(self.train[0]), generator=generator)[: self.steps * BATCH]
            for chosen in order.split(BATCH):
                images = F.pad(self.train[0][chosen], (1, 1, 1, 1))
                top, left = torch.randint(3, (2, BATCH), generator=generator)
                rows, columns = top[:, None] + torch.arange(8), left[:, None] + torch.arange(8)
                images = images[torch.arange(BATCH)[:, None, None], 0, rows[:, :, None], columns[:, None, :]]
                yield images[:, None], self.train[1][chosen]

    @torch.no_grad()
    def judge(self, model: nn.Module) -> dict[str, float]:
        outputs = model.eval()(self.judged[0])
        right = (outputs.argmax(1) == self.judged[1]).double().mean()
        return {"accuracy": 100 * float(right), "loss": float(F.cross_entropy(outputs, self.judged[1]))}


def train(
    model: nn.Module,
    images: Images,
    epochs: int,
    lr: float,
    seed: int,
    *,
    groups: Any = None,
    attach: Callable[[Any], Any] = lambda optimizer: None,
    loss_of: Callable[[Tensor], Tensor] = lambda loss: loss,
    before_step: Callable[[], None] = lambda: None,
    weight_decay: float = WEIGHT_DECAY,
) -> None:
    """Train with SGD and a cosine schedule."""
    optimizer = torch.optim.SGD(groups or model.parameters(), lr=lr, momentum=0.9, weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * images.steps)
    attach(optimizer)
    model.train()
    for batch, labels in images.batches(epochs, seed):
        loss_of(F.cross_entropy(model(batch), labels)).backward()
        before_step()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def ours(model: nn.Module, images: Images, target: float, seed: int, lr: float, site_kinds: Any) -> nn.Module:
    """Prune with softprune as docs/own-model.md does."""
    pruner = softprune.SoftPruner(
        model,
        images.example,
        target={"macs": target},
        total_steps=EPOCHS * images.steps,
        final_at=FINAL_AT,
        site_kinds=tuple(site_kinds),
        seed=seed,
    )
    groups = pruner.parameter_groups(weight_decay=WEIGHT_DECAY)
    train(model, images, EPOCHS, lr, seed, groups=groups, attach=pruner.attach, loss_of=pruner.loss)
    return pruner.compact()


def theirs(
    model: nn.Module, images: Images, target: float, seed: int, method: str, lr: float, **setting: Any
) -> nn.Module:
    """Prune with Torch-Pruning: sparse training where the method has it, removal in small steps, fine-tuning."""
    import torch_pruning as tp

    options: dict[str, Any] = {"global_pruning": True, "pruning_ratio": 1.0, "iterative_steps": 400}
    options["ignored_layers"] = [model.classifier]
    example, left = images.example[:1], EPOCHS
    if method == "Torch-Pruning, L1":
        importance = tp.importance.GroupMagnitudeImportance(p=1, **setting)
        pruner = tp.pruner.MagnitudePruner(model, example, importance=importance, **options)
    elif method == "Torch-Pruning, group sparsity":
        importance = tp.importance.GroupMagnitudeImportance(p=2, normalizer="max")
        pruner = tp.pruner.GroupNormPruner(model, example, importance=importance, **setting, **options)
    else:
        importance = tp.importance.BNScaleImportance()
        pruner = tp.pruner.BNScalePruner(model, example, importance=importance, **setting, **options)
    if "reg" in setting:
        left -= EPOCHS // 2
        regularise = lambda: pruner.regularize(model)  # noqa: E731
        train(model, images, EPOCHS // 2, lr, seed, before_step=regularise, weight_decay=0)
    model.eval()
    limit = target * softprune.cost(model, example).macs
    while flops(model, example) > 2 * limit:
        pruner.step()
    train(model, images, left, lr, seed + 1000)
    return model


def flops(model: nn.Module, example: Tensor) -> int:
    """Count the FLOPs of one call: twice the MACs of `softprune.cost`, in a sixth of the time."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(example)
    return counter.get_total_flops()


def dense(network: str, images: Images, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = NETWORKS[network]()
    train(model, images, DENSE_EPOCHS, DENSE_LR, seed)
    return model


def pruned(model: nn.Module, images: Images, target: float, seed: int, method: str, setting: dict[str, Any]) -> Any:
    """Prune a copy of `model`; return what it reaches, and its MACs."""
    torch.manual_seed(seed)
    network = copy.deepcopy(model)
    if method.startswith("softprune"):
        small = ours(network, images, target, seed, **setting)
    else:
        small = theirs(network, images, target, seed, method, **setting)
    macs, before = (softprune.cost(each, images.example[:1]).macs for each in (small, model))
    if macs > target * before:
        raise AssertionError(f"{method} keeps {macs} MACs of {before}, over the target {target}")
    return images.judge(small) | {"macs": macs, "macs_kept": macs / before}


def choose(record: dict[str, Any], write: Callable[[], None]) -> None:
    """Try the settings of every method on held-out training images, and note the best."""
    images, record["tried"], record["chosen"] = Images(held_out=True), [], {}
    for network in NETWORKS:
        model = dense(network, images, CHOICE_SEED)
        for method, options in METHODS.items():
            rows = []
            for lr, *values in itertools.product(LEARNING_RATES, *options.values()):
                setting = {"lr": lr} | dict(zip(options, values, strict=True))
                found = pruned(model, images, CHOICE_TARGET, CHOICE_SEED, method, setting)
                rows.append({"network": network, "method": method, "setting": setting} | found)
                print(json.dumps(rows[-1]), flush=True)
            record["tried"] += rows
            best = min(rows, key=lambda row: row["loss"])
            record["chosen"].setdefault(network, {})[method] = best["setting"]
            write()


def compare(record: dict[str, Any], write: Callable[[], None], methods: list[str]) -> None:
    """Prune with the chosen settings; judge on the test images. Rows that the record has are not measured again."""
    images, rows = Images(held_out=False), record.setdefault("rows", [])
    known = {(row["network"], row["seed"], row["target"], row["method"]) for row in rows}
    for network, seed in itertools.product(NETWORKS, SEEDS):
        cases = [(network, seed, 1.0, "dense"), *itertools.product((network,), (seed,), TARGETS, methods)]
        if known.issuperset(cases):
            continue
        model = dense(network, images, seed)
        for case in cases:
            target, method = case[2:]
            if case in known:
                continue
            found = {"macs_kept": 1.0} | images.judge(model)
            if method != "dense":
                found = pruned(model, images, target, seed, method, record["chosen"][network][method])
            rows.append({"network": network, "seed": seed, "target": target, "method": method} | found)
            print(json.dumps(rows[-1]), flush=True)
            write()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, help="folder that Torch-Pruning was installed to")
    parser.add_argument("--choose", action="store_true", help="choose the settings on held-out training images")
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--out", type=Path, default=RECORD)
    options = parser.parse_args()
    if options.package is not None:
        sys.path.insert(0, str(options.package))
    torch.set_num_threads(1)
    record = json.loads(options.out.read_text()) if options.out.exists() else {"format": 1}
    record |= {"command": "python benchmarks/own_decisions.py", "torch_pruning": version("torch-pruning")}
    record |= {"epochs": EPOCHS, "dense_epochs": DENSE_EPOCHS, "revision": revision()}
    record["environment"] = describe_environment(torch.device("cpu")).model_dump()
    write = lambda: options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")  # noqa: E731
    if options.choose:
        choose(record, write)
    else:
        compare(record, write, options.only)
    write()


if __name__ == "__main__":
    main()
