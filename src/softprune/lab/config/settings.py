"""The configuration of a run: one validated model per section of a recipe. Does not import PyTorch.

The defaults are the authors' CIFAR settings (SGD with Nesterov momentum, batch size 64, 160 epochs, the learning
rate divided by 10 at epochs 80 and 121), so a recipe lists only what differs.
"""

import difflib
import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from softprune.errors import ConfigError, show
from softprune.mask_config import GateStatistics
from softprune.target import FINAL_AT, read_target

Mode = Literal["auto", "eager", "graph", "compile"]
ScheduleKind = Literal["step", "cosine", "constant"]

BASELINE = "baseline"
"""Value of `model.weights` and `distill.teacher`: the dense network that `train.dense_baseline` trains first."""
START = "start"
"""Value of `distill.teacher`: the network in `model.weights`."""

PRUNING_SETTINGS = "train.dense_baseline", "train.dense_epochs", "train.compact_at", "finetune.epochs", "method.target"
"""Settings that must be off in a run without pruning."""


class Section(BaseModel):
    """A section of a recipe: immutable, and validated on construction, from Python or from TOML.

    The annotations define the valid values, and the docstring below a field is its description in docs/recipes.md. The
    title is the section's key in a recipe; the top level has none.
    """

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            # Pydantic's own messages speak of Python types, which do not help the author of a TOML file.
            raise _to_config_error(error.errors()[0], type(self)) from None

    def replace(self, **changes: Any) -> Self:
        """Return a copy with ``changes``, validated like a new section."""
        return type(self)(**{**dict(self), **changes})


FromList = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
"""Convert lists, which TOML uses, to the declared tuple."""

Count = Annotated[int, Ge(0)]
PositiveCount = Annotated[int, Ge(1)]
Amount = Annotated[float, Ge(0)]
Positive = Annotated[float, Gt(0)]
Share = Annotated[float, Ge(0), Lt(1)]
Globs = Annotated[tuple[str, ...], FromList]
Epochs = Annotated[tuple[PositiveCount, ...], FromList]
_Plain = bool | int | float | str
Options = dict[str, _Plain | list[_Plain] | dict[str, _Plain | list[_Plain]]]


def _to_config_error(error: ErrorDetails, section: type[Section]) -> ConfigError:
    """Convert pydantic's first error in a section to a ConfigError in terms of recipe keys."""
    if "error" in error.get("ctx", {}):
        return ConfigError(str(error["ctx"]["error"]))  # raised by a nested section or a model validator
    (field, *inside), title = error["loc"], section.model_config.get("title")
    key = f"{title}.{field}" if title else str(field)
    if error["type"] == "extra_forbidden":
        return _unknown_key(key, RunConfig if title else section)
    if error["type"] == "model_type":
        return ConfigError(f"{key} is a section: write [{key}] or {key}.NAME = ... Got {show(error['input'])}.")
    origin = get_origin(section.model_fields[str(field)].annotation)
    key += f"[{inside[0]}]" if inside and origin is tuple else f".{inside[0]}" if inside and origin is dict else ""
    rule = error["msg"].replace("Input should be", "must be").replace("Field required", "must be given")
    rule = rule.replace("dictionary", "table").replace("tuple", "list")
    hint = f" Write {key}.NAME = ... for each of its values." if origin is dict and not inside else ""
    return ConfigError(f"{key} {rule}. Got {show(error['input'])}.{hint}")


