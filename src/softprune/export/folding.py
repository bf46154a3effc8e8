"""BatchNorm folding: a BatchNorm that alone reads a convolution or linear layer becomes part of its weights.

For inference only: a folded network has no statistics to train with.
"""

from collections import OrderedDict

import torch
from torch import nn
from torch.fx import Node
from torch.nn.modules.batchnorm import _BatchNorm

from softprune.cut.apply import HISTORY
from softprune.cut.verify import outputs_of
from softprune.errors import VerificationError
from softprune.export.checking import compare_outputs, exact, place_of, prepared
from softprune.graph import Example, ExampleLike
from softprune.graph.builder import operator_name
from softprune.graph.modules import by_filter, is_known_batch_norm, is_timm_batch_norm
from softprune.graph.reader import read_passes
from softprune.log import get_logger

logger = get_logger(__name__)

LAYERS = {"conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "linear"}


def fold_batch_norms(model: nn.Module, example: ExampleLike) -> nn.Module:
    """Return a new module in eval mode with every BatchNorm folded into the layer before it where that is exact.

    A BatchNorm is folded if it alone reads a convolution or linear layer and both are called once with parameters of
    their own. It is replaced by nn.Identity; BatchNorms of timm keep their activation. Others stay, such as those that
    read a shared stream in a DenseNet.

    The result is verified against `model` in float64, or in its own precision if it runs in no other. It is no longer
    the network that its plan describes: save the compact network with `softprune.save` and fold for the export.

    Args:
        model: A network without masks, such as a compact network. It is not changed.
        example: An input: a tensor, a tuple of arguments, or (args, kwargs).
    """
    folded = prepared(model, device=place_of(model)[0])
    given = Example.of(example).to_model(folded)
    pairs = _pairs(folded, read_passes(folded, given)[0].nodes)
    try:
        _check(model, pairs, given)
    except VerificationError:
        # A custom layer class may ignore its bias, for example. Such layers keep their BatchNorms.
        pairs = [pair for pair in pairs if type(folded.get_submodule(pair[0])).__module__.startswith("torch.nn.")]
        _check(model, pairs, given)
    for layer, norm in pairs:
        _fold(folded, layer, norm)
    if hasattr(folded, HISTORY):
        delattr(folded, HISTORY)
    logger.debug("folded %d BatchNorms into the layer before them", len(pairs))
    return folded


def count_batch_norms(model: nn.Module) -> int:
    """Return the number of BatchNorms in `model`."""
    return sum(isinstance(module, _BatchNorm) for module in model.modules())


def _pairs(model: nn.Module, nodes: list[Node]) -> list[tuple[str, str]]:
    """Return (layer, BatchNorm) names where folding is exact."""
    pairs = []
    for node in nodes:
        if node.op != "call_function" or operator_name(node) != "batch_norm":
            continue
        source = node.args[0]
        if not isinstance(source, Node) or source.op != "call_function" or operator_name(source) not in LAYERS:
            continue
        if operator_name(source) == "linear" and source.meta["val"].ndim != 2:
            continue  # the BatchNorm's channels are then not the layer's outputs
        norm, layer = _sole_owner(node), _sole_owner(source)
        if norm is None or layer is None or len(source.users) > 1:
            continue
        module = model.get_submodule(norm)
        hooked = module._forward_pre_hooks or module._forward_hooks
        owner, weights = model.get_submodule(layer), model.named_parameters(remove_duplicate=False)
        plain = isinstance(owner, (nn.modules.conv._ConvNd, nn.Linear))
        if plain and is_known_batch_norm(type(module)) and module.running_mean is not None and not hooked:
            # A weight that another module has as well stays.
            pairs += [(layer, norm)] if sum(tensor is owner.weight for _, tensor in weights) == 1 else []
    return pairs


def _sole_owner(node: Node) -> str | None:
    """Return the module whose parameters only `node` reads, or None."""
    inputs = [argument for argument in node.all_input_nodes[1:] if argument.op == "placeholder"]
    names = [argument.meta.get("tensor") for argument in inputs]
    if not names or None in names or any(len(argument.users) > 1 for argument in inputs):
        return None
    owners = {str(name).rpartition(".")[0] for name in names}
    return owners.pop() if len(owners) == 1 else None


@torch.no_grad()
def _fold(model: nn.Module, layer_name: str, norm_name: str) -> None:
    layer, norm = model.get_submodule(layer_name), model.get_submodule(norm_name)
    assert isinstance(layer, (nn.modules.conv._ConvNd, nn.Linear))
    assert isinstance(norm, _BatchNorm)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = (norm.running_var.double() + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight.double()
    shift = -norm.running_mean.double() * scale
    if norm.bias is not None:
        shift = shift + norm.bias.double()
    if layer.bias is not None:
        shift = shift + layer.bias.double() * scale
    weight = layer.weight
    scaled = weight.double().clone()
    filters = by_filter(layer, scaled)
    filters.mul_(scale.view(*filters.shape[:2], *(1,) * (filters.ndim - 2)))
    layer.weight = nn.Parameter(scaled.to(weight.dtype), requires_grad=weight.requires_grad)
    layer.bias = nn.Parameter(shift.to(weight.dtype), requires_grad=weight.requires_grad)
    rest: nn.Module = nn.Identity()
    if is_timm_batch_norm(type(norm)):
        rest = nn.Sequential(OrderedDict(drop=norm.drop, act=norm.act))  # type: ignore[arg-type]
    path, _, attribute = norm_name.rpartition(".")
    model.get_submodule(path)._modules[attribute] = rest.eval()


def _check(model: nn.Module, pairs: list[tuple[str, str]], given: Example) -> None:
    """Raise unless the folded network agrees in float64, where only rounding may differ."""
    reference, example = exact(model, given)
    candidate = prepared(reference, device=place_of(reference)[0])
    for layer, norm in pairs:
        _fold(candidate, layer, norm)
    compare_outputs(reference, lambda attempt: outputs_of(candidate, attempt), [example], what="A folded network")
