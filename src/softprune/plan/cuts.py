"""What one module or parameter keeps: the pieces of a plan."""

from __future__ import annotations

from dataclasses import dataclass

Indices = tuple[int, ...]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class ModuleCut:
    """What one module keeps. Indices count the dense module's channels."""

    kind: str
    width_in: int
    width_out: int
    inputs: Indices
    outputs: Indices
    groups: int = 1
    """Groups of the convolution after the cut."""
    select: Indices | None = None
    """Positions in the compact input tensor that this module reads; None: all of it, in order."""
    source_width: int = 0
    """Width of the compact input tensor, where `select` is given."""
    void: bool = False
    """The module computes nothing any more: it gives a constant."""
    folded: bool = False
    """Inputs that were constant moved into the bias (which the module has then)."""
    zeroed: Indices = ()
    """Outputs of a masked BatchNorm that stay for the shapes' sake, with scale and shift zero."""

    @property
    def changes(self) -> bool:
        """Whether the module is touched at all."""
        whole = len(self.inputs) == self.width_in and len(self.outputs) == self.width_out
        return not whole or self.select is not None or self.void or self.folded or bool(self.zeroed)


@dataclass(frozen=True, kw_only=True)
class ParameterCut:
    """What a parameter outside known modules keeps, along one dimension."""

    dim: int
    width: int
    kept: Indices
