"""The configuration of a run: one keyword-only dataclass per section of a recipe.

The defaults are the authors' CIFAR settings (SGD with Nesterov momentum, batch 64, 160 epochs, the learning
rate divided by ten at epochs 80 and 121), so that a recipe holds only what differs.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from softprune.config.masks import MaskConfig
from softprune.config.schema import Section, at_least, between, more_than
from softprune.config.target import read_target
from softprune.errors import ConfigError

Mode = Literal["auto", "eager", "compile", "cuda_graph", "compile+cuda_graph"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """The network."""

    section: ClassVar[str] = "model"

    name: str = "digits_net"
    """A name from `softprune models`, or `module:factory` for a function of your own that takes
    `num_classes`."""
    weights: str = ""
    """Start from these weights instead of a random start: a `.safetensors` file, a file with a PyTorch
    state_dict, or the folder of another run (its newest checkpoint). A path that is not absolute is taken
    from where you are."""


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """The images."""

    section: ClassVar[str] = "data"

    name: str = "digits"
    """A name from `softprune data`: `digits`, `cifar10`, `cifar100`, or `folder` for images in the ImageNet
    layout."""
    dir: str = ""
    """Where the files are; `--data-dir` sets it. Not needed for the digits, which ship with softprune."""
    download: bool = False
    """Fetch CIFAR from its official address when the files are missing (checked against its checksum)."""
    batch_size: Annotated[int, at_least(1)] = 64
    """Images per optimizer step, over all processes and accumulated pieces together."""
    eval_batch_size: Annotated[int, at_least(1)] = 500
    """Images per forward of an evaluation."""
    augment: bool = True
    """Random crops and flips as is usual for the data set."""
    image_size: Annotated[int, at_least(8)] = 224
    """Side of the square that images from folders are cropped to."""
    workers: Annotated[int, at_least(0)] = 8
    """Loader processes for images from folders; data sets that fit in memory need none."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Section):
    """The loop."""

    section: ClassVar[str] = "train"

    epochs: Annotated[int, at_least(1)] = 160
    """Passes over the training images."""
    dense_baseline: bool = False
    """First train the same network without pruning, in the run's folder `dense/`: gives the accuracy to
    compare with."""
    compact_at: Annotated[int, at_least(0)] = 0
    """Cut the dead channels physically before this epoch and go on with the smaller network; 0 cuts only at
    the end."""
    recalibrate: Annotated[int, at_least(0)] = 0
    """Batches over which the compact network's BatchNorm statistics are measured anew after the last cut; 0
    for none."""
    label_smoothing: Annotated[float, between(0, 1)] = 0.0
    """Share of the target spread evenly over all classes."""
    ema: Annotated[float, between(0, 1)] = 0.0
    """Decay of a moving average of the weights; when set, the average is what is evaluated and cut. 0 for
    none."""
    accumulate: Annotated[int, at_least(1)] = 1
    """Pieces that a batch is cut into, one forward and backward each, for batches that do not fit in
    memory."""
    precision: Literal["fp32", "tf32", "bf16"] = "tf32"
    """Arithmetic of convolutions on a GPU: full float32, TF32 tensor cores, or bfloat16 autocast. A CPU
    always uses float32 unless told bf16."""
    channels_last: bool = False
    """Keep images and convolution weights in channels-last memory order."""
    mode: Mode = "auto"
    """How a step runs. `auto` takes the fastest that works: compiled inside a CUDA graph on a GPU, eager on a
    CPU."""
    deterministic: bool = False
    """Only algorithms that give the same bits every time; slower on a GPU. On a CPU runs repeat without
    it."""
    threads: Annotated[int, at_least(0)] = 0
    """CPU threads; 0 for PyTorch's choice. A small network is often faster with one, above all on a busy
    machine."""
    sync_batchnorm: bool = False
    """Several GPUs: normalise over the whole batch instead of each process's share."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """SGD."""

    section: ClassVar[str] = "optimizer"

    lr: Annotated[float, more_than(0)] = 0.1
    """Learning rate at the start."""
    momentum: Annotated[float, between(0, 1)] = 0.9
    """Momentum of SGD."""
    nesterov: bool = True
    """Nesterov's form of momentum."""
    weight_decay: Annotated[float, at_least(0)] = 2e-4
    """PyTorch's weight decay, on weights and BatchNorm scales; shifts and biases are spared, but not by SFP, FPGM
    and L1, whose authors decay all. The paper's 0.0001 multiplies the squared norm without the usual half, which is
    0.0002 here."""

    def check(self) -> None:
        if self.nesterov and self.momentum == 0:
            raise ConfigError("optimizer.nesterov needs optimizer.momentum above 0. Got momentum = 0.")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Section):
    """The learning rate over the epochs."""

    section: ClassVar[str] = "schedule"

    kind: Literal["step", "cosine", "constant"] = "step"
    """Drops at the milestones, half a cosine from lr to `final`, or no change."""
    milestones: tuple[Annotated[int, at_least(1)], ...] = (80, 121)
    """Zero-based epochs from whose start the rate is multiplied by `factor` (`step` only)."""
    factor: Annotated[float, more_than(0)] = 0.1
    """What a milestone multiplies the rate by (`step` only)."""
    final: Annotated[float, between(0, 1)] = 0.0
    """Where the cosine ends, as a share of lr (`cosine` only)."""
    warmup_epochs: Annotated[float, at_least(0)] = 0.0
    """Epochs over which the rate first rises linearly from zero to lr."""

    def check(self) -> None:
        if any(a >= b for a, b in zip(self.milestones, self.milestones[1:], strict=False)):
            raise ConfigError(f"schedule.milestones must rise. Got {list(self.milestones)}.")


