"""The networks of the zoo: every torchvision classification network, and a small one of every timm CNN family."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vision import import_timm, import_torchvision

import softprune


@dataclass(frozen=True)
class Entry:
    """One network: how to build it, with random weights, and what it is called with."""

    name: str
    source: str
    build: Callable[[], nn.Module]
    size: int = 96
    """Side of the square input images: as small as the network allows, since sizes do not matter here."""
    shape: tuple[int, ...] = ()
    """Shape of one input, where it is not three square planes."""

    def example(self, batch: int = 2) -> Tensor:
        """Random input."""
        shape = self.shape or (3, self.size, self.size)
        return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(0))


# fmt: off
TORCHVISION = {
    96: [
        "densenet121", "densenet161", "densenet169", "densenet201",
        "efficientnet_b0", "efficientnet_b1", "efficientnet_b2", "efficientnet_b3", "efficientnet_b4",
        "efficientnet_b5", "efficientnet_b6", "efficientnet_b7",
        "efficientnet_v2_s", "efficientnet_v2_m", "efficientnet_v2_l",
        "googlenet", "mnasnet0_5", "mnasnet0_75", "mnasnet1_0", "mnasnet1_3",
        "mobilenet_v2", "mobilenet_v3_small", "mobilenet_v3_large",
        "regnet_x_400mf", "regnet_x_800mf", "regnet_x_1_6gf", "regnet_x_3_2gf", "regnet_x_8gf", "regnet_x_16gf",
        "regnet_x_32gf", "regnet_y_400mf", "regnet_y_800mf", "regnet_y_1_6gf", "regnet_y_3_2gf", "regnet_y_8gf",
        "regnet_y_16gf", "regnet_y_32gf",
        "resnet18", "resnet34", "resnet50", "resnet101", "resnet152",
        "resnext50_32x4d", "resnext101_32x8d", "resnext101_64x4d", "wide_resnet50_2", "wide_resnet101_2",
        "shufflenet_v2_x0_5", "shufflenet_v2_x1_0", "shufflenet_v2_x1_5", "shufflenet_v2_x2_0",
        "vgg11_bn", "vgg13_bn", "vgg16_bn", "vgg19_bn",
        # Without BatchNorm:
        "alexnet", "convnext_tiny", "squeezenet1_0", "vgg11", "swin_t",
    ],
    224: ["maxvit_t", "vit_b_16"],
    299: ["inception_v3"],
}
"""By input size. Left out: further sizes of the families without BatchNorm, which are refused for the same reason,
and regnet_y_128gf, whose float64 copies do not fit into the memory of the machine that the record is made on."""

TIMM = {
    96: [
        "ese_vovnet19b_dw", "eca_resnet33ts", "gernet_s", "repvgg_a0", "mobileone_s0", "resnext26ts",
        "lambda_resnet26t", "cs3darknet_s", "cspresnet50", "darknet53", "densenetblur121d", "dla34", "dla46x_c",
        "dpn48b", "efficientnet_lite0", "efficientnet_es", "tf_efficientnetv2_b0", "mixnet_s", "fbnetc_100",
        "mobilenetv1_100", "mobilenetv4_conv_small", "spnasnet_100", "tinynet_e", "fasternet_t0",
        "ghostnet_050", "ghostnetv2_100", "hardcorenas_a", "hgnetv2_b0", "hrnet_w18_small",
        "inception_resnet_v2", "inception_v4", "lcnet_050", "lcnetv2_small", "fbnetv3_b", "mobilevitv2_050",
        "mobilenet_edgetpu_100", "regnetx_002", "regnety_002", "regnetz_005", "repghostnet_050", "repvit_m0_9",
        "res2net50_14w_8s", "resnest14d", "resnet10t", "resnet26d", "ecaresnet26t", "resnetblur50",
        "seresnet18", "resnetv2_18", "rexnet_100", "rexnetr_100", "selecsls42", "legacy_seresnet18", "shvit_s1",
        "skresnet18", "starnet_s050", "tresnet_m", "vgg11_bn", "xception41p", "convmixer_768_32", "fastvit_t8",
        "inception_next_atto", "efficientvit_b0", "edgenext_xx_small", "convnext_atto",
        "nf_resnet26", "mambaout_femto",
    ],
    160: [
        "nasnetalarge", "pnasnet5large", "legacy_xception", "iformer_t",
    ],
    224: [
        "levit_128s", "efficientformer_l1", "visformer_tiny", "efficientformerv2_s0", "nextvit_small",
        "tiny_vit_5m_224", "mobilevit_xxs", "efficientvit_m0", "swiftformer_xs", "coatnet_nano_rw_224",
        "vit_tiny_patch16_224",
    ],
    256: [
        "botnet26t_256", "halonet26t",
    ],
}
# fmt: on


def _torchvision(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        models = import_torchvision().models
        more = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
        return models.get_model(name, weights=None, **more)

    return build


def _timm(name: str) -> Callable[[], nn.Module]:
    return lambda: import_timm().create_model(name, pretrained=False)


def _segmentation(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        models = import_torchvision().models.segmentation
        return getattr(models, name)(weights=None, weights_backbone=None, num_classes=21)

    return build


def _backbone(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        detection = import_torchvision().models.detection
        return getattr(detection, name)(weights=None, weights_backbone=None).backbone

    return build


class Block(nn.Module):
    """Two convolutions; the shortcut skips pixels and pads channels, without weights."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.stride = 1 if inputs == outputs else 2
        self.pad = (outputs - inputs) // 2
        self.conv1 = nn.Conv2d(inputs, outputs, 3, self.stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.pad:
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.pad, self.pad))
        return F.relu(x + y)


class ResNet20(nn.Module):
    """Three stages of three blocks."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        widths = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]
        self.blocks = nn.Sequential(*(Block(a, b) for a, b in itertools.pairwise(widths)))
        self.classifier = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.bn(self.stem(x))))
        return self.classifier(x.mean((2, 3)))


def _own(name: str) -> Entry:
    shape = softprune.models.REGISTRY[name].input_shape
    return Entry(name, "softprune", lambda: softprune.models.build(name, 10), shape[-1], shape)


def entries() -> list[Entry]:
    """All networks of the zoo, in the order of its table."""
    listed = [
        Entry(name, "torchvision", _torchvision(name), size) for size, names in TORCHVISION.items() for name in names
    ]
    listed += [
        Entry(name, "torchvision segmentation", _segmentation(name), 64)
        for name in ("fcn_resnet50", "deeplabv3_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large")
    ]
    listed += [
        Entry(f"{name}.backbone", "torchvision detection", _backbone(name), 96)
        for name in ("fasterrcnn_resnet50_fpn_v2", "ssdlite320_mobilenet_v3_large", "retinanet_resnet50_fpn")
    ]
    listed += [Entry(name, "timm", _timm(name), size) for size, names in TIMM.items() for name in names]
    # resnet50_64 is resnet50 with another stem.
    listed += [_own(name) for name in softprune.models.REGISTRY if name != "resnet50_64"]
    # softprune's own ResNets of option A pad on one side only.
    listed.append(Entry("resnet20_a_centred", "softprune", ResNet20, 32))
    return listed
