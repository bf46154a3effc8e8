"""Lightning: the callback prunes while the Trainer trains.

python examples/lightning_digits.py --epochs 20

Needs the "lightning" extra. `training_step` is the usual one; the optimizer takes its groups from the pruner.
"""

import argparse

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import softprune as sp
from softprune.integrations.lightning import SoftPruning
from softprune.lab.data import load_data


class Digits(L.LightningModule):
    """A classifier as in any Lightning project."""

    def __init__(self) -> None:
        super().__init__()
        self.model = sp.models.build("digits_net", 10)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        images, labels = batch
        self.log("accuracy", (self.model(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups = self.pruner.parameter_groups(weight_decay=2e-4)  # the callback put it there
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)


def main(arguments: list[str] | None = None) -> tuple[sp.Cost, sp.Cost]:
    """Train, cut, and return the costs before and after."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--images", type=int, default=1437, help="training images")
    options = parser.parse_args(arguments)
    data = load_data("digits")
    train, test = (TensorDataset(part.normalise(part.images), part.labels) for part in (data.train, data.test))
    train = torch.utils.data.Subset(train, range(options.images))
    pruning = SoftPruning(data.example(), target={"macs": 0.5})
    module = Digits()
    trainer = L.Trainer(
        max_epochs=options.epochs,
        callbacks=[pruning],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(train, 64, shuffle=True), DataLoader(test, 360))
    small = pruning.compact()
    before, after = sp.cost(module.model, data.example(1)), sp.cost(small, data.example(1))
    print(f"accuracy {float(trainer.callback_metrics['accuracy']):.4f}, MACs {before.macs:,} -> {after.macs:,}")
    return before, after


if __name__ == "__main__":
    main()