@dataclass(frozen=True, kw_only=True)
class MethodConfig(Section):
    """The pruning method."""

    section: ClassVar[str] = "method"

    name: str = "scp"
    """A name from `softprune methods`, or `dense` for a baseline without pruning."""
    strength: Annotated[float, at_least(0)] = 1e-4
    """Weight of the sparsity loss (the paper's lambda): larger prunes more. Not used with a target."""
    target: dict[str, float | str] = field(default_factory=dict)
    """Instead of a strength, a budget that the run meets (scp only): `macs`, `params`, `channels` or `latency`
    with the share to keep (0.5 or "50%") or the figure itself, as in `target = {macs = 0.5}`. Empty for
    none."""
    latency_batch: Annotated[int, at_least(1)] = 1
    """Images per forward at which a `latency` target is measured, on the run's device."""
    strength_warmup_epochs: Annotated[float, at_least(0)] = 0.0
    """Epochs over which the strength first rises linearly from zero; for starts from trained weights."""
    include: tuple[str, ...] = ()
    """Globs on BatchNorm names: prune only these. Empty for all that can be pruned."""
    exclude: tuple[str, ...] = ()
    """Globs on BatchNorm names that stay as they are."""
    round_to: Annotated[int, at_least(1)] | Literal["auto"] = 1
    """Keep widths at multiples of this; the channels least likely dead are added. `auto` times some convolutions on
    the run's device and takes the multiple that is fastest there; a run that goes on elsewhere keeps it."""
    min_channels: Annotated[int, at_least(0)] = 0
    """Keep at least this many channels at every site; sites around a depthwise convolution keep so many in common."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of the method's own, by keyword, as `softprune methods` lists them."""

    def check(self) -> None:
        if self.target:
            read_target(self.target)


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(Section):
    """Training of the compact network after the cut, without any sparsity (the paper's FT rows)."""

    section: ClassVar[str] = "finetune"

    epochs: Annotated[int, at_least(0)] = 0
    """Passes over the training images; 0 for no fine-tuning."""
    lr: Annotated[float, more_than(0)] = 0.01
    """Learning rate at the start."""
    schedule: Literal["step", "cosine", "constant"] = "cosine"
    """How the rate falls."""
    milestones: tuple[Annotated[int, at_least(1)], ...] = ()
    """Zero-based epochs from whose start the rate is divided by ten (`step` only)."""


@dataclass(frozen=True, kw_only=True)
class RecordConfig(Section):
    """What a run leaves behind."""

    section: ClassVar[str] = "records"

    checkpoint_seconds: Annotated[float, at_least(0)] = 60.0
    """Save a checkpoint when the last one is so old, so that no more than this is lost; 0 for none by time. One
    is always saved at the end, and when the run is stopped."""
    checkpoint_epochs: Annotated[int, at_least(0)] = 0
    """Also save a checkpoint at the end of every so many epochs; 0 for none by epochs."""
    checkpoint_steps: Annotated[int, at_least(0)] = 0
    """Also save a checkpoint every so many steps of an epoch; 0 for none by steps."""
    eval_epochs: Annotated[int, at_least(1)] = 1
    """Test at the end of every so many epochs; the last one is always tested."""
    tensorboard: bool = False
    """Also write TensorBoard events into the run's folder (needs the extra `softprune[tensorboard]`)."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """Everything that decides a run's outcome."""

    name: str = ""
    """The run's name in tables and its default folder; empty for the recipe's file name."""
    seed: Annotated[int, between(0, 2**31)] = 0
    """Seeds the weights, the order of the images, their augmentation and the masks' noise."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The network."""
    data: DataConfig = field(default_factory=DataConfig)
    """The images."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """The loop."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """SGD."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """The learning rate over the epochs."""
    method: MethodConfig = field(default_factory=MethodConfig)
    """The pruning method."""
    masks: MaskConfig = field(default_factory=MaskConfig)
    """The constants of SCP's masks."""
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)
    """Training of the compact network after the cut."""
    records: RecordConfig = field(default_factory=RecordConfig)
    """What the run leaves behind."""

    def check(self) -> None:
        if self.train.compact_at >= self.train.epochs:
            raise ConfigError(
                f"train.compact_at must be an epoch before train.epochs = {self.train.epochs}, since the "
                f"cut at the end happens anyway. Got {self.train.compact_at}; use 0 to cut only at the end."
            )
        if self.train.compact_at and self.method.target:
            raise ConfigError(
                "train.compact_at cannot go with method.target, which is a figure of the whole network. Got "
                f"train.compact_at = {self.train.compact_at}; use 0 to cut only at the end."
            )
        if self.train.compact_at and self.train.ema:
            raise ConfigError(
                "train.ema cannot go with train.compact_at: the cut takes the weights as they are, and the average "
                f"of the larger network would be lost. Got train.ema = {self.train.ema} and train.compact_at = "
                f"{self.train.compact_at}; set one of them to 0."
            )
        if self.data.batch_size % self.train.accumulate:
            raise ConfigError(
                f"train.accumulate must divide data.batch_size = {self.data.batch_size}. Got "
                f"{self.train.accumulate}."
            )
        if self.method.name == "dense":
            for key, value in (
                ("train.dense_baseline", self.train.dense_baseline),
                ("train.compact_at", self.train.compact_at),
                ("train.recalibrate", self.train.recalibrate),
                ("finetune.epochs", self.finetune.epochs),
                ("method.target", self.method.target),
            ):
                if value:
                    raise ConfigError(
                        f'method.name = "dense" prunes nothing, so {key} must be off. Got {key} = {value}.'
                    )
