"""The configuration of a run: one typed model per section of a recipe. Imports no PyTorch.

The defaults are the authors' CIFAR settings (SGD with Nesterov momentum, batch 64, 160 epochs, the learning
rate divided by ten at epochs 80 and 121), so that a recipe holds only what differs.
"""

import math
from typing import Annotated, Literal, Self

from annotated_types import Ge, Gt, Le, Lt
from pydantic import Field, model_validator

from softprune.errors import ConfigError, show
from softprune.lab.config.method import MaskSection, MethodConfig
from softprune.lab.config.schema import Amount, Count, Epochs, Options, Positive, PositiveCount, Section, Share

Mode = Literal["auto", "eager", "compile"]
ScheduleKind = Literal["step", "cosine", "constant"]

BASELINE = "baseline"
"""`model.weights` and `distill.teacher` for the dense network that `train.dense_baseline` trains first."""
START = "start"
"""`distill.teacher` for the network that `model.weights` names."""

PRUNING_SETTINGS = {
    "train": ("dense_baseline", "dense_epochs", "compact_at"),
    "finetune": ("epochs",),
    "method": ("target",),
}
"""By section, what must be off in a run without pruning."""

LARGEST_SIDE = 4096
"""Pixels on a side of the images that the settings or the record of a run may ask for."""


class ModelConfig(Section, section="model"):
    """The network."""

    name: str = "digits_net"
    """A name from `softprune models`, or `module:factory` for a function of your own that takes `num_classes`."""
    options: Options = Field(default_factory=dict)
    """Further keyword arguments of the factory, such as `{width = 32}`."""
    pretrained: bool = False
    """Start from the trained weights that the factory itself provides: it is called with `pretrained=True` (timm) or
    `weights="DEFAULT"` (torchvision). A classifier for other classes is drawn at random."""
    weights: str = ""
    """Start from these weights instead of random ones: a `.safetensors` file, a file with a PyTorch state_dict, or
    the folder of another run (its newest checkpoint). A relative path is taken from the current folder. `baseline`
    starts from the network that `train.dense_baseline` trains first; with `pretrained` that one starts from the
    pretrained weights."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.pretrained and self.weights not in ("", BASELINE):
            raise ConfigError(
                "model.pretrained and model.weights exclude each other: both give the weights to start from. Got "
                f"model.weights = {self.weights!r}; leave one of them out."
            )
        return self


class DataConfig(Section, section="data"):
    """The images."""

    removed = {  # noqa: RUF012  (pydantic must not take it for a setting)
        "download": False,
        "train_shards": "train-*.tar",
        "val_shards": "val-*.tar",
        "repo": "",
        "sampling": "permutation",
    }

    name: str = "digits"
    """`digits`, `cifar10`, `cifar100`, `folder` for images in the ImageNet layout, or `module:factory` for a function
    of your own that returns training and test set (docs/data.md)."""
    options: Options = Field(default_factory=dict)
    """Further keyword arguments of the factory, such as `{fold = 3}`."""
    dir: str = ""
    """Where the files are; `--data-dir` sets it. Not needed for the digits, which come with softprune."""
    batch_size: PositiveCount = 64
    """Images per optimizer step, over all processes together."""
    eval_batch_size: PositiveCount = 500
    """Images per forward pass of an evaluation."""
    holdout: Count = 0
    """Training images that are left out of training; 0 for none. Every epoch is evaluated on them, and the best one is
    chosen on them; the test images are used once, for the final table. They are drawn at random from `seed`."""
    augment: bool = True
    """Random crops and flips as is usual for the data set."""
    mixup: Amount = 0.0
    """Parameter alpha of mixup's Beta distribution; 0 for no mixup. With `cutmix` too, each batch takes one of the
    two at random."""
    cutmix: Amount = 0.0
    """Parameter alpha of CutMix's Beta distribution; 0 for no CutMix."""
    randaugment: Annotated[int, Ge(0), Le(30)] = 0
    """Magnitude of RandAugment with two operations per image (`folder`, without `in_memory`); 0 for none."""
    erasing: Annotated[float, Ge(0), Le(1)] = 0.0
    """Probability of random erasing: a random rectangle of the image is set to the mean colour. Needs
    `augment`."""
    image_size: Annotated[int, Ge(8), Le(LARGEST_SIDE)] = 224
    """Side of the square that images in files are cropped to."""
    in_memory: bool = False
    """Decode the images of a folder once, and keep them on the device that trains, which then crops them itself. All
    images must have one size. No loader process is needed during training."""
    workers: Annotated[int, Ge(0), Le(256)] = 8
    """Loader processes for images in files, at most one per core; data sets in memory need none. May change when a run
    is resumed."""


