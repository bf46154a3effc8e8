"""What is still to be run for the paper's CIFAR tables, in order, with the commands.

    python benchmarks/missing.py

Compares the rows that are wanted with the records under results/ and writes results/MISSING.md.
"""

from pathlib import Path

from softprune.config.recipes import load_recipe, recipe_names
from softprune.runs.folder import RunFolder
from softprune.runs.result import Result

RESULTS = Path(__file__).parents[1] / "results"
SETTINGS = "--set train.precision=bf16 --set train.channels_last=true"
WANTED: tuple[tuple[str, tuple[str, ...], tuple[int, ...]], ...] = (
    (
        "CIFAR-10: SCP and the dense network",
        ("vgg16-scp", "vgg16-dense", "vgg19-scp", "vgg19-dense", "resnet56-scp", "resnet56-dense"),
        (0, 1, 2),
    ),
    ("CIFAR-10: DenseNet-40", ("densenet40-scp", "densenet40-dense"), (0,)),
    (
        "CIFAR-100: the VGGs, main and high ratio",
        ("vgg16-scp", "vgg16-scp-high", "vgg16-dense", "vgg19-scp", "vgg19-scp-high", "vgg19-dense"),
        (0,),
    ),
    (
        "CIFAR-100: DenseNet-40 and ResNet-164, main and high ratio",
        (
            "densenet40-scp",
            "densenet40-scp-high",
            "densenet40-dense",
            "resnet164-scp",
            "resnet164-scp-high",
            "resnet164-dense",
        ),
        (0,),
    ),
    (
        "CIFAR-10: Slimming, before and after fine-tuning",
        ("vgg16-slimming-ft", "vgg19-slimming-ft", "densenet40-slimming-ft"),
        (0,),
    ),
    (
        "CIFAR-10: the other methods",
        (
            "vgg16-l1-ft",
            "vgg16-random-ft",
            "vgg16-scratch",
            "resnet56_a-dense",
            "resnet56_a-sfp",
            "resnet56_a-fpgm",
            "vgg16-variational",
            "densenet40-variational",
        ),
        (0,),
    ),
    ("CIFAR-10: SCP without ReLU", ("vgg16-scp-norelu",), (0,)),
    (
        "CIFAR-100: SCP without ReLU",
        ("vgg16-scp-norelu", "vgg19-scp-norelu", "densenet40-scp-norelu", "resnet164-scp-norelu"),
        (0,),
    ),
)
"""Title, recipes without the name of the data, seeds; most wanted first."""
SWEEPS = (
    (
        "DenseNet-40 on CIFAR-100: lambda and s",
        ("paper-table-6", "paper-table-7"),
    ),
    ("ImageNet: ResNet-50, target ratio", ("paper-table-8",)),
)


def measured(folder: Path = RESULTS) -> set[tuple[str, int]]:
    """(recipe, seed) of every record; a run is named after its recipe, and has its strength or its target."""
    records = [RunFolder(path.parent).read_result() for path in folder.glob("*/result.json")]
    return {(name, record.seed) for record in records if (name := _recipe(record)) is not None}


def _recipe(record: Result) -> str | None:
    """The recipe that a record is a run of; None if it is of a sweep, or its strength was another."""
    name = record.name.replace("-without-relu", "-norelu")
    if name not in recipe_names():
        return None
    wanted = load_recipe(name).method
    found = record.config.method
    same = found.target == wanted.target and (wanted.target or found.strength == wanted.strength)
    return name if same else None


def page(there: set[tuple[str, int]]) -> str:
    """The page as Markdown."""
    lines = [
        "# Not measured yet",
        "",
        "What the GPU time did not reach, most wanted first, with the commands. Rendered from the records under",
        "`results/` by `python benchmarks/missing.py`; what is there is in [RESULTS.md](RESULTS.md).",
    ]
    for title, recipes, seeds in WANTED:
        names = [f"{title.partition(':')[0].lower().replace('-', '')}-{recipe}" for recipe in recipes]
        absent = [(name, seed) for seed in seeds for name in names if (name, seed) not in there]
        total = len(names) * len(seeds)
        if absent:
            lines += ["", f"## {title}", "", f"{total - len(absent)} of {total} runs are there.", "", "```sh"]
            lines += [
                f"softprune train {name} --seed {seed} --data-dir data {SETTINGS}" for name, seed in absent
            ]
            lines += ["```"]
    for title, sweeps in SWEEPS:
        lines += ["", f"## {title}", "", "```sh"]
        lines += [f"softprune sweep {sweep} --jobs 4 --data-dir data" for sweep in sweeps]
        lines += ["```"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (RESULTS / "MISSING.md").write_text(page(measured()), encoding="utf-8")
