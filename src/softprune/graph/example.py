"""The example input a user gives: a tensor, positional arguments, or positional and keyword arguments."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from softprune.errors import ModelError

ExampleLike = Any
"""A tensor, a tuple of positional arguments, or ``(args, kwargs)`` with a tuple and a dict."""


def per_sample(count: int, batch: int) -> int:
    """Return a count over a whole batch per sample; what does not depend on the batch counts unchanged."""
    return count // batch if count % batch == 0 else count


def first_floating(model: torch.nn.Module) -> Tensor | None:
    """Return the first floating parameter or buffer, which says where a network is and in which precision."""
    values = itertools.chain(model.parameters(), model.buffers())
    return next((tensor for tensor in values if tensor.is_floating_point()), None)


def leaves_of(output: Any) -> Iterator[Any]:
    """Yield what a network returns, without the containers around it, dict-likes and dataclasses included."""
    for leaf in pytree.tree_leaves(output):
        if hasattr(leaf, "keys"):  # the outputs of Hugging Face's models are both
            yield from leaves_of(dict(leaf))
        elif is_dataclass(leaf):
            yield from leaves_of([getattr(leaf, field.name, None) for field in fields(leaf)])
        else:
            yield leaf


@dataclass(frozen=True)
class Example:
    """One call of the model: ``model(*args, **kwargs)``."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, example: ExampleLike) -> Example:
        """Read what a user passes as ``example``."""
        if isinstance(example, Example):
            return example
        if isinstance(example, Tensor):
            return cls((example,), {})
        if isinstance(example, list):
            example = tuple(example)
        if not isinstance(example, tuple):
            raise ModelError(
                "`example` must be a tensor, a tuple of positional arguments, or (args, kwargs). "
                f"Got {type(example).__name__}. Pass what you would pass to the model: torch.randn(2, 3, 32, 32), "
                "(image, mask), ((), {'pixel_values': image}) for keywords, or (batch,) where one argument is a dict."
            )
        if len(example) == 2 and isinstance(example[0], tuple) and isinstance(example[1], dict):
            return cls(example[0], dict(example[1]))
        return cls(example, {})

    def tensors(self) -> list[Tensor]:
        """Return all tensors among the arguments, nested ones too."""
        return [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]

    def map(self, function: Any) -> Example:
        """Return the same call with `function` applied to every tensor."""
        args, kwargs = pytree.tree_map_only(Tensor, function, (self.args, self.kwargs))
        return Example(args, kwargs)

    def to_model(self, model: torch.nn.Module) -> Example:
        """Return the same call on the device and in the floating dtype of `model`'s parameters (or buffers)."""
        like = first_floating(model)
        if like is None:
            return self

        def move(tensor: Tensor) -> Tensor:
            dtype = like.dtype if tensor.is_floating_point() else tensor.dtype
            return tensor.detach().to(like.device, dtype)

        return self.map(move)

    def batch_size(self) -> int | None:
        """Return the common first dimension of all tensors; None where they differ or no tensor has a second one."""
        tensors = self.tensors()
        sizes = {tensor.shape[0] if tensor.ndim else None for tensor in tensors}
        return sizes.pop() if len(sizes) == 1 and any(tensor.ndim > 1 for tensor in tensors) else None

    def first(self, count: int) -> Example:
        """Return the same call on at most `count` samples, where all tensors share their first dimension."""
        batch = self.batch_size()
        return self if batch is None or batch <= count else self.with_batch(count)

    def with_batch(self, size: int) -> Example:
        """Return the same call with every tensor's first dimension repeated (or cut) to `size`."""

        def resize(tensor: Tensor) -> Tensor:
            repeats = -(-size // max(tensor.shape[0], 1))
            return tensor.repeat(repeats, *(1,) * (tensor.ndim - 1))[:size]

        return self.map(resize)
