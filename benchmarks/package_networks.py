"""Networks of other packages, with random weights: the list of `make packages`."""

from __future__ import annotations

import functools
import importlib
import itertools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from zoo_networks import Entry

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
    # speechbrain imports torchaudio, whose wheels do not load beside a CPU-only torch; its networks do not call it.
    sys.modules.setdefault("torchaudio", types.ModuleType("torchaudio"))
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
        ("autoencoder", "AutoEncoder", (1, 32, 32), {**image, **levels, "strides": (2, 2, 2), "norm": "batch"}),
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


class Pix2Pix(nn.Module):
    """The U-Net of pix2pix: LeakyReLU, in place on the skip connection, on the way down; ReLU on the way up."""

    def __init__(self, width: int = 16, depth: int = 6) -> None:
        super().__init__()
        widths = [width * min(2**level, 8) for level in range(depth)]
        self.first, self.last = nn.Conv2d(3, width, 4, 2, 1), nn.ConvTranspose2d(2 * width, 3, 4, 2, 1)
        self.downs, self.ups = nn.ModuleList(), nn.ModuleList()
        for level, (outer, inner) in enumerate(itertools.pairwise(widths), start=2):
            innermost = level == depth
            norm = nn.Identity() if innermost else nn.BatchNorm2d(inner)
            down = [nn.LeakyReLU(0.2, inplace=True), nn.Conv2d(outer, inner, 4, 2, 1, bias=innermost), norm]
            up = nn.ConvTranspose2d(inner if innermost else 2 * inner, outer, 4, 2, 1, bias=False)
            self.downs.append(nn.Sequential(*down))
            self.ups.append(nn.Sequential(nn.ReLU(inplace=True), up, nn.BatchNorm2d(outer)))

    def forward(self, x: Tensor) -> Tensor:
        features = [self.first(x)]
        for down in self.downs:
            features.append(down(features[-1]))
        y = features.pop()
        for up in reversed(self.ups):
            y = torch.cat([features.pop(), up(y)], 1)
        return torch.tanh(self.last(torch.relu(y)))


def targets() -> list[tuple[Entry, float]]:
    """Networks with the share of the MACs that is asked for."""
    known = {(entry.source, entry.name): entry for entry in entries()}
    smp = "segmentation_models_pytorch"
    asked = [
        (known["pytorchcv", "diaresnet20_cifar10"], 0.6), (known["pytorchcv", "mobilenet_wd4"], 0.5),
        (known["pytorchcv", "shufflenet_g1_wd4"], 0.5), (known[smp, "Unet-resnet18"], 0.5),
        (known[smp, "FPN-mobilenet_v2"], 0.712), (known[smp, "FPN-mobilenet_v2"], 0.85),
        (known["monai", "unet"], 0.5), (known["monai", "dynunet"], 0.5), (known["monai", "dynunet-residual"], 0.5),
        (known["ultralytics", "yolov8n"], 0.5), (known["transformers", "resnet"], 0.5),
        (known["speechbrain", "ecapa-tdnn"], 0.5),
    ]  # fmt: skip
    return [*asked, (Entry("pix2pix", "written here", Pix2Pix, 64), 0.5)]
