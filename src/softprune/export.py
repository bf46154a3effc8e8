"""ONNX export, verified in ONNX Runtime before the file is written, and BatchNorm folding."""

import inspect
import logging
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from softprune.cut.apply import HISTORY, duplicated, parents_of
from softprune.cut.verify import Comparison, changed_and_verified, compare, noise, outputs_of, shapes_of, worst_of
from softprune.devices import WIDTH_MULTIPLE, disliked_widths
from softprune.errors import ConfigError, ModelError, SoftpruneError, VerificationError, first_line, import_optional
from softprune.graph import Example, ExampleLike
from softprune.graph.builder import operator_name
from softprune.graph.modules import by_filter, is_known_batch_norm, is_timm_batch_norm
from softprune.graph.reader import read_passes
from softprune.io import write_atomically
from softprune.log import get_logger
from softprune.masks import check_unmasked

__all__ = ["ExportReport", "fold_batch_norms", "to_onnx"]

logger = get_logger(__name__)

TRACED_BATCH = 2
"""Batch size of the trace, since torch.export specialises on a size of 1."""
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Maximum difference between two runtimes relative to the largest output: they sum in different orders."""
_PACKAGES = "onnx onnxscript onnxruntime"


@dataclass(frozen=True, kw_only=True)
class ExportReport(Comparison):
    """Report of a written and verified file. Prints as one line."""

    path: Path
    bytes: int
    """Size of the file in bytes."""
    runtime: str
    """Name and version of the runtime used for verification."""
    folded: int = 0
    """Number of BatchNorms folded into the preceding layer."""

    def __str__(self) -> str:
        folded = f", {self.folded} BatchNorms folded" if self.folded else ""
        return (
            f"{self.path}: {self.bytes:,} bytes{folded}; {self.runtime} differs by at most "
            f"{self.max_difference:.1e} at output scale {self.scale:.1e} (inputs {'; '.join(self.inputs)})"
        )

    __repr__ = __str__  # for notebooks


def to_onnx(
    model: nn.Module,
    example: ExampleLike,
    path: str | os.PathLike[str],
    *,
    fold_bn: bool = False,
    dynamic_batch: bool = True,
) -> ExportReport:
    """Export `model` to ONNX, run the export in ONNX Runtime, and write it if the outputs equal those of `model`.

    Args:
        model: A network without masks, such as a compact network. It is not changed.
        example: An input: a tensor, a tuple of arguments, or (args, kwargs).
        path: The file to write, ending in .onnx. An existing file is replaced only after verification.
        fold_bn: Fold BatchNorms into the preceding layers.
        dynamic_batch: Make the batch size dynamic.
    """
    target = Path(path)
    if target.suffix != ".onnx":
        raise ConfigError(f"The file name must end in .onnx. Got {str(path)!r}. Rename it.")
    _, _, package = (import_optional(name, "ONNX", _PACKAGES) for name in _PACKAGES.split())
    runtime = f"onnxruntime {package.__version__}"
    check_unmasked(model, "an export")
    network = duplicated(model).cpu().eval()
    given = Example.of(example).to_model(network)
    batch = given.batch_size()
    if dynamic_batch and batch is None:
        raise ModelError(
            "A dynamic batch size needs inputs whose first dimension is the batch. Got first dimensions "
            f"{[tuple(tensor.shape)[:1] for tensor in given.tensors()]}; pass dynamic_batch=False."
        )
    if dynamic_batch and batch == 1:
        given = given.with_batch(TRACED_BATCH)
    small = fold_batch_norms(network, given) if fold_bn else network
    try:
        content = onnx_content(small, given, dynamic_batch=dynamic_batch)
        call_for = onnx_session(content)
    except SoftpruneError:
        raise
    except Exception as error:  # exporters and runtimes raise many kinds of errors
        raise _export_error(small, error) from error
    sizes = [size for size in (1, 5, 3) if size != given.batch_size()][:2] if dynamic_batch else []
    attempts = [given, *(noise(each, 0, scales=(1.0,)) for each in (given, *map(given.with_batch, sizes)))]

    def run(attempt: Example) -> list[Tensor]:
        return [torch.from_numpy(output) for output in call_for(attempt)()]

    found = _compare_outputs(network, run, attempts)
    _warn_of_widths(network, runtime)
    write_atomically(target, content, then="export again")
    norms = [sum(isinstance(module, _BatchNorm) for module in each.modules()) for each in (network, small)]
    return ExportReport(path=target, bytes=len(content), runtime=runtime, folded=norms[0] - norms[1], **vars(found))


@torch.no_grad()
def onnx_content(model: nn.Module, given: Example, *, dynamic_batch: bool) -> bytes:
    """Export `model` and return the content of the ONNX file."""
    outputs = pytree.tree_leaves(model(*given.args, **given.kwargs))
    other = {type(each).__name__ for each in outputs if not isinstance(each, Tensor | None)}
    if other:
        raise ModelError(
            f"An ONNX file can only output tensors. Got {', '.join(sorted(other))} from "
            f"{type(model).__name__}; export a module that returns only its tensors."
        )
    exporter_log = logging.getLogger("torch.onnx")
    level = exporter_log.level
    exporter_log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the exporter warns about its own code
            program = torch.onnx.export(
                model,
                # torch.onnx.export takes a dict in last place as keyword arguments, so always pass them.
                (*given.args, given.kwargs),
                dynamo=True,
                dynamic_shapes=_dynamic_shapes(model, given) if dynamic_batch else None,
                verbose=False,
            )
    finally:
        exporter_log.setLevel(level)
    assert program is not None
    return program.model_proto.SerializeToString()


def onnx_session(content: bytes, *, threads: int = 0) -> Callable[[Example], Callable[[], Any]]:
    """Open the content of an ONNX file in ONNX Runtime on the CPU; return a function from an input to a call on it.

    `threads`: CPU threads; 0 for the default of the runtime.
    """
    runtime = import_optional("onnxruntime", "ONNX", _PACKAGES)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]

    def call_for(example: Example) -> Callable[[], Any]:
        feed = {name: tensor.cpu().numpy() for name, tensor in zip(names, example.tensors(), strict=True)}
        return lambda: session.run(None, feed)

    return call_for


def _warn_of_widths(model: nn.Module, runtime: str) -> None:
    """Warn about convolutions whose numbers of channels have no fast kernels in the runtime."""
    plain, depthwise, total = disliked_widths(model)
    if depthwise or 2 * plain > total:  # a few, such as those in squeeze-and-excitation, have odd widths by design
        logger.warning(
            "softprune: %d convolutions (%d of them depthwise) have numbers of channels that are not multiples of %d, "
            "which are slow in %s: prune with round_to='auto'",
            *(plain + depthwise, depthwise, WIDTH_MULTIPLE, runtime),
        )


def _dynamic_shapes(model: nn.Module, example: Example) -> dict[str, Any]:
    """Return `dynamic_shapes` for the exporter: the batch dimension of every tensor argument of forward()."""
    batch = torch.export.Dim("batch", min=1)
    bound = inspect.signature(model.forward).bind(*example.args, **example.kwargs)
    return pytree.tree_map(lambda leaf: {0: batch} if isinstance(leaf, Tensor) else None, dict(bound.arguments))


def _export_error(model: nn.Module, error: BaseException) -> ModelError:
    """Return the error for a network that cannot be exported, with the root cause of the exporter's error."""
    causes = [error]
    while (cause := causes[-1].__cause__) is not None and cause not in causes:
        causes.append(cause)
    return ModelError(
        f"The network must be exportable to ONNX. Got {type(causes[-1]).__name__} for {type(model).__name__}: "
        f"{first_line(causes[-1])}. If forward() fixes the batch size, pass dynamic_batch=False."
    )