def keys_of(section: type[Section], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, annotation) of every setting in ``section`` and its subsections, in declaration order."""
    for name, field in section.model_fields.items():
        if isinstance(field.default, Section):
            yield from keys_of(type(field.default), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field.annotation


def _unknown_key(key: str, root: type[Section]) -> ConfigError:
    """Return the error for a key that ``root`` does not have, with a suggestion."""
    known = [name for name, _ in keys_of(root)]
    section, _, last = key.rpartition(".")
    sections = list(dict.fromkeys(name.partition(".")[0] for name in known))
    here = [name for name in known if section and name.rpartition(".")[0] == section]
    # For a key in the wrong section (`train.lr`), the last part is a better hint than the spelling.
    meant = [name for name in known if name.rpartition(".")[2] == last]
    meant = meant or difflib.get_close_matches(key, here or [*known, *sections], n=1, cutoff=0.8)
    hint = (
        f" Did you mean {' or '.join(map(repr, meant[:3]))}?"
        if meant
        else f" Known here: {', '.join(here or sections)}."
    )
    return ConfigError(f"A recipe must only have keys that exist. Got {show(key)}.{hint}")


def known_settings(values: Any, section: "type[Section] | None" = None) -> Any:
    """Return the settings of a record without those that this version of softprune does not have."""
    if not isinstance(values, Mapping):
        return values
    fields, known = (section or RunConfig).model_fields, dict[str, Any]()
    for key in values.keys() & fields.keys():
        default = fields[key].default
        known[key] = known_settings(values[key], type(default)) if isinstance(default, Section) else values[key]
    return known


class ModelConfig(Section, title="model"):
    """The network."""

    name: str = "digits_net"
    """A name from `softprune models`, or your own factory `module:factory`, called with `num_classes`."""
    options: Options = Field(default_factory=dict)
    """Additional keyword arguments for the factory, such as `{width = 32}`."""
    pretrained: bool = False
    """Start from the factory's pretrained weights, requested with `pretrained=True` (timm) or `weights="DEFAULT"`
    (torchvision). If the number of classes differs, the classifier is initialised at random."""
    weights: str = ""
    """Initial weights: a `.safetensors` file, a file with a PyTorch state_dict, or the folder of another run (its
    newest checkpoint). Relative paths start at the current folder. `baseline` starts from the network that
    `train.dense_baseline` trains first; with `pretrained`, that baseline starts from the pretrained weights. Empty for
    random weights."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.pretrained and self.weights not in ("", BASELINE):
            raise ConfigError(
                "model.pretrained and model.weights exclude each other: both set the initial weights. Got "
                f"model.weights = {self.weights!r}; remove one of them."
            )
        return self


class DataConfig(Section, title="data"):
    """The images."""

    name: str = "digits"
    """`digits`, `cifar10`, `cifar100`, `folder` for images in the ImageNet layout, or your own `module:factory`, which
    returns the training and the test set (docs/data.md)."""
    options: Options = Field(default_factory=dict)
    """Additional keyword arguments for the factory, such as `{fold = 3}`."""
    dir: str = ""
    """Folder of the image files, also set by `--data-dir`. Not needed for `digits`, which is bundled."""
    batch_size: PositiveCount = 64
    """Images per optimizer step, summed over all processes."""
    holdout: Count = 0
    """Number of training images to hold out, drawn at random from `seed`; 0 for none. Each epoch is evaluated on them
    and the best epoch is chosen on them. The test images are then used only once, for the final table."""
    augment: bool = True
    """Apply the usual random crops and flips of the data set."""
    erasing: Annotated[float, Ge(0), Le(1)] = 0.0
    """Probability of random erasing, which sets a random rectangle to the mean colour. Requires `augment`."""
    image_size: Annotated[int, Ge(8), Le(4096)] = 224
    """Height and width in pixels to which images from files are cropped."""
    in_memory: bool = False
    """Decode the images of a folder once and keep them in the memory of the training device, which also crops them.
    All images must have the same size. No loader processes are needed during training."""
    workers: Annotated[int, Ge(0), Le(256)] = 8
    """Loader processes for images in files, at most one per core. Data sets in memory need none. May be changed when
    resuming."""


