"""softprune on real networks of other packages: exact, refused with a reason, or failed.

    python benchmarks/packages.py                # all networks; resumes; writes benchmarks/records/packages.json
    python benchmarks/packages.py --only 'dia*'  # these again
    python benchmarks/packages.py --render       # benchmarks/records/packages.md from the record

`make packages` installs the packages into an environment of their own. Every network has random weights and is treated
as in the zoo: a few training steps, half of the channels cut at random, masked and compact compared in float64.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import json
from collections import Counter
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vision import declare_operators
from zoo_networks import Entry

from zoo import _in_own_process, line

RECORD = Path(__file__).parent / "records" / "packages.json"
DOCUMENT = Path(__file__).parent / "records" / "packages.md"
SOURCES = ("pytorchcv", "segmentation_models_pytorch", "monai", "ultralytics", "transformers", "speechbrain")
FAILED = ("failed", "crash")

# fmt: off
PYTORCHCV = {
    32: [
        "resnet20_cifar10", "preresnet20_cifar10", "diaresnet20_cifar10", "diapreresnet20_cifar10",
        "seresnet20_cifar10", "densenet40_k12_cifar10", "nin_cifar10", "ror3_56_cifar10", "rir_cifar10",
        "shakeshakeresnet20_2x16d_cifar10", "resdropresnet20_cifar10", "xdensenet40_2_k24_bc_cifar10",
    ],
    224: [  # their last pooling has a fixed size
        "resnet10", "preresnet10", "seresnet10", "bam_resnet18", "cbam_resnet18", "resneta10", "mobilenet_wd4",
        "fdmobilenet_wd4", "shufflenet_g1_wd4", "shufflenetv2_wd2", "shufflenetv2b_wd2", "menet108_8x1_g3",
        "condensenet74_c4_g4", "sqnxt23_w1", "squeezenet_v1_1", "darknet_tiny", "dla34", "hrnet_w18_small_v1",
        "vovnet27s", "selecsls42", "hardnet39ds", "mobilenetv3_small_w7d20", "igcv3_wd4", "ghostnet", "mixnet_s",
        "efficientnet_b0", "peleenet", "spnasnet", "bninception", "regnetx002",
    ],
    128: ["centernet_resnet18_voc", "lwopenpose2d_mobilenet_cmupan_coco"],
}
SEGMENTATION = ["Unet", "UnetPlusPlus", "MAnet", "Linknet", "FPN", "PSPNet", "PAN", "DeepLabV3", "DeepLabV3Plus",
                "UPerNet"]
YOLO = ["yolov3-tiny", "yolov5n", "yolov8n", "yolov8n-cls", "yolov8n-seg", "yolo11n", "yolo11n-cls"]
# fmt: on


def _pytorchcv(name: str) -> nn.Module:
    from pytorchcv.model_provider import get_model

    return get_model(name, pretrained=False)


def _segmentation(name: str, encoder: str) -> nn.Module:
    import segmentation_models_pytorch as smp

    return getattr(smp, name)(encoder_name=encoder, encoder_weights=None, classes=3)


def _monai(name: str, **options: Any) -> nn.Module:
    from monai.networks import nets

    return getattr(nets, name)(**options)


def _ultralytics(name: str) -> nn.Module:
    from ultralytics.nn import tasks

    kind = tasks.ClassificationModel if "-cls" in name else tasks.DetectionModel
    kind = tasks.SegmentationModel if "-seg" in name else kind
    return kind(f"{name}.yaml", verbose=False)


def _transformers(kind: str, options: dict[str, Any]) -> nn.Module:
    import transformers

    return getattr(transformers, kind)(getattr(transformers, options["config"])(**options.get("options", {})))


def _speechbrain(module: str, name: str, **options: Any) -> nn.Module:
    import importlib

    return getattr(importlib.import_module(f"speechbrain.lobes.models.{module}"), name)(**options)


def entries() -> list[Entry]:
    """Every network of the list."""
    made: Callable[..., Any] = functools.partial
    found = [
        Entry(name, "pytorchcv", made(_pytorchcv, name), size) for size, names in PYTORCHCV.items() for name in names
    ]
    smp = "segmentation_models_pytorch"
    found += [Entry(f"{name}-resnet18", smp, made(_segmentation, name, "resnet18"), 128) for name in SEGMENTATION]
    found += [
        Entry(f"{name}-mobilenet_v2", smp, made(_segmentation, name, "mobilenet_v2"), 64) for name in ("Unet", "FPN")
    ]
    volume, image = {"spatial_dims": 3, "in_channels": 1}, {"spatial_dims": 2, "in_channels": 1}
    levels = {"channels": (8, 16, 32), "strides": (2, 2), "out_channels": 2}
    kernels = {"kernel_size": (3, 3, 3), "strides": (1, 2, 2), "upsample_kernel_size": (2, 2), "out_channels": 2}
    for name, cls, shape, options in (
        ("unet", "UNet", (1, 16, 16, 16), {**volume, **levels, "norm": "batch"}),
        ("unet-residual", "UNet", (1, 32, 32), {**image, **levels, "norm": "batch", "num_res_units": 2}),
        ("attention-unet", "AttentionUnet", (1, 32, 32), {**image, **levels}),
        ("basic-unet", "BasicUNet", (1, 32, 32), {**image, "features": (8, 8, 16, 16, 32, 8), "norm": "batch"}),
        ("dynunet", "DynUNet", (1, 16, 16, 16), {**volume, **kernels, "norm_name": "batch"}),
        ("dynunet-residual", "DynUNet", (1, 32, 32), {**image, **kernels, "norm_name": "batch", "res_block": True}),
        ("vnet", "VNet", (1, 16, 16, 16), {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}),
        ("densenet121", "DenseNet121", (1, 32, 32, 32), {**volume, "out_channels": 2}),
        ("resnet10-3d", "resnet10", (1, 32, 32, 32), {"spatial_dims": 3, "n_input_channels": 1, "num_classes": 2}),
        (
            "efficientnet-b0",
            "EfficientNetBN",
            (1, 64, 64),
            {**image, "model_name": "efficientnet-b0", "pretrained": False},
        ),
        ("segresnet", "SegResNet", (1, 32, 32), {**image, "norm": "batch", "init_filters": 8, "out_channels": 2}),
        ("highresnet", "HighResNet", (1, 16, 16, 16), {**volume, "out_channels": 2}),
        ("autoencoder", "AutoEncoder", (1, 32, 32), {**image, **levels, "norm": "batch"}),
    ):
        found.append(Entry(name, "monai", made(_monai, cls, **options), shape=shape))
    found += [Entry(name, "ultralytics", made(_ultralytics, name), 64) for name in YOLO]
    for name, kind, options in (
        ("resnet", "ResNetForImageClassification", {"config": "ResNetConfig", "options": {"depths": [1, 1, 1, 1]}}),
        ("regnet", "RegNetForImageClassification", {"config": "RegNetConfig", "options": {"depths": [1, 1, 1, 1]}}),
        ("mobilenet_v1", "MobileNetV1ForImageClassification", {"config": "MobileNetV1Config"}),
        ("mobilenet_v2", "MobileNetV2ForImageClassification", {"config": "MobileNetV2Config"}),
        (
            "efficientnet",
            "EfficientNetForImageClassification",
            {
                "config": "EfficientNetConfig",
                "options": {"width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280},
            },
        ),
    ):
        found.append(Entry(name, "transformers", made(_transformers, kind, options), 64))
    speech = "speechbrain"
    found += [
        Entry("xvector", speech, made(_speechbrain, "Xvector", "Xvector", in_channels=24), shape=(40, 24)),
        Entry(
            "ecapa-tdnn", speech, made(_speechbrain, "ECAPA_TDNN", "ECAPA_TDNN", input_size=24,
            channels=[32, 32, 32, 32, 96], lin_neurons=16), shape=(40, 24),
        ),
        Entry("crdnn", speech, made(_speechbrain, "CRDNN", "CRDNN", input_size=24), shape=(40, 24)),
    ]  # fmt: skip
    return found


def render(record: dict[str, Any]) -> str:
    """Return the page."""
    rows = record["rows"]
    states = Counter(row["status"] for row in rows)
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    lines = [
        "# Networks of other packages",
        "",
        "Random weights, two training steps with masks, half of the channels cut at random; masked and compact network",
        "compared in float64. `make packages` writes this page and its record, `benchmarks/records/packages.json`.",
        "",
        f"**{len(rows)} networks: {states['exact']} exact and smaller, {states['not smaller']} with nothing to cut,",
        f"{states['refused']} refused with a reason, {sum(states[state] for state in FAILED)} failed.** {versions}.",
        "",
        "| network | package | result | sites | frozen | MACs reachable | MACs kept | difference |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        cells = [row["name"], row["source"], row["status"]]
        if "sites" in row:
            cells += [str(row["sites"]), str(sum(row["frozen"].values())), f"{100 * row['macs_reachable']:.1f}%"]
            cells += [f"{100 * row['macs_kept']:.1f}%", f"{row['difference'] / max(row['scale'], 1e-30):.0e}"]
        else:
            cells += [""] * 5
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "Reasons:", ""]
    lines += [
        f"- `{row['name']}` ({row['source']}), {row['status']}: {row['reason'][:300]}"
        for row in rows
        if "reason" in row
    ]
    return "\n".join(lines) + "\n"


def _versions() -> dict[str, str]:
    found = {"torch": torch.__version__}
    for name in SOURCES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main(arguments: list[str] | None = None) -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="GLOB", help="these networks again, by name")
    parser.add_argument("--out", type=Path, default=RECORD)
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one network")
    parser.add_argument("--render", action="store_true", help="only write the page from the record")
    options = parser.parse_args(arguments)
    rows = {}
    if options.out.exists():
        rows = {(row["source"], row["name"]): row for row in json.loads(options.out.read_text())["rows"]}
    if options.render:
        DOCUMENT.write_text(render(json.loads(options.out.read_text())))
        return
    declare_operators()
    for entry in entries():
        key = (entry.source, entry.name)
        asked = any(fnmatch.fnmatchcase(entry.name, glob) for glob in options.only)
        if not asked and (options.only or rows.get(key, {}).get("status", "crash") not in FAILED):
            continue
        rows[key] = _in_own_process(entry, 2, options.timeout)
        print(line(rows[key]), flush=True)
        order = [rows[key] for key in ((each.source, each.name) for each in entries()) if key in rows]
        record = {"command": "make packages", "versions": _versions(), "rows": order}
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
