"""Rules for operators that bring values along dimensions together: reductions, matrix products, einsum."""

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn
from torch.fx import Node

from softprune.graph.builder import GraphBuilder, Value
from softprune.graph.channels import IntArray
from softprune.graph.ops import BinaryOp, ExtraMacs, OpaqueOp, identity
from softprune.graph.rules.elementwise import add_channelwise, combined, differ_along, two_tensors
from softprune.graph.rules.registry import OPERATORS, argument, operator_name, rule


@rule("reduce")
def reduce(builder: GraphBuilder, node: Node) -> Any:
    if len(node.args) > 1 and isinstance(node.args[1], Node):
        return two_tensors(builder, node)
    name, value = operator_name(node), builder.value(node.args[0])
    rank = len(value.shape)
    norm = name == "linalg_vector_norm"
    given = argument(node, 2 if norm else 1, "dim")
    if given is None or given == []:
        given = list(range(rank))
    dims: list[Any] = list(given) if isinstance(given, (list, tuple)) else [given]
    if any(not isinstance(dim, int) for dim in dims):
        return builder.unusual(node)
    # A norm of negative order is about the smallest values, which zeros are.
    skips_zeros = name == "sum" or (norm and argument(node, 1, "ord", 2) >= 0)
    return _reduced(builder, node, value, [dim % rank for dim in dims], name, skips_zeros)


def _reduced(builder: GraphBuilder, node: Node, value: Value, dims: Sequence[int], name: str, skips_zeros: bool) -> Any:
    """What the operator `name` leaves of `value` along `dims`. `skips_zeros`: zeros among its inputs change nothing."""
    example, rank = node.meta["val"], len(value.shape)
    shape = (example[0] if isinstance(example, (list, tuple)) else example).shape
    merged = [dim for dim in dims if value.varies_along(dim)]
    # A sum over tied groups (radix of ResNeSt, say) leaves one channel per class.
    if any(differ_along(builder, value, dim) for dim in merged):
        reason = f"{node.target} in {builder.where(node)} runs across them"
        if not skips_zeros or any(differ_along(builder, value, dim) for dim in range(rank) if dim not in dims):
            return builder.opaque(node, reason)
        output = builder.pinned_value(shape, reason)
        builder.ops.append(OpaqueOp((value.atoms.ravel(),), output.atoms.ravel(), skips_zeros=True))
        return output
    head = value.atoms
    if name == "sum":
        head, merged = _added_up(builder, head, merged), []
    for dim in dims:
        head = head.take([0], axis=dim)
    if len(shape) < rank:  # without keepdim
        head = head.reshape([size for dim, size in enumerate(head.shape) if dim not in dims])
    evaluate = identity if OPERATORS[name].keeps_constants and not merged else None
    return add_channelwise(
        builder, node, Value(tuple(shape), head), evaluate, OPERATORS[name].at_zero == 0 and not merged
    )


def _added_up(builder: GraphBuilder, atoms: IntArray, dims: list[int]) -> IntArray:
    """The channels left when those along `dims` are added to each other: zero where all of them are."""
    for dim in dims:
        total, *others = np.split(atoms, atoms.shape[dim], axis=dim)
        for other in others:
            outputs = builder.table.follow(total)
            builder.ops.append(
                BinaryOp(total.ravel(), other.ravel(), outputs.ravel(), operator.add, absorbs_zero=False, adds=True)
            )
            total = outputs
        atoms = total
    return atoms


@rule("along")
def along_space(builder: GraphBuilder, node: Node) -> Any:
    value = builder.value(node.args[0])
    dim = argument(node, 1, "dim")
    if not isinstance(dim, int) or differ_along(builder, value, dim % len(value.shape)):
        return builder.opaque(node, f"{node.target} in {builder.where(node)} mixes them")
    return add_channelwise(builder, node, value, None, keeps_zero=OPERATORS[operator_name(node)].at_zero == 0)