class TrainConfig(Section, title="train"):
    """The training loop."""

    epochs: Count = 160
    """Training epochs. 0 prunes trained weights (`model.weights`, `model.pretrained`) in one shot and then fine-tunes;
    only for methods that rank channels."""
    dense_baseline: bool = False
    """First train the same network without pruning, in the run's folder `dense/`, for comparison."""
    dense_epochs: Count = 0
    """Epochs of the dense baseline; 0 for the value of `epochs`."""
    compact_at: Count = 0
    """Remove the dead channels before this epoch and continue with the smaller network; 0 removes them only at the
    end. With a target, at least 0.6 of `epochs`; the smaller network then trains without a sparsity loss."""
    label_smoothing: Share = 0.0
    """Label smoothing of the cross-entropy loss."""
    precision: Literal["fp32", "tf32", "bf16"] = "tf32"
    """Precision of convolutions and matrix products on a GPU: float32, TF32 or bfloat16 autocast. On a CPU, `tf32`
    means float32, and `bf16` evaluates in float32 unless the CPU computes bfloat16 natively."""
    mode: Mode = "auto"
    """How training steps run: `eager`; `graph`, captured as a CUDA graph on one GPU, ready in seconds; or `compile`,
    compiled and captured, the fastest after about a minute. `auto` is `compile` on a GPU and `eager` on a CPU. If a
    mode fails, the next simpler one is used."""
    deterministic: bool = False
    """Use only deterministic algorithms, which are slower on a GPU. Runs on a CPU are reproducible without it."""
    threads: Annotated[int, Ge(0), Le(1024)] = 0
    """CPU threads; 0 for PyTorch's default. A small network is often faster with one thread."""


class OptimizerConfig(Section, title="optimizer"):
    """The optimizer."""

    name: Literal["sgd", "adamw"] = "sgd"
    """SGD with Nesterov momentum 0.9, or AdamW."""
    lr: Positive = 0.1
    """Initial learning rate, after the warm-up."""
    weight_decay: Amount = 2e-4
    """Weight decay as in PyTorch, applied to weights and BatchNorm scales. Shifts and biases are not decayed, except
    with SFP, FPGM and L1, whose authors decay all parameters. The paper's 0.0001 multiplies the squared norm without
    the factor 1/2, so it is 0.0002 here."""


