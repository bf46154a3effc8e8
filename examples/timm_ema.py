"""A timm network in a timm-style loop: warm-up and cosine schedule, mixed precision, and an EMA that is what ships.

python examples/timm_ema.py --epochs 20

Needs the "timm" extra. The average of the weights is cut, verified against the averaged network with its masks.
"""

import argparse

import timm
import timm.scheduler
import timm.utils
import torch
import torch.nn.functional as F

import softprune as sp
from softprune.lab.data import load_data


def main(arguments: list[str] | None = None) -> tuple[sp.Cost, sp.Cost]:
    """Train, cut the average, and return the costs before and after."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="test_resnet", help="any timm CNN with BatchNorm")
    parser.add_argument("--pretrained", action="store_true", help="start from timm's weights")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--images", type=int, default=1437, help="training images")
    parser.add_argument("--size", type=int, default=32, help="side of the images")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = load_data("digits", device=device)

    model = timm.create_model(options.model, pretrained=options.pretrained, in_chans=1, num_classes=10).to(device)
    example = torch.zeros(2, 1, options.size, options.size, device=device)
    steps_per_epoch = options.images // 64
    steps = options.epochs * steps_per_epoch
    pruner = sp.SoftPruner(model, example, target={"macs": 0.5}, total_steps=steps)
    ema = timm.utils.ModelEmaV3(model, decay=0.99, use_warmup=True)
    optimizer = torch.optim.SGD(pruner.parameter_groups(weight_decay=1e-4), lr=0.1, momentum=0.9, nesterov=True)
    pruner.attach(optimizer)
    warm_up = min(20, steps // 4)
    schedule = timm.scheduler.CosineLRScheduler(
        optimizer, t_initial=steps, warmup_t=warm_up, warmup_lr_init=1e-3, t_in_epochs=False
    )
    scaler = torch.amp.GradScaler(enabled=device.type == "cuda")

    def scaled(images: torch.Tensor) -> torch.Tensor:
        return F.interpolate(images, size=options.size, mode="bilinear")

    step = 0
    for epoch in range(options.epochs):
        model.train()
        order = torch.randperm(options.images, device=device)
        for number in range(steps_per_epoch):
            images, labels = data.train.batch(order[64 * number : 64 * (number + 1)])
            with torch.autocast(device.type, torch.float16, enabled=device.type == "cuda"):
                loss = F.cross_entropy(model(scaled(images)), labels, label_smoothing=0.1)
            loss = pruner.loss(loss)  # the one changed line
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            step += 1
            ema.update(model, step=step)
            schedule.step_update(step)
        pruner.end_epoch(epoch)

    small = pruner.compact(model=ema.module).eval()  # the average's weights, with the average's masks
    images = scaled(data.test.normalise(data.test.images))
    with torch.no_grad():
        accuracy = (small(images).argmax(1) == data.test.labels).float().mean().item()
    before, after = sp.cost(model, example[:1]), sp.cost(small, example[:1])
    print(f"{options.model}: EMA accuracy {accuracy:.4f}, MACs {before.macs:,} -> {after.macs:,}")
    sp.save(small, "small.safetensors")
    return before, after


if __name__ == "__main__":
    main()
