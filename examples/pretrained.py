"""From pretrained weights: prune while fine-tuning, to a budget.

python examples/pretrained.py                          the digits, pretrained here first
python examples/pretrained.py --weights dense.safetensors

Channels that a trained network does not need become dead while the others adapt. A short run at a small learning rate
is enough.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

import softprune as sp
from softprune.lab.data import DataBundle, load_data


def main(arguments: list[str] | None = None) -> tuple[float, float]:
    """Prune pretrained weights; returns the accuracy before and after."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, help="a state_dict of digits_net; trained first if not given")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--keep", type=float, default=0.4, help="share of the MACs to keep at most")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    data = load_data("digits")
    model = sp.models.build("digits_net", 10)
    if options.weights is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=2e-4)
        for _ in range(options.epochs):
            train_epoch(model, optimizer, data)
        options.weights = Path("dense.safetensors")
        save_file(model.state_dict(), options.weights)

    # For your own network: load the weights, then make the pruner.
    model.load_state_dict(load_file(options.weights))
    dense_accuracy = accuracy(model, data)
    steps = options.epochs * -(-len(data.train) // 64)
    pruner = sp.SoftPruner(model, data.example(), target={"macs": options.keep}, total_steps=steps)
    optimizer = torch.optim.SGD(pruner.parameter_groups(weight_decay=2e-4), lr=0.02, momentum=0.9, nesterov=True)
    pruner.attach(optimizer)
    for epoch in range(options.epochs):
        train_epoch(model, optimizer, data, pruner)
        pruner.end_epoch(epoch)
    small = pruner.compact()
    print(pruner.summary())
    print(f"accuracy {dense_accuracy:.4f} pretrained, {accuracy(small, data):.4f} pruned")
    sp.save(small, "small.safetensors")
    return dense_accuracy, accuracy(small, data)


def train_epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: DataBundle, pruner: sp.Pruner | None = None
) -> None:
    """One pass over the training images, pruning or not."""
    model.train()
    for indices in torch.randperm(len(data.train)).split(64):
        images, labels = data.train.batch(indices)
        loss = F.cross_entropy(model(images), labels)
        (loss if pruner is None else pruner.loss(loss)).backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def accuracy(model: nn.Module, data: DataBundle) -> float:
    """Share of test images that `model` gets right."""
    model.eval()
    images = data.test.normalise(data.test.images)
    return (model(images).argmax(1) == data.test.labels).float().mean().item()


if __name__ == "__main__":
    main()