class ScheduleConfig(Section, title="schedule"):
    """The learning rate schedule."""

    kind: ScheduleKind = "step"
    """`step` decays the learning rate at the milestones, `cosine` anneals it to zero, `constant` keeps it."""
    milestones: Epochs = (80, 121)
    """Epochs, counted from zero, at whose start the learning rate is multiplied by `factor` (`step` only)."""
    factor: Positive = 0.1
    """Multiplicative factor of the learning rate at each milestone (`step` only)."""
    warmup_epochs: Amount = 0.0
    """Length of the linear warm-up from zero to `lr`, in epochs."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if any(a >= b for a, b in zip(self.milestones, self.milestones[1:], strict=False)):
            raise ConfigError(f"schedule.milestones must be in increasing order. Got {list(self.milestones)}.")
        return self


class MethodConfig(Section, title="method"):
    """The pruning method."""

    name: str = "scp"
    """A name from `softprune methods`, `dense` for training without pruning, or your own pruner `module:Class`
    (docs/own-method.md)."""
    strength: Amount = 1e-4
    """Sparsity strength (the paper's lambda), the factor of the sparsity loss. A larger strength removes more channels.
    Not used with a target."""
    target: dict[str, float | str] = Field(default_factory=dict)
    """Limit of the compact network, instead of a strength: a metric (docs/budgets.md lists them) with the share to keep
    (0.5 or "50%") or an absolute value, as in `target = {macs = 0.5}`. Empty for none."""
    latency_table: str = ""
    """File of latencies measured by softprune.budget.latency_table, for a `latency` target on another machine."""
    exclude: Globs = ()
    """Glob patterns of names of BatchNorms that are not pruned."""
    round_to: PositiveCount | Literal["auto", ""] = ""
    """Round the number of kept channels to multiples of this. `auto` is 32 on a GPU and 16 on a CPU, halved until most
    sites have at least twice as many channels; a resumed run keeps its value. Empty: 8 with a target if most sites have
    at least 32 channels, otherwise 1."""
    options: Options = Field(default_factory=dict)
    """Additional keyword arguments for the method; `softprune methods` lists them."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.target:
            read_target(self.target)
        if self.latency_table and "latency" not in self.target:
            raise ConfigError(f"method.latency_table needs a latency target. Got target = {show(self.target)}.")
        return self


class MaskSection(Section, title="masks"):
    """Constants of SCP's masks and sparsity loss. MaskConfig documents them and has further ones."""

    delta: Annotated[float, Gt(0), Lt(1)] = 0.05
    """A channel counts as dead if the activation's output stays within `delta` of zero."""
    s: Amount = 2.0
    """Weight of the absolute scale relative to the shift in the sparsity loss: the number of standard deviations of the
    channel that should lie below the threshold. The paper's CIFAR-100 runs use 3."""
    gate_statistics: GateStatistics = "both"
    """Which running statistics are not updated while a channel's sampled mask is off: `both`; `mean`, as in the
    authors' VGG networks, whose running variance is always updated; or `none`, as in plain BatchNorm."""
    use_relu: bool = True
    """False is the paper's ablation "SCP without ReLU": use the BatchNorm alone, with two-sided thresholds."""


class DistillConfig(Section, title="distill"):
    """Knowledge distillation from a trained dense network."""

    teacher: str = ""
    """The teacher: `baseline` for the network that `train.dense_baseline` trains first, `start` for the one in
    `model.weights`, the folder of a finished dense run, or a file with weights. Empty for no distillation."""
    weight: Annotated[float, Gt(0), Le(1)] = 0.5
    """Weight of the distillation loss; the cross-entropy has one minus this weight."""
    temperature: Positive = 2.0
    """Softmax temperature of teacher and student in the distillation loss."""


class FinetuneConfig(Section, title="finetune"):
    """Fine-tuning of the compact network after the cut, without a sparsity loss (the paper's FT rows)."""

    epochs: Count = 0
    """Fine-tuning epochs; 0 for none."""
    lr: Positive = 0.01
    """Initial learning rate."""
    schedule: ScheduleKind = "cosine"
    """Learning rate schedule, as `kind` in `[schedule]`."""
    milestones: Epochs = ()
    """Epochs of fine-tuning, counted from zero, at whose start the learning rate is divided by 10 (`step` only)."""


class RecordConfig(Section, title="records"):
    """Checkpoints and evaluation."""

    checkpoint_seconds: Amount = 60.0
    """Save a checkpoint every `checkpoint_seconds`; 0 to disable. One is always saved at the end of a run and when it
    is stopped."""
    checkpoint_epochs: Count = 0
    """Also save a checkpoint every `checkpoint_epochs` epochs; 0 to disable."""
    eval_epochs: PositiveCount = 1
    """Evaluate every `eval_epochs` epochs; the last epoch is always evaluated."""


class RunConfig(Section):
    """The complete configuration of a run."""

    name: str = ""
    """Name of the run in tables and of its folder; empty for the file name of the recipe."""
    seed: Annotated[int, Ge(0), Lt(2**31)] = 0
    """Seed of the initial weights, the order and augmentation of the images, and the noise of the masks."""
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
        epochs, compact_at, given = self.train.epochs, self.train.compact_at, self.method.options.get("final_at")
        final_at = float(given) if isinstance(given, int | float) else FINAL_AT
        if compact_at and compact_at >= epochs:
            raise ConfigError(
                f"train.compact_at must be an epoch before train.epochs = {epochs}, since the network is always cut at "
                f"the end. Got {compact_at}; use 0 to cut only at the end."
            )
        if self.method.target and 0 < compact_at < final_at * epochs:
            raise ConfigError(
                f"With method.target, train.compact_at must be at least final_at = {final_at:g} of train.epochs "
                f"= {epochs}, where the cut becomes final. Got {compact_at}; use {math.ceil(final_at * epochs)}."
            )
        if self.distill.teacher and self.train.label_smoothing:
            raise ConfigError(
                "distill.teacher and train.label_smoothing exclude each other: both soften the labels. Got "
                f"train.label_smoothing = {self.train.label_smoothing}; set it to 0."
            )
        for key in PRUNING_SETTINGS if self.method.name == "dense" else ():
            if value := self.setting(key):
                raise ConfigError(
                    f'method.name = "dense" does not prune, so {key} must be off. Got {key} = {show(value)}.'
                )
        needing = [key for key in ("distill.teacher", "model.weights") if self.setting(key) == BASELINE]
        needing += ["train.dense_epochs"] if self.train.dense_epochs else []
        if needing and not self.train.dense_baseline:
            raise ConfigError(
                f"{needing[0]} = {show(self.setting(needing[0]))} needs the dense baseline. Got train.dense_baseline = "
                "false; set it to true."
            )
        return self

    def setting(self, key: str) -> Any:
        """Return the value of a dotted key."""
        section, _, name = key.partition(".")
        return getattr(getattr(self, section), name)
