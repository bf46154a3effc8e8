"""How a run that could not go on goes on: what to say to its user, and whether the images are still the same."""

from typing import Any

from softprune.data import DataBundle
from softprune.errors import CheckpointError
from softprune.runs.checkpoint import newest_path
from softprune.runs.folder import RunFolder


def way_on(folder: RunFolder) -> str:
    """What to do when the images are mended."""
    last = newest_path(folder.checkpoints)
    start = "the beginning, as there is no checkpoint yet" if last is None else last
    return f"Once that is mended, `{_whole_run(folder).resume_command}` goes on from {start}."


def way_back(folder: RunFolder, *, finetuning: bool, cut: bool) -> str:
    """What to do when training has diverged. A run keeps its settings, so other ones are another run."""
    rate = "finetune.lr" if finetuning else "optimizer.lr"
    again = f"{_whole_run(folder).again_command} --set {rate}=..."
    last = newest_path(folder.checkpoints)
    if last is None:
        return f"There is no checkpoint yet: start anew with `{again}`."
    kept = f"The last checkpoint with finite weights is {last}"
    if cut:
        return f"{kept}; as the network was cut in training, start anew with `{again}`."
    weights = f"--set model.weights={folder.path}"
    return f"{kept}: start from its weights with `{again} {weights}`, or anew without `{weights}`."


def describe_images(data: DataBundle) -> dict[str, Any]:
    """What a checkpoint remembers of the images, to notice when they are others."""
    return {
        "training images": len(data.train),
        "test images": len(data.test),
        "classes": data.num_classes,
        "class names": list(data.class_names),
    }


def check_same_images(data: DataBundle, state: dict[str, Any], folder: RunFolder) -> None:
    """Refuse to go on with other images, whose order and labels would be others from here on."""
    now = describe_images(data)
    then = state.get("data", now)  # an older checkpoint does not say
    if now == then:
        return
    found = [
        f"{now[key]} {key} instead of {then[key]}"
        for key in ("training images", "test images", "classes")
        if now[key] != then[key]
    ]
    raise CheckpointError(
        "A run must go on with the images that it began with. Got "
        f"{', '.join(found) or 'classes of other names'}. Put the images back or say where they are with "
        f"--data-dir, or start a new run with `{_whole_run(folder).again_command}`."
    )


def _whole_run(folder: RunFolder) -> RunFolder:
    """The run that is started and resumed; for a baseline that is the one that it is in."""
    whole = RunFolder(folder.path.parent)
    return whole if folder.path == whole.dense and whole.config.is_file() else folder
