"""Files with tensors: checkpoints, compact networks and weights."""

import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from fuzzing.formats import check_same_run, command, outcome_of, register
from fuzzing.mutations import mutate_bytes, mutate_json, mutate_pickle, replace_by_other_kind
from fuzzing.seeds import Seeds
from fuzzing.worker import WrongResult


@register(0.1)
def checkpoint(rng: Random, seeds: Seeds, work: Path) -> str:
    """A checkpoint: undamaged, the one before it, or refused. With a right checksum, anything but a traceback."""
    from softprune.lab.runs.checkpoint import read_newest

    run = seeds.copy("run", work)
    paths = sorted((run / "checkpoints").glob("step-*"))
    path = rng.choice((paths[-1], paths[-1], paths[0]))
    if rng.random() < 0.12:
        return _signed_checkpoint(rng, run, path)
    if rng.random() < 0.95:
        path.write_bytes(mutate_bytes(rng, path.read_bytes(), (*seeds.others, paths[0].read_bytes())))
    else:
        replace_by_other_kind(rng, path)
    if rng.random() < 0.03:
        return outcome_of(command("evaluate", "run", "--device", "cpu")[0])
    if rng.random() < 0.02:
        (run / "result.json").unlink()
        code = command("resume", "run", "--device", "cpu")[0]
        if code == 0:
            check_same_run(run, seeds)
        return "refused" if code else "same"
    state = read_newest(run / "checkpoints")[1]
    if any(equal(state, good) for good in seeds.checkpoints()):
        return "same"
    raise WrongResult("a damaged checkpoint was read as another state")


def _signed_checkpoint(rng: Random, run: Path, path: Path) -> str:
    """A checkpoint whose content was changed by someone who signs it again."""
    from softprune.lab.runs.checkpoint import read_newest, save_checkpoint

    state = read_newest(run / "checkpoints")[1]
    for each in path.parent.glob("step-*"):
        each.unlink()
    save_checkpoint(path.parent, int(re.sub(r"\D", "", path.stem)), mutate_state(rng, state))
    if rng.random() < 0.5:
        (run / "result.json").unlink()
        return outcome_of(command("resume", "run", "--device", "cpu")[0])
    return outcome_of(command("evaluate", "run", "--device", "cpu")[0])


def mutate_state(rng: Random, node: Any) -> Any:
    """Replace, retype or delete one value in a tree of dictionaries, lists and tensors."""
    import torch

    if isinstance(node, dict) and node:
        key = rng.choice(list(node))
        if rng.random() < 0.08:
            return {name: value for name, value in node.items() if name != key}
        return {**node, key: mutate_state(rng, node[key])}
    if isinstance(node, list) and node and rng.random() < 0.7:
        at = rng.randrange(len(node))
        return [*node[:at], mutate_state(rng, node[at]), *node[at + 1 :]]
    if isinstance(node, torch.Tensor):
        kinds = (torch.int8, torch.float64, torch.complex64, torch.bool, torch.float8_e4m3fn, torch.int64)
        changes: tuple[Callable[[], Any], ...] = (
            lambda: node.to(rng.choice(kinds)),
            lambda: node.flatten()[:1],
            lambda: torch.empty(0),
            lambda: torch.full_like(node, float("nan")) if node.is_floating_point() else torch.zeros_like(node) - 1,
            lambda: node.unsqueeze(0),
            lambda: "text",
        )
        return rng.choice(changes)()
    return rng.choice((None, -1, 0, 10**12, 1.5, float("nan"), "text", [], {}, True, [[0]], torch.zeros(3)))


def equal(first: Any, second: Any) -> bool:
    """Return whether two trees have the same values, bit for bit."""
    import torch

    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(equal(*pair) for pair in zip(first, second, strict=True))
    return first == second or (first != first and second != second)


