"""Ultralytics YOLO: prune everything before the detection head, with the detector's own loss.

python examples/ultralytics_yolo.py --steps 20
python examples/ultralytics_yolo.py --model yolov8n.pt --steps 2000

Needs `pip install ultralytics` (AGPL-3.0). The head decodes boxes with sizes that it keeps from the last image, which
cannot be traced; the layers before it can. They hold most of the MACs.
"""

import argparse

import torch
from torch import Tensor, nn

import softprune as sp

try:
    from ultralytics import YOLO
    from ultralytics.cfg import get_cfg
except ImportError as error:
    raise SystemExit("This example needs ultralytics. Install it with `pip install ultralytics`.") from error


class Body(nn.Module):
    """The layers of a YOLO network before its head. Returns the inputs of the head.

    Args:
        detector: The network; the layers are shared with it.
    """

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        *layers, head = detector.model
        self.layers = nn.ModuleList(layers)
        self.inputs = list(head.f)

    def forward(self, x: Tensor) -> list[Tensor]:
        outputs: list[Tensor] = []
        for layer in self.layers:
            if isinstance(layer.f, int):
                given = x if layer.f == -1 else outputs[layer.f]
            else:
                given = [x if index == -1 else outputs[index] for index in layer.f]
            x = layer(given)
            outputs.append(x)
        return [outputs[index] for index in self.inputs]


def main(arguments: list[str] | None = None) -> tuple[sp.Cost, sp.Cost]:
    """Train on made-up boxes, cut, detect; return the costs of the body before and after."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="yolov8n.yaml", help="an architecture, or trained weights (.pt)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--size", type=int, default=128, help="side of the images, a multiple of 32")
    parser.add_argument("--keep", type=float, default=0.7, help="share of the body's MACs to keep at most")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    detector = YOLO(options.model).model.requires_grad_(True)
    detector.args = get_cfg()  # has the weights of the three losses, which the trainer sets otherwise

    body = Body(detector)
    example = torch.rand(2, 3, options.size, options.size)
    pruner = sp.SoftPruner(body, example, target={"macs": options.keep}, total_steps=options.steps)
    head = [parameter for parameter in detector.model[-1].parameters() if parameter.requires_grad]
    groups = [*pruner.parameter_groups(weight_decay=5e-4), {"params": head, "weight_decay": 5e-4}]
    optimizer = torch.optim.SGD(groups, lr=1e-3, momentum=0.9)
    pruner.attach(optimizer)
    detector.train()
    for _ in range(options.steps):
        losses, _ = detector(batch(options.size))
        loss = pruner.loss(losses.sum())  # the one changed line
        loss.backward()
        nn.utils.clip_grad_norm_(detector.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()

    detector.eval()
    before = sp.cost(body, example[:1])
    with torch.no_grad():
        expected = body(example)
        small = pruner.compact().eval()
        same = all(torch.allclose(a, b, atol=1e-3) for a, b in zip(expected, small(example), strict=True))
        for index, layer in enumerate(small.layers):
            detector.model[index] = layer
        boxes = detector(example)[0]
    after = sp.cost(small, example[:1])
    print(f"body MACs {before.macs:,} -> {after.macs:,}; same features: {same}; boxes {tuple(boxes.shape)}")
    sp.save(small, "body.safetensors")
    return before, after


def batch(size: int) -> dict[str, Tensor]:
    """Two random images with one box each, as ultralytics' loader gives them."""
    return {
        "img": torch.rand(2, 3, size, size),
        "cls": torch.tensor([[0.0], [1.0]]),
        "bboxes": torch.tensor([[0.3, 0.3, 0.4, 0.4], [0.6, 0.6, 0.3, 0.5]]),
        "batch_idx": torch.tensor([0.0, 1.0]),
    }


if __name__ == "__main__":
    main()
