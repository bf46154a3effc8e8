"""A detector: prune its backbone while the whole of it trains, then put the compact backbone back.

python examples/detection_backbone.py --steps 20

Needs the "vision" extra. Whole detectors cannot be read (their forward depends on the boxes found), and need not be:
the pruner works on `model.backbone`, and the loss is the detector's own.
"""

import argparse

import torch
from torch import Tensor, nn
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

import softprune as sp


def main(arguments: list[str] | None = None) -> tuple[sp.Cost, sp.Cost]:
    """Train on made-up boxes, cut the backbone, detect; returns the backbone's costs before and after."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--size", type=int, default=128, help="side of the images")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    # The default norm_layer is a BatchNorm with fixed statistics, which cannot learn masks.
    backbone = resnet_fpn_backbone(
        backbone_name="resnet18", weights=None, norm_layer=nn.BatchNorm2d, trainable_layers=5
    )
    model = RetinaNet(backbone, num_classes=3, min_size=options.size, max_size=options.size)

    example = torch.randn(2, 3, options.size, options.size)
    pruner = sp.SoftPruner(model.backbone, example, target={"macs": 0.7}, total_steps=options.steps)
    masked_shifts = pruner.parameter_groups(weight_decay=1e-4)
    rest = [p for name, p in model.named_parameters() if not name.startswith("backbone.")]
    optimizer = torch.optim.SGD([*masked_shifts, {"params": rest, "weight_decay": 1e-4}], lr=1e-3, momentum=0.9)
    pruner.attach(optimizer)
    model.train()
    for _ in range(options.steps):
        images, targets = scene(options.size), boxes(options.size)
        losses = model(images, targets)
        loss = pruner.loss(sum(losses.values(), torch.zeros(())))  # the one changed line
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    model.eval()
    before = sp.cost(model.backbone, example[:1])
    with torch.no_grad():
        expected = model.backbone(example)
        model.backbone = pruner.compact()
        got = model.backbone.eval()(example)
        detections = model(scene(options.size))
    after = sp.cost(model.backbone, example[:1])
    same = all(torch.allclose(expected[name], got[name], atol=1e-3) for name in expected)
    print(f"backbone MACs {before.macs:,} -> {after.macs:,}; same features: {same}; {len(detections)} images detected")
    sp.save(model.backbone, "backbone.safetensors")
    return before, after


def scene(size: int) -> list[Tensor]:
    """Two random images."""
    return [torch.rand(3, size, size) for _ in range(2)]


def boxes(size: int) -> list[dict[str, Tensor]]:
    """A box with a label for each of them."""
    corner = torch.tensor([[size / 8, size / 8, size / 2, size / 2]])
    return [{"boxes": corner, "labels": torch.tensor([label])} for label in (1, 2)]


if __name__ == "__main__":
    main()