@rule("product")
def product(builder: GraphBuilder, node: Node) -> Any:
    """The products of pairs of values, added up: matmul and its kin as an einsum of two tensors."""
    tensors, terms, output = _equation(node)
    counted = _is_counted(builder, node, tensors)
    if counted is None:
        return builder.opaque(
            node, f"{node.target} in {builder.where(node)} multiplies them with a matrix that is no parameter"
        )
    labels = list(dict.fromkeys([*output, *terms[0], *terms[1]]))
    # A parameter comes last: where channels are added up, it is cut along the same dimension.
    (first, one), (second, other) = sorted(
        zip(tensors, terms, strict=True), key=lambda pair: isinstance(builder.values.get(pair[0]), Node)
    )
    value = builder.value(first)
    read = [label for dim, label in enumerate(one) if value.varies_along(dim) and label in other]
    summed = [label for label in read if label not in output]
    left = _laid_out(value, one, labels)
    right = _laid_out(builder.value(second, other.index(summed[0]) if summed else None), other, labels)
    along = [{dim for dim in range(len(labels)) if each.varies_along(dim)} for each in (left, right)]
    if along[0] - along[1] and along[1] - along[0]:
        return builder.opaque(node, f"{node.target} in {builder.where(node)} multiplies each of them with others")
    repeated = any(np.unique(atoms).size < atoms.size for atoms in (_untied(builder, left), _untied(builder, right)))
    if repeated and min(along[0] | along[1]) < len(output):
        return builder.opaque(node, f"{node.target} in {builder.where(node)} reads them and samples in one dimension")
    shape = np.broadcast_shapes(left.shape, right.shape)
    pairs = combined(builder, node, left, right, operator.mul, absorbs_zero=True, shape=shape)
    if counted:
        macs = builder.positions(math.prod(shape))
        builder.extra_macs.append(ExtraMacs(pairs.atoms.ravel(), macs // pairs.atoms.size))
    dims = range(len(output), len(labels))
    return _reduced(builder, node, pairs, dims, "sum", skips_zeros=True) if dims else pairs


def _equation(node: Node) -> tuple[list[Node], list[list[str]], list[str]]:
    """The two tensors that are multiplied, the labels of their dimensions, and those of the output's."""
    given: Any
    if operator_name(node) == "einsum":
        equation, given = str(node.args[0]).replace(" ", ""), node.args[1]
    else:
        given = node.args[:2]
        left, right = (each.meta["val"].ndim > 1 for each in given)
        columns = "jk" if operator_name(node) == "linear" else "...kj"
        equation = f"{'...ik' if left else 'k'},{columns if right else 'k'}->...{'i' * left}{'j' * right}"
    terms, arrow, result = equation.partition("->")
    if not arrow:  # the labels that occur once, in the order of the alphabet
        once = sorted(label for label in terms if label.isalpha() and terms.count(label) == 1)
        result = "".join(["..."] * ("..." in terms) + once)
    one, other = terms.split(",")
    ranks = [tensor.meta["val"].ndim for tensor in (*given, node)]
    *labels, output = (_labels(*each) for each in zip((one, other, result), ranks, strict=True))
    return list(given), labels, output


def _labels(term: str, rank: int) -> list[str]:
    """One label per dimension; those of an ellipsis count from the last."""
    before, _, after = term.partition("...")
    labels = [*before, *map(str, range(rank - len(before) - len(after), 0, -1)), *after]
    if len(labels) != rank or len(set(labels)) < rank:
        raise NotImplementedError(f"the term {term!r} takes a diagonal")
    return labels


def _laid_out(value: Value, own: Sequence[str], labels: Sequence[str]) -> Value:
    """`value` with one dimension per label, of size 1 where it has none."""
    order = [own.index(label) for label in labels if label in own]
    missing = tuple(place for place, label in enumerate(labels) if label not in own)
    shape = [value.shape[own.index(label)] if label in own else 1 for label in labels]
    return Value(tuple(shape), np.expand_dims(value.atoms.transpose(order), missing))


def _untied(builder: GraphBuilder, value: Value) -> IntArray:
    """The first of the atoms along dimensions where all are cut together: heads of attention, with their samples."""
    tied = [dim for dim in range(len(value.shape)) if not differ_along(builder, value, dim)]
    return value.atoms[tuple(slice(0, 1) if dim in tied else slice(None) for dim in range(len(value.shape)))]


def _is_counted(builder: GraphBuilder, node: Node, tensors: Sequence[Node]) -> bool | None:
    """Whether torch makes it one product of matrices, whose MACs count, not one of batches; None: strides decide."""
    left, right = (tensor.meta["val"] for tensor in tensors)
    if operator_name(node) in ("einsum", "bmm") or min(left.ndim, right.ndim) > 2 or max(left.ndim, right.ndim) < 2:
        return False
    small = tensors[left.ndim > 2]
    name = builder.provenance.parameter_name(small) or ""
    if builder.provenance.has_tensor(name) and isinstance(builder.provenance.tensor(name), nn.Parameter):
        return True
    if right.ndim <= 2:
        return True if left.ndim <= 2 or left.is_contiguous() else None
    return False if small.op == "placeholder" else None
