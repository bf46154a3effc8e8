"""The sections [method] and [masks] of a recipe: what prunes the network, and the constants of SCP's masks."""

import ast
import dataclasses
import inspect
import itertools
from typing import TYPE_CHECKING, Annotated, Literal, Self

from annotated_types import Ge, Gt, Le, Lt
from pydantic import Field, create_model, model_validator

from softprune.errors import ConfigError, show
from softprune.lab.config.schema import Amount, Count, Globs, Options, PositiveCount, Section
from softprune.mask_config import MaskConfig
from softprune.target import FINAL_AT, read_target

TITLES = {
    "scp": "SCP",
    "scp-target": "SCP (target ratio)",
    "slimming": "Slimming",
    "sfp": "SFP",
    "fpgm": "FPGM",
    "sss": "SSS",
    "variational": "Variational Pruning",
    "l1": "L1",
    "random": "Random",
    "scratch": "Same shape from scratch",
}
"""The names of the methods in tables. They stand here, not at the methods, since a report is written without torch."""


def _docstrings(cls: type) -> dict[str, str]:
    """Return the docstring under each field of a dataclass."""
    (tree,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(tree, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(below.value.value)
        for field, below in itertools.pairwise(tree.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
    }


if TYPE_CHECKING:
    MaskSection = MaskConfig
else:

    class _Masks(Section, section="masks"):
        __doc__ = MaskConfig.__doc__

    MaskSection = create_model(
        "MaskSection",
        __base__=_Masks,
        __doc__=MaskConfig.__doc__,
        __cls_kwargs__={"section": "masks"},
        **{
            each.name: (each.type, Field(each.default, description=_docstrings(MaskConfig)[each.name], **each.metadata))
            for each in dataclasses.fields(MaskConfig)
        },
    )
    """The section [masks]: the fields of MaskConfig with its rules."""


class MethodConfig(Section, section="method"):
    """The pruning method."""

    removed = {"strength_warmup_epochs": 0.0}  # noqa: RUF012  (pydantic must not take it for a setting)

    name: str = "scp"
    """A name from `softprune methods`, `dense` for a baseline without pruning, or `module:Class` for a pruner of your
    own (docs/own-method.md)."""
    strength: Amount = 1e-4
    """Weight of the sparsity loss (the paper's lambda): larger prunes more. Not used with a target."""
    target: dict[str, float | str] = Field(default_factory=dict)
    """Instead of a strength, a budget that the run meets: a quantity (docs/budgets.md lists them) with the share to
    keep (0.5 or "50%") or the figure itself, as in `target = {macs = 0.5}`. Empty for none."""
    cost_weighting: Annotated[float, Ge(0), Le(1)] = 0.0
    """Exponent a of the cost in the sparsity loss: the strength of a channel is proportional to (MACs that its
    removal saves) to the power a, or to what the target measures. 0 gives all channels the same strength."""
    final_at: Annotated[float, Gt(0), Lt(1)] = FINAL_AT
    """Share of the training after which the cut of a target is final, at the latest. Give less when trained weights are
    pruned in few epochs: the compact network then has longer to recover."""
    latency_batch: PositiveCount = 1
    """Images per forward pass at which a `latency` target is measured, on the device of the run."""
    latency_table: str = ""
    """For a `latency` target of another machine, the file of what softprune.budget.latency_table measured there; it is
    used instead of a measurement."""
    include: Globs = ()
    """Globs on BatchNorm names: prune only these. Empty for all that can be pruned."""
    exclude: Globs = ()
    """Globs on BatchNorm names that are not pruned."""
    round_to: PositiveCount | Literal["auto"] = 1
    """Keep widths at multiples of this; the channels least likely dead are added. `auto` takes 32 on
    a GPU and 16 on a CPU, halved until most sites hold it twice; a run resumed elsewhere keeps it."""
    min_channels: Count = 0
    """Keep at least this many channels at every site; sites around a depthwise convolution keep them in common."""
    options: Options = Field(default_factory=dict)
    """Settings of the method itself, by keyword, as `softprune methods` lists them."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.target:
            read_target(self.target)
        if self.latency_table and ("latency" not in self.target or self.latency_batch != 1):
            raise ConfigError(
                "method.latency_table is for a target of latency, and has a batch size of its own. Got target = "
                f"{show(self.target)} and latency_batch = {self.latency_batch}; leave one of them out."
            )
        return self
