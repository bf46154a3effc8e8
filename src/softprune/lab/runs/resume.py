"""What resuming a run needs besides the checkpoint: the same images, the same arithmetic, and advice after errors."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from softprune.errors import CheckpointError, first_few
from softprune.lab.data import DataBundle
from softprune.lab.runs.checkpoint import newest_path
from softprune.lab.runs.folder import RunFolder
from softprune.lab.runs.result import Session
from softprune.log import get_logger

logger = get_logger(__name__)


def resume_hint(folder: RunFolder) -> str:
    """Return how to resume after images could not be read."""
    last = newest_path(folder.checkpoints)
    start = "the beginning, since there is no checkpoint yet" if last is None else last
    return f"Repair the images; `{folder.resume_command}` then resumes from {start}."


def restart_hint(folder: RunFolder, *, finetuning: bool, cut: bool) -> str:
    """Return what to do after training diverged. A run keeps its settings, so that other ones are another run."""
    rate = "finetune.lr" if finetuning else "optimizer.lr"
    again = f"{folder.again_command} --set {rate}=..."
    last = newest_path(folder.checkpoints)
    if last is None:
        return f"There is no checkpoint yet: start a new run with `{again}`."
    kept = f"The last checkpoint with finite weights is {last}"
    if cut:
        return f"{kept}; since the network was cut in training, start a new run with `{again}`."
    weights = f"--set model.weights={folder.path}"
    return f"{kept}: start a new run from its weights with `{again} {weights}`, or without them."


def describe_images(data: DataBundle) -> dict[str, Any]:
    """Return what a checkpoint records of the images, to notice when they are others."""
    return {
        "training images": len(data.train),
        "test images": len(data.test),
        "classes": data.num_classes,
        "class names": list(data.class_names),
    }


def check_same_images(data: DataBundle, state: dict[str, Any], folder: RunFolder) -> None:
    """Raise a CheckpointError if the images are not those of the checkpoint: their order and labels would differ."""
    now, then = describe_images(data), state["data"]
    if now == then:
        return
    found = [
        f"{now[key]} {key} instead of {then[key]}"
        for key in ("training images", "test images", "classes")
        if now[key] != then[key]
    ]
    raise CheckpointError(
        f"A run must be resumed with the images that it began with. Got {', '.join(found) or 'other class names'}. "
        "Restore the images or say where they are with --data-dir, or start a new run with "
        f"`{folder.again_command}`."
    )


def check_same_classes(data: DataBundle, state: dict[str, Any]) -> None:
    """Raise a CheckpointError if the classes are not those of the checkpoint: the outputs would mean others."""
    then = state["data"]
    names = data.class_names and then["class names"] and list(data.class_names) != then["class names"]
    if names or data.num_classes != then["classes"]:
        raise CheckpointError(
            f"A network must be used with the classes that it was trained on. Got {data.num_classes} "
            f"({first_few(data.class_names)}) instead of {then['classes']} ({first_few(then['class names'])}). "
            "Restore the images, or say where they are with --data-dir."
        )


def warn_of_changes(before: Sequence[Session], now: Session) -> None:
    """Warn if a run is resumed where sums may be computed in another order than in the session ``before``."""
    if not before:
        return
    old, new = before[-1].environment, now.environment
    on_cpu = new.device.startswith("CPU")
    keys = ["device", "torch", "processes", *(["threads"] if on_cpu else ["cuda", "cudnn"])]
    changed = [
        f"{key} {getattr(old, key)} before, {getattr(new, key)} now"
        for key in keys
        if getattr(old, key) != getattr(new, key)
    ]
    if changed:
        logger.warning(
            "softprune: the run is resumed in another environment (%s): its result may differ from that of an "
            "undisturbed run in the last bits, and after many steps visibly",
            "; ".join(changed),
        )
    if old.processes != new.processes:
        logger.warning(
            "softprune: The batch of all processes together stays the same. BatchNorm normalises over the share of "
            "each process, which is another one now, unless train.sync_batchnorm is set."
        )


def unsaved_buffers(network: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that are not in the state_dict (``persistent=False``): a checkpoint must hold them too."""
    saved = network.state_dict().keys()
    return {name: buffer.detach() for name, buffer in network.named_buffers() if name not in saved}


@torch.no_grad()
def load_unsaved_buffers(network: nn.Module, values: dict[str, Tensor]) -> None:
    """Copy what :func:`unsaved_buffers` returned into ``network``."""
    buffers = dict(network.named_buffers())
    for name, value in values.items():
        if name in buffers and buffers[name].shape == value.shape:
            buffers[name].copy_(value)


class PlainAttributes:
    """Notices plain Python values of modules that change in training, such as counters: no checkpoint holds them."""

    def __init__(self, network: nn.Module) -> None:
        self._before = _plain_attributes(network)
        self._warned = False

    def check(self, network: nn.Module) -> None:
        """Warn once if a value has changed since the start."""
        if self._warned:
            return
        now = _plain_attributes(network)
        changed = sorted(key for key, value in now.items() if self._before.get(key, value) != value)
        if changed:
            self._warned = True
            logger.warning(
                "softprune: training changes %s, which no checkpoint holds: a resumed run may differ from an "
                "undisturbed one. Keep such values in buffers (register_buffer).",
                first_few(changed),
            )


def _plain_attributes(network: nn.Module) -> dict[str, Any]:
    return {
        f"{name}.{key}".lstrip("."): value
        for name, module in network.named_modules()
        if not type(module).__module__.startswith(("torch.", "softprune."))
        for key, value in vars(module).items()
        if key != "training" and isinstance(value, int | float | str)
    }
