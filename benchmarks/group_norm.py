"""Would the method serve networks without BatchNorm? A small experiment on the digits.

    python benchmarks/group_norm.py            # writes benchmarks/records/group_norm.json (about 3 minutes on one core)
    python benchmarks/group_norm.py --render   # the experiment's section of docs/normalisation.md, from the record

A BatchNorm's shift and scale are the mean and the deviation of its output. Other normalisations promise neither, so
that here both are measured on each batch. The loss adds a strength times the mean probability, under a Gaussian with
these moments, that a channel is alive; each normalisation has the smallest strength of 0.3, 1, 2, 4, 12 at which
several channels die. Afterwards channels that are never positive on the training set are zeroed after the normalisation
(masked), or taken out before it, so that the statistics of their group change (removed).
"""

from __future__ import annotations

import argparse
import itertools
import json
import textwrap
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from revision import revision
from torch import Tensor, nn

from softprune.lab.data.datasets import load_digits

HERE = Path(__file__).parent
RECORD = HERE / "records" / "group_norm.json"
PAGE = HERE.parent / "docs" / "normalisation.md"
NORMS = {"BatchNorm": nn.BatchNorm2d, "GroupNorm, 4 groups": lambda n: nn.GroupNorm(4, n),
         "GroupNorm, 1 group": lambda n: nn.GroupNorm(1, n)}  # fmt: skip
STRENGTHS = {"BatchNorm": 12.0, "GroupNorm, 4 groups": 1.0, "GroupNorm, 1 group": 1.0}
EPOCHS, BATCH = 25, 64
HEADING = "## An experiment"
TEXT = """Three convolutions were trained on the digits with the sparsity loss on *measured* moments. Channels that
are never positive on the training images were then zeroed after the normalisation (masked), or left out of
its statistics as well (removed). The strength is the smallest of 0.3, 1, 2, 4, 12 at which several channels die.
"Gaussian is off by" is the mean difference between the predicted and the counted share of positive values per
channel. "Outputs change by" is the largest difference between the outputs of the masked and the cut network on
the test images, relative to the largest output. `python benchmarks/group_norm.py` writes the record,
`benchmarks/records/group_norm.json`, and this table of means over two seeds."""


class Net(nn.Module):
    """Three convolutions, each normalised, with the channels that a mask keeps."""

    def __init__(self, norm: str) -> None:
        super().__init__()
        widths = (1, 16, 32, 32)
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1, bias=False) for a, b in itertools.pairwise(widths))
        self.norms = nn.ModuleList(NORMS[norm](width) for width in widths[1:])
        self.head = nn.Linear(32, 10)
        self.kept = [torch.ones(width, dtype=torch.bool) for width in widths[1:]]
        self.removed = False
        self.outputs: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.outputs = []
        for conv, norm, kept in zip(self.convs, self.norms, self.kept, strict=True):
            x = self._without(conv(x), norm, kept) if self.removed else norm(conv(x))
            self.outputs.append(x)
            x = F.relu(x) * kept[:, None, None]
        return self.head(x.mean((2, 3)))

    def _without(self, x: Tensor, norm: nn.Module, kept: Tensor) -> Tensor:
        """Normalise with the statistics of the kept channels alone."""
        if isinstance(norm, nn.BatchNorm2d):
            return norm(x)
        assert isinstance(norm, nn.GroupNorm)
        groups = x.unflatten(1, (norm.num_groups, -1))
        weights = kept.view(norm.num_groups, -1, 1, 1).to(x).expand_as(groups)
        count = weights.sum((2, 3, 4), keepdim=True).clamp_min(1)
        mean = (groups * weights).sum((2, 3, 4), keepdim=True) / count
        var = ((groups - mean).square() * weights).sum((2, 3, 4), keepdim=True) / count
        x = ((groups - mean) / (var + norm.eps).sqrt()).flatten(1, 2)
        return x * norm.weight[:, None, None] + norm.bias[:, None, None]


def alive(outputs: list[Tensor]) -> Tensor:
    """Return for each channel the probability to be positive, under a Gaussian with its measured moments."""
    rows = [each.transpose(0, 1).flatten(1) for each in outputs]
    return torch.cat([torch.special.ndtr(row.mean(1) / (row.std(1) + 1e-6)) for row in rows])