class TrainConfig(Section, section="train"):
    """The training loop."""

    removed = {"recalibrate": 0, "ema": 0.0, "accumulate": 1}  # noqa: RUF012  (pydantic must not take it for a setting)

    epochs: Count = 160
    """Passes over the training images. 0 cuts trained weights (`model.weights`, `model.pretrained`) at once, for
    methods that rank channels; fine-tuning follows."""
    dense_baseline: bool = False
    """First train the same network without pruning, in the folder `dense/` of the run: gives the accuracy to
    compare with."""
    dense_epochs: Count = 0
    """Epochs of the dense baseline; 0 for as many as `epochs`."""
    compact_at: Count = 0
    """Remove the dead channels before this epoch and continue with the smaller network; 0 removes them only at the
    end. With a target, at least 0.6 of `epochs`; the smaller network then trains without a sparsity loss."""
    label_smoothing: Share = 0.0
    """Share of the target that is spread evenly over all classes."""
    precision: Literal["fp32", "tf32", "bf16"] = "tf32"
    """Arithmetic of convolutions on a GPU: full float32, TF32 tensor cores, or bfloat16 autocast. A CPU always uses
    float32 unless told bf16, and evaluates in float32 if it has no bfloat16 of its own."""
    channels_last: bool = False
    """Keep images and convolution weights in channels-last memory order."""
    mode: Mode = "auto"
    """How a step runs: `eager`, or `compile`: compiled, and on one GPU captured as a CUDA graph. `auto` compiles on a
    GPU, and falls back to eager where that fails."""
    deterministic: bool = False
    """Use only algorithms that give the same bits every time; slower on a GPU. On a CPU runs repeat without it."""
    threads: Annotated[int, Ge(0), Le(1024)] = 0
    """CPU threads; 0 for PyTorch's choice. A small network is often faster with one, above all on a busy
    machine."""
    sync_batchnorm: bool = False
    """Several GPUs: normalise over the whole batch instead of the share of each process."""


class OptimizerConfig(Section, section="optimizer"):
    """The optimizer."""

    name: Literal["sgd", "adamw"] = "sgd"
    """SGD with momentum, or AdamW."""
    lr: Positive = 0.1
    """Learning rate at the start."""
    momentum: Share = 0.9
    """Momentum of SGD, or the first beta of AdamW."""
    nesterov: bool = True
    """Nesterov's form of momentum (`sgd` only)."""
    weight_decay: Amount = 2e-4
    """PyTorch's weight decay, on weights and BatchNorm scales; shifts and biases have none, except with SFP, FPGM and
    L1, whose authors decay all parameters. The paper's 0.0001 multiplies the squared norm without the usual half,
    which is 0.0002 here."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.name == "sgd" and self.nesterov and self.momentum == 0:
            raise ConfigError(
                "optimizer.nesterov needs optimizer.momentum above 0. Got momentum = 0; set nesterov = false."
            )
        return self


class ScheduleConfig(Section, section="schedule"):
    """The learning rate over the epochs."""

    removed = {"final": 0.0}  # noqa: RUF012

    kind: ScheduleKind = "step"
    """Drops at the milestones, half a cosine from lr to zero, or no change."""
    milestones: Epochs = (80, 121)
    """Zero-based epochs from whose start the rate is multiplied by `factor` (`step` only)."""
    factor: Positive = 0.1
    """Factor of the rate at a milestone (`step` only)."""
    warmup_epochs: Amount = 0.0
    """Epochs over which the rate first rises linearly from zero to lr."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if any(a >= b for a, b in zip(self.milestones, self.milestones[1:], strict=False)):
            raise ConfigError(f"schedule.milestones must be in increasing order. Got {list(self.milestones)}.")
        return self


