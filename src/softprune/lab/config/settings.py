"""The configuration of a run: one typed model per section of a recipe, which checks its values. Imports no PyTorch.

The defaults are the authors' CIFAR settings (SGD with Nesterov momentum, batch 64, 160 epochs, the learning
rate divided by ten at epochs 80 and 121), so that a recipe holds only what differs.
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
"""`model.weights` and `distill.teacher` for the dense network that `train.dense_baseline` trains first."""
START = "start"
"""`distill.teacher` for the network that `model.weights` names."""

PRUNING_SETTINGS = "train.dense_baseline", "train.dense_epochs", "train.compact_at", "finetune.epochs", "method.target"
"""What must be off in a run without pruning."""


class Section(BaseModel):
    """A section of a recipe: immutable, and checked when it is made in Python or read from TOML.

    The annotations are the rules, and the docstring under a field is its description in docs/recipes.md. The title is
    the key of the section in a recipe; the top level has none.
    """

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            # TypeErrors and the like of pydantic mean nothing to who writes recipes.
            raise _to_config_error(error.errors()[0], type(self)) from None

    def replace(self, **changes: Any) -> Self:
        """Return a copy with ``changes``, checked as a new section is."""
        return type(self)(**{**dict(self), **changes})


FromList = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
"""Accept a list, which is what TOML has, where a tuple is declared."""

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
    """Return the first error of a section, in the words of a recipe."""
    if "error" in error.get("ctx", {}):
        return ConfigError(str(error["ctx"]["error"]))  # from a section inside, or a rule over several keys
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
    """Yield every key that can be set below ``section``, dotted, with its annotation, in the order of the file."""
    for name, field in section.model_fields.items():
        if isinstance(field.default, Section):
            yield from keys_of(type(field.default), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field.annotation


def _unknown_key(key: str, root: type[Section]) -> ConfigError:
    """Return the error for a key that ``root`` does not have, with the closest one that it has."""
    known = [name for name, _ in keys_of(root)]
    section, _, last = key.rpartition(".")
    sections = list(dict.fromkeys(name.partition(".")[0] for name in known))
    here = [name for name in known if section and name.rpartition(".")[0] == section]
    # A key in the wrong section (`train.lr`) is nearer by its last part than by its spelling.
    meant = [name for name in known if name.rpartition(".")[2] == last]
    meant = meant or difflib.get_close_matches(key, here or [*known, *sections], n=1, cutoff=0.8)
    hint = (
        f" Did you mean {' or '.join(map(repr, meant[:3]))}?"
        if meant
        else f" Known here: {', '.join(here or sections)}."
    )
    return ConfigError(f"A recipe must only have keys that exist. Got {show(key)}.{hint}")


def known_settings(values: Any, section: "type[Section] | None" = None) -> Any:
    """Return the settings in a record that this version has: those of other versions have no effect."""
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


class DataConfig(Section, title="data"):
    """The images."""

    name: str = "digits"
    """`digits`, `cifar10`, `cifar100`, `folder` for images in the ImageNet layout, or `module:factory` for a function
    of your own that returns training and test set (docs/data.md)."""
    options: Options = Field(default_factory=dict)
    """Further keyword arguments of the factory, such as `{fold = 3}`."""
    dir: str = ""
    """Where the files are; `--data-dir` sets it. Not needed for the digits, which come with softprune."""
    batch_size: PositiveCount = 64
    """Images per optimizer step, over all processes together."""
    holdout: Count = 0
    """Training images that are left out of training; 0 for none. Every epoch is evaluated on them, and the best one is
    chosen on them; the test images are used once, for the final table. They are drawn at random from `seed`."""
    augment: bool = True
    """Random crops and flips as is usual for the data set."""
    erasing: Annotated[float, Ge(0), Le(1)] = 0.0
    """Probability of random erasing: a random rectangle of the image is set to the mean colour. Needs
    `augment`."""
    image_size: Annotated[int, Ge(8), Le(4096)] = 224
    """Side of the square that images in files are cropped to."""
    in_memory: bool = False
    """Decode the images of a folder once, and keep them on the device that trains, which then crops them itself. All
    images must have one size. No loader process is needed during training."""
    workers: Annotated[int, Ge(0), Le(256)] = 8
    """Loader processes for images in files, at most one per core; data sets in memory need none. May change when a run
    is resumed."""


class TrainConfig(Section, title="train"):
    """The training loop."""

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
    mode: Mode = "auto"
    """How a step runs: `eager`; `graph`, captured on one GPU as a CUDA graph, which is ready in seconds; or `compile`,
    compiled and captured, the fastest after a minute. `auto` compiles on a GPU. Where a mode fails, the simpler one is
    taken."""
    deterministic: bool = False
    """Use only algorithms that give the same bits every time; slower on a GPU. On a CPU runs repeat without it."""
    threads: Annotated[int, Ge(0), Le(1024)] = 0
    """CPU threads; 0 for PyTorch's choice. A small network is often faster with one, above all on a busy
    machine."""


class OptimizerConfig(Section, title="optimizer"):
    """The optimizer."""

    name: Literal["sgd", "adamw"] = "sgd"
    """SGD with Nesterov momentum of 0.9, or AdamW."""
    lr: Positive = 0.1
    """Learning rate at the start."""
    weight_decay: Amount = 2e-4
    """PyTorch's weight decay, on weights and BatchNorm scales; shifts and biases have none, except with SFP, FPGM and
    L1, whose authors decay all parameters. The paper's 0.0001 multiplies the squared norm without the usual half,
    which is 0.0002 here."""


class ScheduleConfig(Section, title="schedule"):
    """The learning rate over the epochs."""

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


class MethodConfig(Section, title="method"):
    """The pruning method."""

    name: str = "scp"
    """A name from `softprune methods`, `dense` for a baseline without pruning, or `module:Class` for a pruner of your
    own (docs/own-method.md)."""
    strength: Amount = 1e-4
    """Weight of the sparsity loss (the paper's lambda): larger prunes more. Not used with a target."""
    target: dict[str, float | str] = Field(default_factory=dict)
    """Instead of a strength, a budget that the run meets: a quantity (docs/budgets.md lists them) with the share to
    keep (0.5 or "50%") or the figure itself, as in `target = {macs = 0.5}`. Empty for none."""
    latency_table: str = ""
    """For a `latency` target of another machine, the file of what softprune.budget.latency_table measured there; it is
    used instead of a measurement."""
    exclude: Globs = ()
    """Globs on BatchNorm names that are not pruned."""
    round_to: PositiveCount | Literal["auto", ""] = ""
    """Keep widths at multiples of this. `auto` takes 32 on a GPU and 16 on a CPU, halved until most sites hold it
    twice; a run resumed elsewhere keeps it. Empty: with a target 8, if most sites have 32 channels; else 1."""
    options: Options = Field(default_factory=dict)
    """Settings of the method itself, by keyword, as `softprune methods` lists them."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.target:
            read_target(self.target)
        if self.latency_table and "latency" not in self.target:
            raise ConfigError(f"method.latency_table is for a target of latency. Got target = {show(self.target)}.")
        return self


class MaskSection(Section, title="masks"):
    """Constants of SCP's masks and of its sparsity loss; MaskConfig explains them and has the others."""

    delta: Annotated[float, Gt(0), Lt(1)] = 0.05
    """A channel counts as dead where the output of the activation stays within `delta` of zero."""
    s: Amount = 2.0
    """Weight of the absolute scale beside the shift in the sparsity loss: how many standard deviations of the channel
    should lie below the threshold. The paper's CIFAR-100 runs used 3."""
    gate_statistics: GateStatistics = "both"
    """Which running statistics are not updated in a channel whose sample is off: `both`; `mean`, as in the authors' VGG
    networks, whose running variance is updated in every step; or `none`, as in plain BatchNorm."""
    use_relu: bool = True
    """False is the paper's ablation "SCP without ReLU": decide from BatchNorm alone, two-sided everywhere."""


class DistillConfig(Section, title="distill"):
    """Distillation: the network also learns from the outputs of a trained dense network."""

    teacher: str = ""
    """The trained dense network: `baseline` for the one that `train.dense_baseline` trains first, `start` for the one
    that `model.weights` names, the folder of another run, or a file with its weights. Empty for no distillation."""
    weight: Annotated[float, Gt(0), Le(1)] = 0.5
    """Share of the distillation loss; the rest is the cross-entropy with the labels."""
    temperature: Positive = 2.0
    """Temperature that softens the outputs of both networks in the distillation loss."""


class FinetuneConfig(Section, title="finetune"):
    """Training of the compact network after the cut, without any sparsity (the paper's FT rows)."""

    epochs: Count = 0
    """Passes over the training images; 0 for no fine-tuning."""
    lr: Positive = 0.01
    """Learning rate at the start."""
    schedule: ScheduleKind = "cosine"
    """How the rate falls."""
    milestones: Epochs = ()
    """Zero-based epochs from whose start the rate is divided by ten (`step` only)."""


class RecordConfig(Section, title="records"):
    """What a run writes besides its result."""

    checkpoint_seconds: Amount = 60.0
    """Save a checkpoint when the last one is this old, so that no more than this is lost; 0 for none by time. One is
    always saved at the end, and when the run is stopped."""
    checkpoint_epochs: Count = 0
    """Also save a checkpoint after every this many epochs; 0 for none by epochs."""
    eval_epochs: PositiveCount = 1
    """Evaluate after every this many epochs; the last epoch is always evaluated."""


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
                f"= {epochs}: the cut is final from there on. Got {compact_at}; use {math.ceil(final_at * epochs)}."
            )
        if self.distill.teacher and self.train.label_smoothing:
            raise ConfigError(
                "distill.teacher and train.label_smoothing exclude each other: both soften the labels. Got "
                f"train.label_smoothing = {self.train.label_smoothing}; set it to 0."
            )
        for key in PRUNING_SETTINGS if self.method.name == "dense" else ():
            if value := self.setting(key):
                raise ConfigError(
                    f'method.name = "dense" prunes nothing: {key} must be off. Got {key} = {show(value)}.'
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