@register(0.12)
def compact(rng: Random, seeds: Seeds, work: Path) -> str:
    """A saved network: the undamaged one or refused. With a right checksum, anything but a traceback."""
    import softprune
    from softprune.models import build

    file = seeds.copy("run/compact.safetensors", work)
    if rng.random() < 0.4:
        return _signed_network(rng, file)
    if rng.random() < 0.95:
        file.write_bytes(_mutate_safetensors(rng, file.read_bytes(), seeds))
    else:
        replace_by_other_kind(rng, file)
    if rng.random() < 0.03:
        return outcome_of(command("evaluate", str(file), "--device", "cpu")[0])
    dense = build("digits_net", 10)
    network = softprune.load(file, dense)
    good = softprune.load(seeds.folder / "run" / "compact.safetensors", dense)
    if not equal(dict(network.state_dict()), dict(good.state_dict())):
        raise WrongResult("a damaged network was read as another one")
    return "same"


def _mutate_safetensors(rng: Random, content: bytes, seeds: Seeds) -> bytes:
    """Damage the bytes, or the JSON header."""
    if rng.random() < 0.6:
        return mutate_bytes(rng, content, seeds.others)
    size = int.from_bytes(content[:8], "little")
    header = mutate_json(rng, content[8 : 8 + size].decode()).encode("utf-8", "surrogatepass")
    length = len(header) if rng.random() < 0.8 else rng.choice((0, 1, 2**31, 2**63, 2**64 - 1, size))
    return length.to_bytes(8, "little") + header + content[8 + size :]


def _signed_network(rng: Random, file: Path) -> str:
    """A saved network whose plan or tensors were changed by someone who signs it again."""
    import safetensors.torch
    import torch
    from safetensors import safe_open

    import softprune
    from softprune.cut.saved import DOCUMENT, signed
    from softprune.models import build

    with safe_open(file, "pt") as stored:
        text = stored.metadata()[DOCUMENT]
    tensors = safetensors.torch.load_file(file)
    if rng.random() < 0.7:
        text = mutate_json(rng, text)
    else:
        tensors = mutate_state(rng, tensors)
    try:
        document = json.loads(text)
        plain = {name: value.contiguous() for name, value in tensors.items() if isinstance(value, torch.Tensor)}
        content = signed(plain, document)
    except (ValueError, RecursionError, AttributeError):  # content that cannot be written
        return "refused"
    file.write_bytes(content)
    kind = rng.random()
    if kind < 0.9:
        softprune.load(file, build("digits_net", 10))
        return "accepted"
    arguments = ("evaluate",) if kind < 0.95 else ("export", "--format", "pt2")
    return outcome_of(command(*arguments, str(file), *(("--device", "cpu") if kind < 0.95 else ()))[0])


def _mutate_archive(rng: Random, path: Path) -> None:
    """Damage the pickle inside a file of torch.save, or compress or repeat an entry of it."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    name = next(name for name in entries if name.endswith("data.pkl"))
    kind = rng.random()
    if kind < 0.7:
        entries[name] = mutate_pickle(rng, entries[name])
    elif kind < 0.8:
        entries[name] = b"\x80\x02cbuiltins\nbytearray\n" + _pickled(2**31) + b"\x85R."
    elif kind < 0.9:
        entries[rng.choice(list(entries))] = bytes(2**24)
    way = zipfile.ZIP_DEFLATED if kind > 0.8 else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", way) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)


def _pickled(number: int) -> bytes:
    size = (number.bit_length() + 8) // 8
    return b"\x8a" + bytes([size]) + number.to_bytes(size, "little")


@register(0.05)
def weights(rng: Random, seeds: Seeds, work: Path) -> str:
    """Weights that a run starts from: a state_dict in torch's format, or safetensors."""
    from softprune.lab.config.settings import ModelConfig
    from softprune.lab.runs.networks import starting_network

    name = rng.choice(("weights.pt", "weights.safetensors"))
    path = seeds.copy(name, work)
    kind = rng.random()
    if kind < 0.4:
        path.write_bytes(mutate_bytes(rng, path.read_bytes(), seeds.others))
    elif kind < 0.9 and name.endswith("safetensors"):
        path.write_bytes(_mutate_safetensors(rng, path.read_bytes(), seeds))
    elif kind < 0.65:
        import torch

        torch.save(mutate_state(rng, torch.load(path)), path)
    elif kind < 0.9:
        _mutate_archive(rng, path)
    else:
        replace_by_other_kind(rng, path)
    starting_network(ModelConfig(name="digits_net", weights=str(path)), 10, 0)[0]
    return "accepted"
