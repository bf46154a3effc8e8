"""What is still to be run for the paper's CIFAR tables, in order, with the commands.

    python benchmarks/missing.py

Compares the rows that are wanted with the records under results/ and writes results/MISSING.md.
"""

import json
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results"
RECORDS = Path(__file__).parent / "records"
BUDGETS = (
    "--recipe cifar10-resnet56-scp --data-dir data --seeds 0 --strengths 3.2e-5 4.4e-5 5e-5 --search 2 "
    "--work runs/budgets-cifar10 --out benchmarks/records/budgets-cifar10.json --set"
)
LATENCY = (
    "--device cuda --models resnet50 --dtypes bfloat16 --backends fused+graphs compile+graphs --batches 1 64 256 "
    "--round-to 32 --out benchmarks/records/latency-h200.json"
)
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
    """(recipe, seed) of every record; a run is named after its recipe."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*/result.json")]
    return {(record["name"].replace("-without-relu", "-norelu"), record["seed"]) for record in records}


def _budgets_lack_partners() -> bool:
    """Whether a budget on CIFAR-10 has no run of fixed strength and equal MACs beside it."""
    record = json.loads((RECORDS / "budgets-cifar10.json").read_text(encoding="utf-8"))
    return not all(row["fixed"] is not None and row["fixed"]["equal"] for row in record["rows"])


def _fused_is_missing() -> bool:
    """Whether no latency of a fused network was measured."""
    record = json.loads((RECORDS / "latency-h200.json").read_text(encoding="utf-8"))
    return not any(row["backend"].startswith("fused") for row in record["rows"])


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
    if _budgets_lack_partners():
        lines += ["", "## ResNet-56 on CIFAR-10: budgets beside fixed strengths of equal MACs", ""]
        lines += [
            "All anew: the runs in the record are from before a target was settled as soon as it is met.",
            "",
        ]
        lines += ["```sh", f"python benchmarks/budgets.py {BUDGETS} {SETTINGS.replace('--set ', '')}", "```"]
    if _fused_is_missing():
        lines += [
            "",
            "## ResNet-50 on an H200: fused",
            "",
            "```sh",
            f"python benchmarks/latency.py {LATENCY}",
            "```",
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (RESULTS / "MISSING.md").write_text(page(measured()), encoding="utf-8")
