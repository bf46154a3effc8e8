"""How one tensor of a module shrinks under its cut: the same rule for weights, statistics and optimizer state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from softprune.plan import ModuleCut, ParameterCut, PrunePlan


def take(tensor: Tensor, dim: int, kept: Sequence[int]) -> Tensor:
    """The entries `kept` of `tensor` along `dim`, as a new tensor."""
    if len(kept) == tensor.shape[dim]:
        return tensor.detach().clone()
    index = torch.tensor(kept, dtype=torch.long, device=tensor.device)
    return tensor.detach().index_select(dim, index)


def slice_tensor(cut: ModuleCut, attribute: str, tensor: Tensor) -> Tensor:
    """The part of a module's own parameter or buffer that stays, in its memory format."""
    if tensor.ndim == 0:
        return tensor.detach().clone()
    if cut.kind in ("norm", "source"):
        return take(tensor, 0, cut.outputs)
    if attribute == "weight":
        return _as_before(tensor, _slice_weight(cut, tensor))
    if attribute == "bias":
        return take(tensor, 0, cut.outputs)
    return tensor.detach().clone()


def _slice_weight(cut: ModuleCut, weight: Tensor) -> Tensor:
    transposed = cut.kind == "conv_transpose"
    rows, columns = (cut.inputs, cut.outputs) if transposed else (cut.outputs, cut.inputs)
    columns_wide = cut.width_out if transposed else cut.width_in
    groups = columns_wide // weight.shape[1]
    if groups == 1:
        return take(take(weight, 0, rows), 1, columns)
    row_size, column_size = weight.shape[0] // groups, weight.shape[1]
    if column_size == 1:  # a group that stays keeps its one column
        return take(weight, 0, rows)
    own_rows: dict[int, list[int]] = {}
    for row in rows:
        own_rows.setdefault(row // row_size, []).append(row)
    own_columns: dict[int, list[int]] = {group: [] for group in own_rows}
    for column in columns:
        own_columns[column // column_size].append(column % column_size)
    return torch.cat([take(take(weight, 0, own_rows[group]), 1, own_columns[group]) for group in own_rows])


def _as_before(before: Tensor, after: Tensor) -> Tensor:
    """`after` in the memory format of `before`."""
    for rank, memory_format in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if (
            before.ndim == rank
            and not before.is_contiguous()
            and before.is_contiguous(memory_format=memory_format)
        ):
            return after.contiguous(memory_format=memory_format)
    return after.contiguous()


def slice_named(plan: PrunePlan, name: str, tensor: Tensor) -> Tensor | None:
    """The part of the dense model's parameter `name` (or of a tensor of its shape) that stays; None if it goes."""
    loose: Mapping[str, ParameterCut] = plan.parameters
    if name in loose:
        return take(tensor, loose[name].dim, loose[name].kept)
    path, _, attribute = name.rpartition(".")
    cut = plan.modules.get(plan.aliases.get(path, path))
    if cut is None:
        return tensor.detach().clone()
    return None if cut.void else slice_tensor(cut, attribute, tensor)
