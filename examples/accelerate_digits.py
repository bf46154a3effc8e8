"""Hugging Face Accelerate: make the pruner from the plain network, then prepare model, optimizer and loader.

accelerate launch examples/accelerate_digits.py --epochs 20

Needs `pip install accelerate`. The one changed line is the loss.
"""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader, Subset, TensorDataset

import softprune as sp
from softprune.lab.data import load_data


def main(arguments: list[str] | None = None) -> tuple[sp.Cost, sp.Cost]:
    """Train, cut, and return the costs before and after."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--images", type=int, default=1437, help="training images")
    parser.add_argument("--cpu", action="store_true", help="do not use a GPU")
    options = parser.parse_args(arguments)
    accelerator = Accelerator(cpu=options.cpu, gradient_accumulation_steps=2)
    data = load_data("digits")
    train = TensorDataset(data.train.normalise(data.train.images), data.train.labels)
    loader = DataLoader(Subset(train, range(options.images)), 32, shuffle=True)

    model = sp.models.build("digits_net", 10)
    pruner = sp.SoftPruner(model, data.example(), strength=3e-3)
    optimizer = torch.optim.SGD(pruner.parameter_groups(weight_decay=2e-4), lr=0.05, momentum=0.9)
    pruner.attach(optimizer)
    network, wrapped, loader = accelerator.prepare(model, optimizer, loader)

    for epoch in range(options.epochs):
        network.train()
        for images, labels in loader:
            with accelerator.accumulate(network):
                loss = pruner.loss(F.cross_entropy(network(images), labels))  # the one changed line
                accelerator.backward(loss)
                wrapped.step()
                wrapped.zero_grad()
        pruner.end_epoch(epoch)

    network.eval()
    small = pruner.compact(accelerator.unwrap_model(network)).eval()
    small = accelerator.unwrap_model(small, keep_fp32_wrapper=False)  # without the autocast of mixed precision
    images = data.test.normalise(data.test.images).to(accelerator.device)
    with torch.no_grad():
        same = torch.allclose(network(images), small(images), atol=1e-4)
        accuracy = (small(images).argmax(1).cpu() == data.test.labels).float().mean().item()
    before, after = sp.cost(model, data.example(1)), sp.cost(small, data.example(1))
    accelerator.print(f"accuracy {accuracy:.4f}, MACs {before.macs:,} -> {after.macs:,}, same outputs: {same}")
    if accelerator.is_main_process:
        sp.save(small, "small.safetensors")
    return before, after


if __name__ == "__main__":
    main()