def _compare_outputs(
    model: nn.Module, run: Callable[[Example], Sequence[Tensor]], attempts: Sequence[Example]
) -> Comparison:
    """Run both on every input. Raise a VerificationError if their outputs differ by more than TOLERANCES."""
    found = []
    for attempt in attempts:
        shape = shapes_of(attempt)
        try:
            expected = outputs_of(model, attempt)
            difference, size = compare(expected, run(attempt))
        except Exception as error:  # the exporter may silently fix a batch size that was declared dynamic
            raise _export_error(model, error) from error
        limit = max((TOLERANCES.get(output.dtype, 0.0) for output in expected), default=0.0)
        if not difference <= limit * max(size, 1e-30):
            raise VerificationError(
                f"An ONNX file must have the outputs of the network, within {limit:g} of their scale. Got a "
                f"difference of {difference:.3g} at output scale {size:.3g} on input {shape}. Nothing was written."
            )
        found.append((difference, size))
    return Comparison(*worst_of(found), tuple(map(shapes_of, attempts)))


# --- folding ---------------------------------------------------------------------------------------------------

LAYERS = {"conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "linear"}


def fold_batch_norms(model: nn.Module, example: ExampleLike) -> nn.Module:
    """Return a copy in eval mode with BatchNorms folded into the preceding layers where this is exact.

    A BatchNorm is folded if it is the only reader of a convolution or linear layer, and if both are called once and
    share no parameters. It is replaced by nn.Identity; BatchNorms of timm keep their activation. Other BatchNorms are
    kept, such as those that read a shared tensor in a DenseNet.

    The result is verified against `model` like a cut, in float64 and in its own precision. Plans do not apply to it, so
    save the compact network itself with `softprune.save` and fold it for export.

    `model` must have no masks, such as a compact network. `example` is an input: a tensor, a tuple of arguments, or
    (args, kwargs).
    """
    check_unmasked(model, "an export")
    pairs = _pairs(model, read_passes(model, example)[0].nodes)

    def fold_(network: nn.Module) -> None:
        for layer, norm in pairs:
            _fold(network, layer, norm)

    try:
        folded, _ = changed_and_verified(model, fold_, example, {})
    except VerificationError:
        # Custom layer classes may, for example, ignore their bias. Fold only into layers of torch.nn.
        pairs = [pair for pair in pairs if type(model.get_submodule(pair[0])).__module__.startswith("torch.nn.")]
        folded, _ = changed_and_verified(model, fold_, example, {})
    if hasattr(folded, HISTORY):
        delattr(folded, HISTORY)
    logger.debug("folded %d BatchNorms into the preceding layer", len(pairs))
    return folded.eval()


def _pairs(model: nn.Module, nodes: list[Node]) -> list[tuple[str, str]]:
    """Return the names (layer, BatchNorm) of pairs that can be folded exactly."""
    pairs = []
    for node in nodes:
        if node.op != "call_function" or operator_name(node) != "batch_norm":
            continue
        source = node.args[0]
        if not isinstance(source, Node) or source.op != "call_function" or operator_name(source) not in LAYERS:
            continue
        if operator_name(source) == "linear" and source.meta["val"].ndim != 2:
            continue  # the channels of the BatchNorm are not the outputs of the layer
        norm, layer = _sole_owner(node), _sole_owner(source)
        if norm is None or layer is None or len(source.users) > 1:
            continue
        module = model.get_submodule(norm)
        hooked = module._forward_pre_hooks or module._forward_hooks
        owner, weights = model.get_submodule(layer), model.named_parameters(remove_duplicate=False)
        plain = isinstance(owner, (nn.modules.conv._ConvNd, nn.Linear))
        if plain and is_known_batch_norm(type(module)) and module.running_mean is not None and not hooked:
            # A weight shared with another module must not change.
            pairs += [(layer, norm)] if sum(tensor is owner.weight for _, tensor in weights) == 1 else []
    return pairs


def _sole_owner(node: Node) -> str | None:
    """Return the name of the module whose parameters are read by `node` only, or None."""
    inputs = [argument for argument in node.all_input_nodes[1:] if argument.op == "placeholder"]
    names = [argument.meta.get("tensor") for argument in inputs]
    if not names or None in names or any(len(argument.users) > 1 for argument in inputs):
        return None
    owners = {str(name).rpartition(".")[0] for name in names}
    return owners.pop() if len(owners) == 1 else None


@torch.no_grad()
def _fold(network: nn.Module, layer_name: str, norm_name: str) -> None:
    layer: Any = network.get_submodule(layer_name)
    norm: Any = network.get_submodule(norm_name)
    scale = (norm.running_var + norm.eps).rsqrt() * (1 if norm.weight is None else norm.weight)
    inner, outer = (0 if each.bias is None else each.bias for each in (layer, norm))
    shift = (inner - norm.running_mean) * scale + outer
    trains, weight = layer.weight.requires_grad, layer.weight.clone()
    filters = by_filter(layer, weight)
    filters.mul_(scale.view(*filters.shape[:2], *(1,) * (filters.ndim - 2)))
    layer.weight, layer.bias = (nn.Parameter(each, requires_grad=trains) for each in (weight, shift))
    rest: nn.Module = nn.Identity()
    if is_timm_batch_norm(type(norm)):
        rest = nn.Sequential(OrderedDict(drop=norm.drop, act=norm.act))
    for parent, attribute in parents_of(network)[norm]:
        parent._modules[attribute] = rest.eval()
