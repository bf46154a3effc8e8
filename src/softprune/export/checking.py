"""Compare the outputs of a network with those of another runtime, on the example and on random inputs."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from softprune.cut.apply import duplicated
from softprune.cut.verify import Comparison, noise, outputs_of, shapes_of
from softprune.cut.verify import compare as distance
from softprune.errors import ModelError, VerificationError, first_line
from softprune.graph import Example
from softprune.graph.reader import first_floating
from softprune.log import get_logger
from softprune.masks import check_unmasked
from softprune.module_state import first_uninitialised, state_kept

logger = get_logger(__name__)

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference between two runtimes relative to the largest output. They add in different orders."""


def prepared(model: nn.Module, *, device: torch.device | str = "cpu") -> nn.Module:
    """Return a copy of `model` in eval mode on `device`. Raise if it has masks or uninitialised parameters."""
    check_unmasked(model, "an export")
    missing = first_uninitialised(model)
    if missing is not None:
        raise ModelError(
            "A network must have initialised parameters to be exported. Got '{}', a {} parameter. Run the network "
            "once, or load its weights.".format(*missing)
        )
    return duplicated(model).to(device).eval()


def place_of(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Return device and precision of a network."""
    like = first_floating(model)
    like = torch.empty(0) if like is None else like
    return like.device, like.dtype


def precisions(model: nn.Module) -> dict[str, torch.dtype]:
    """Return the dtypes of the floating-point parameters and buffers by name."""
    return {name: tensor.dtype for name, tensor in _tensors(model) if tensor.is_floating_point()}


def cast(model: nn.Module, dtype: torch.dtype | Mapping[str, torch.dtype]) -> nn.Module:
    """Convert the floating-point parameters and buffers of `model` in place, to one dtype or by name.

    A tensor without an entry, such as a bias from folding, gets the dtype of its layer's weight.
    """
    for name, tensor in _tensors(model):
        if tensor.is_floating_point():
            own = dtype
            if isinstance(own, Mapping):
                weight = f"{name.rpartition('.')[0]}.weight".lstrip(".")
                own = own.get(name) or own.get(weight, tensor.dtype)
            tensor.data = tensor.data.to(own)
    return model


def exact(model: nn.Module, given: Example) -> tuple[nn.Module, Example]:
    """Return a copy of `model` in float64 with its example.

    A network that does not run in float64 keeps its precision, and the log says so.
    """
    device, own = place_of(model)
    wide = cast(prepared(model, device=device), torch.float64)
    try:
        with state_kept(wide):
            outputs_of(wide, given.to_model(wide))
    except Exception as error:
        logger.info("the network does not run in float64 (%s); verifying it in %s", first_line(error), own)
        wide = prepared(model, device=device)
    return wide, given.to_model(wide)


def trials(example: Example, *, other_batch: bool) -> list[Example]:
    """Return the example, random inputs of its size, and random inputs of other batch sizes."""
    batch = example.batch_size()
    sizes = [size for size in (1, 5, 3) if size != batch][:2] if other_batch and batch is not None else []
    return [example, *(noise(each, 0, scales=(1.0,)) for each in (example, *map(example.with_batch, sizes)))]


def compare_outputs(
    model: nn.Module,
    runtime: Callable[[Example], Sequence[Tensor]],
    attempts: Sequence[Example],
    *,
    what: str,
    tolerance: float | None = None,
) -> Comparison:
    """Run both on every input. Raise a VerificationError where they differ by more than `tolerance`."""
    worst, scale, tried = 0.0, 0.0, []
    for attempt in attempts:
        shape = shapes_of(attempt)
        try:
            expected = outputs_of(model, attempt)
            difference, size = distance(expected, runtime(attempt))
        except Exception as error:
            # An exporter may fix a batch size that was declared dynamic without an error.
            if attempt.batch_size() == attempts[0].batch_size():
                raise
            raise ModelError(
                f"{what} with a dynamic batch size must accept any. Got {type(error).__name__} for "
                f"{type(model).__name__} on input {shape}: {first_line(error)}. "
                "If forward() fixes the batch size, pass dynamic_batch=False."
            ) from error
        usual = max((TOLERANCES.get(output.dtype, 0.0) for output in expected), default=0.0)
        limit = usual if tolerance is None else tolerance
        if not difference <= limit * max(size, 1e-30):
            raise VerificationError(
                f"{what} must compute what the network computes, within {limit:g} of its output. Got a difference of "
                f"{difference:.3g} at output scale {size:.3g} on input {shape}. Nothing was written."
            )
        if difference * scale >= worst * size:
            worst, scale = difference, size
        tried.append(shape)
    return Comparison(worst, scale, tuple(tried))


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]