class DistillConfig(Section, section="distill"):
    """Distillation: the network also learns from the outputs of a trained dense network."""

    teacher: str = ""
    """The trained dense network: `baseline` for the one that `train.dense_baseline` trains first, `start` for the one
    that `model.weights` names, the folder of another run, or a file with its weights. Empty for no distillation."""
    weight: Annotated[float, Gt(0), Le(1)] = 0.5
    """Share of the distillation loss; the rest is the cross-entropy with the labels."""
    temperature: Positive = 2.0
    """Temperature that softens the outputs of both networks in the distillation loss."""


class FinetuneConfig(Section, section="finetune"):
    """Training of the compact network after the cut, without any sparsity (the paper's FT rows)."""

    epochs: Count = 0
    """Passes over the training images; 0 for no fine-tuning."""
    lr: Positive = 0.01
    """Learning rate at the start."""
    schedule: ScheduleKind = "cosine"
    """How the rate falls."""
    milestones: Epochs = ()
    """Zero-based epochs from whose start the rate is divided by ten (`step` only)."""


class RecordConfig(Section, section="records"):
    """What a run writes besides its result."""

    removed = {"checkpoint_steps": 0, "trackers": []}  # noqa: RUF012

    checkpoint_seconds: Amount = 60.0
    """Save a checkpoint when the last one is this old, so that no more than this is lost; 0 for none by time. One is
    always saved at the end, and when the run is stopped."""
    checkpoint_epochs: Count = 0
    """Also save a checkpoint after every this many epochs; 0 for none by epochs."""
    eval_epochs: PositiveCount = 1
    """Evaluate after every this many epochs; the last epoch is always evaluated."""
    tensorboard: bool = False
    """Write the numbers of every epoch as TensorBoard events into the folder `tensorboard` of the run."""


class RunConfig(Section):
    """Everything that decides the outcome of a run."""

    name: str = ""
    """The name of the run in tables, and of its folder; empty for the file name of the recipe."""
    seed: Annotated[int, Ge(0), Lt(2**31)] = 0
    """Seeds the weights, the order of the images, their augmentation and the noise of the masks."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    method: MethodConfig = MethodConfig()
    masks: MaskSection = MaskSection()
    distill: DistillConfig = DistillConfig()
    finetune: FinetuneConfig = FinetuneConfig()
    records: RecordConfig = RecordConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_train(self)
        _check_dense(self)
        _check_distill(self)
        return self


Section.root = RunConfig


def _check_train(config: RunConfig) -> None:
    train = config.train
    if train.compact_at and train.compact_at >= train.epochs:
        raise ConfigError(
            f"train.compact_at must be an epoch before train.epochs = {train.epochs}, since the network is always cut "
            f"at the end. Got {train.compact_at}; use 0 to cut only at the end."
        )
    final_at = config.method.final_at
    if config.method.target and 0 < train.compact_at < final_at * train.epochs:
        raise ConfigError(
            f"With method.target, train.compact_at must be at least method.final_at = {final_at:g} of train.epochs = "
            f"{train.epochs}: the cut is final from there on. Got {train.compact_at}; use "
            f"{math.ceil(final_at * train.epochs)}, or 0 to cut only at the end."
        )


def _check_dense(config: RunConfig) -> None:
    if config.method.name != "dense":
        return
    for section, names in PRUNING_SETTINGS.items():
        for name in names:
            key, value = f"{section}.{name}", getattr(getattr(config, section), name)
            if value:
                raise ConfigError(
                    f'method.name = "dense" prunes nothing: {key} must be off. Got {key} = {show(value)}.'
                )


def _check_distill(config: RunConfig) -> None:
    if config.distill.teacher and config.train.label_smoothing:
        raise ConfigError(
            "distill.teacher and train.label_smoothing exclude each other: both soften the labels. Got "
            f"train.label_smoothing = {config.train.label_smoothing}; set it to 0."
        )
    for key, value in (("distill.teacher", config.distill.teacher), ("model.weights", config.model.weights)):
        if value == BASELINE and not config.train.dense_baseline:
            raise ConfigError(
                f'{key} = "{BASELINE}" needs the dense baseline. Got train.dense_baseline = false; set it to true, '
                "or name the folder of a run or a weights file."
            )
    if config.train.dense_epochs and not config.train.dense_baseline:
        raise ConfigError(
            "train.dense_epochs needs a dense baseline. Got train.dense_baseline = false; set it to true, "
            "or leave train.dense_epochs out."
        )