def run(norm: str, strength: float, seed: int) -> dict[str, Any]:
    """Train one network and return its figures."""
    torch.manual_seed(seed)
    data = load_digits()
    x, tx = ((part.images - part.mean) / part.std for part in (data.train, data.test))  # type: ignore[union-attr]
    y, ty = data.train.labels, data.test.labels  # type: ignore[union-attr]
    model = Net(norm)
    steps = EPOCHS * (len(x) // BATCH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=2e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        chosen = torch.randint(len(x), (BATCH,))
        loss = F.cross_entropy(model(x[chosen]), y[chosen])
        (loss + strength * alive(model.outputs).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()

    def accuracy(outputs: Tensor) -> float:
        return 100 * float((outputs.argmax(1) == ty).double().mean())

    model.eval()
    with torch.no_grad():
        model(x)
        shares = torch.cat([(each > 0).transpose(0, 1).flatten(1).double().mean(1) for each in model.outputs])
        error = float((alive(model.outputs) - shares).abs().mean())
        model.kept = [(each > 0).transpose(0, 1).flatten(1).any(1) for each in model.outputs]
        masked = model(tx)
        model.removed = True
        removed = model(tx)
    dead = sum(int((~kept).sum()) for kept in model.kept)
    figures = {"norm": norm, "strength": strength, "seed": seed, "dead": dead, "channels": len(shares)}
    figures |= {"gaussian_error": error, "masked": accuracy(masked), "removed": accuracy(removed)}
    return figures | {"change": float((masked - removed).abs().max() / masked.abs().max())}


def render(record: dict[str, Any]) -> str:
    """Return the table and the verdict."""
    lines = [
        "| normalisation | strength | dead channels | accuracy, masked | accuracy, removed | outputs change by "
        "| Gaussian is off by |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for norm in NORMS:
        for strength in (0.0, STRENGTHS[norm]):
            one = means(record, norm, strength)
            lines.append(
                f"| {norm} | {strength:g} | {one['dead']:.0f} of {one['channels']:.0f} | {one['masked']:.1f} | "
                f"{one['removed']:.1f} | {one['change']:.2g} | {one['gaussian_error']:.3f} |"
            )
    return "\n".join([*lines, "", verdict({norm: means(record, norm, STRENGTHS[norm]) for norm in NORMS})])


def means(record: dict[str, Any], norm: str, strength: float) -> dict[str, float]:
    """Return the figures of one normalisation at one strength, each the mean over the seeds."""
    rows = [row for row in record["rows"] if (row["norm"], row["strength"]) == (norm, strength)]
    keys = ("dead", "channels", "masked", "removed", "change", "gaussian_error")
    return {key: sum(row[key] for row in rows) / len(rows) for key in keys}


def verdict(found: dict[str, dict[str, float]]) -> str:
    """Return in words what the figures at the largest strength say."""
    batch = found.pop("BatchNorm")
    parts = [
        f"**Verdict.** With BatchNorm {batch['dead']:.0f} of {batch['channels']:.0f} channels die, and removing them "
        f"changes the outputs by {batch['change']:.1g}; the accuracy is {batch['masked']:.1f}%."
    ]
    for norm, one in found.items():
        died = f"With {norm}, {one['dead']:.0f} of {one['channels']:.0f} die"
        if one["dead"] < 1:
            parts.append(f"{died}: there is nothing to remove.")
        else:
            parts.append(
                f"{died}; removing them changes the outputs by {one['change']:.1g} times the largest one and the "
                f"accuracy from {one['masked']:.1f}% to {one['removed']:.1f}%."
            )
    inexact = any(one["change"] > 1e-4 for one in found.values())
    if inexact:
        parts.append(
            "Without BatchNorm the network fails before its channels die, and removal is not exact: softprune does not "
            "offer it."
        )
    return "\n".join(textwrap.wrap(" ".join(parts), 120))


def main() -> None:
    """Run, or render."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--render", action="store_true", help="only write the table into the page")
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    if not options.render:
        torch.set_num_threads(1)
        rows = [run(n, s, seed) for n in NORMS for s in (0.0, STRENGTHS[n]) for seed in range(options.seeds)]
        code = revision("src", "benchmarks/group_norm.py")
        record = {"command": "python benchmarks/group_norm.py", "revision": code, "epochs": EPOCHS, "rows": rows}
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
    page = PAGE.read_text().split(f"\n{HEADING}")[0]
    PAGE.write_text(f"{page}\n{HEADING}\n\n{TEXT}\n\n{render(json.loads(RECORD.read_text()))}\n")


if __name__ == "__main__":
    main()
