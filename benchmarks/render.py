"""Write the tables of documents from their records.

    python benchmarks/render.py            # all documents, and the figures of results/
    python benchmarks/render.py --check    # exit with 1 if a document differs from its records

A table stands between the lines `<!-- table: NAME -->` and `<!-- end -->`; NAME is a function of this file or of
benchmarks/paper, with its arguments after spaces. Needs only the standard library.
"""

import json
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path.insert(0, str(HERE / "paper"))

import figure4  # noqa: E402
from missing import missing_table, summary, wanted_table  # noqa: E402
from tables import all_runs, baselines, figure, markdown, paper_table, runs  # noqa: E402

DOCUMENTS = (
    "README.md",
    "results/README.md",
    "benchmarks/records/README.md",
    "docs/sites.md",
    "docs/training.md",
    "docs/budgets.md",
    "docs/speed.md",
    "docs/yolo.md",
)
MARKS = re.compile(r"(<!-- table: (.+?) -->)\n.*?<!-- end -->", re.DOTALL)
Row = dict[str, str]

RIVALS = (
    ("best-cifar10-resnet56-macs47", "ResNet-56, CIFAR-10", "93.77 (Torch-Pruning, 2.13x fewer)", 93.9),
    ("best-cifar10-resnet56-macs39", "ResNet-56, CIFAR-10", "93.64 (Torch-Pruning, 2.57x fewer)", 93.65),
    ("best-cifar10-vgg16-macs34", "VGG-16, CIFAR-10", "94.20 (CORING, 66.6% cut)", 94.0),
    ("best-cifar100-vgg16-macs48", "VGG-16, CIFAR-100", "73.86 (SCP's paper, best epoch, 51.5% cut)", 74.3),
    ("best-cifar100-vgg19-macs11", "VGG-19, CIFAR-100", "70.39 (Torch-Pruning, 8.92x fewer)", 71.0),
)
"""Recipes, the best published figures that we know of at their cost, and goals. Dense networks train for 200 epochs,
then pruning for 100."""
EARLIER = "-earlier-budget"
"""End of the names of the runs of a recipe that an earlier version trained, whose budget pushed channels out."""
FINETUNED = {
    "finetune-cifar10-resnet56-scp": "SCP with distillation: the recipe `finetune-cifar10-resnet56-scp`",
    "finetune-cifar10-resnet56-l1": "one-shot L1, then fine-tuning",
    "finetune-cifar10-resnet56-scp-without-distillation": "SCP without distillation",
    "finetune-cifar10-resnet56-l1-with-distillation": "one-shot L1, then fine-tuning with distillation",
    "finetune-cifar10-resnet56-scp-without-cost-weighting": "SCP with distillation, without cost weighting",
    "finetune-cifar10-resnet56-scp-step-schedule": "SCP with distillation, step schedule",
    "finetune-cifar10-resnet56-scp-macs47": "SCP with distillation, 46.95% of the MACs kept",
}
COMPARED = (
    ("SCP with distillation against L1 without", "", ""),
    ("SCP and L1 with the same teacher", "", "-with-distillation"),
    ("SCP and L1, both without a teacher", "-without-distillation", ""),
)
"""Ends of the names of the runs of SCP and of L1."""
SITES = {
    "site-kinds-resnet56-default": "ResNet-56, projection shortcuts: default",
    "site-kinds-resnet56-all": "the same: sum, linear, stream",
    "site-kinds-resnet56_a-default": "ResNet-56, padded shortcuts: default",
    "site-kinds-resnet56_a-all": "the same: sum, linear, stream",
    "site-kinds-mobilenetv2-default": "MobileNetV2: default",
    "site-kinds-mobilenetv2-all": "the same: sum, linear, stream",
}


def named(name: str) -> list[Row]:
    """Return the kept runs of a name."""
    return [run for run in runs() if run["name"] == name]


def top1(found: Sequence[Row]) -> str:
    """Return the accuracy of the compact networks: mean, deviation and number."""
    return f"{figure(values(found, 'compact_top1'))} ({len(found)})"


def values(found: Sequence[Row], column: str) -> list[float]:
    return [float(run[column]) for run in found if run[column]]


def average(found: Sequence[Row], column: str, digits: int = 1) -> str:
    numbers = values(found, column)
    return f"{mean(numbers):.{digits}f}" if numbers else "-"


def dense(found: Sequence[Row]) -> str:
    numbers = baselines(found, runs())
    return f"{mean(numbers):.2f}" if numbers else "-"


def accuracy() -> str:
    """Return the README's first table: our recipes beside the best published figures at their cost."""
    latency = record("accuracy_latency")["rows"]
    rows = []
    for recipe, title, published, _ in RIVALS:
        found = named(recipe)
        if not found:
            continue
        speed = f"{latency[recipe]['speed_up']:.2f}x" if recipe in latency else "-"
        cuts = [f"{average(found, column)}%" for column in ("macs_cut", "params_cut")]
        cells = [title, dense(found), top1(found), *cuts, speed, published]
        rows.append([*cells, "200 + 100", average(found, "minutes")])
    scp, l1 = named("finetune-cifar10-resnet56-scp"), named("finetune-cifar10-resnet56-l1-with-distillation")
    cells = ["ResNet-56, CIFAR-10, from trained weights", dense(scp), top1(scp), f"{average(scp, 'macs_cut')}%"]
    cells += [f"{average(scp, 'params_cut')}%", "-", f"{top1(l1)} (one-shot L1, fine-tuned as long; ours)"]
    rows.append([*cells, "40", average(scp, "minutes")])
    head = ["network", "dense", "pruned", "MACs cut", "parameters cut", "speed-up", "published, at its MACs"]
    return markdown([*head, "epochs", "minutes"], rows)


def by_cell(name: str) -> dict[str, dict[str, dict[float, float]]]:
    """Return mean accuracies of a comparison: network -> method -> share of the MACs; the dense ones as share 1."""
    found: dict[str, dict[str, dict[float, list[float]]]] = {}
    for row in record(name)["rows"]:
        if row["method"] == "dense" or row["epochs"] < LONG:
            cells = found.setdefault(row["network"], {}).setdefault(row["method"], {})
            cells.setdefault(row["keep"], []).append(row["top1"])
            found[row["network"]].setdefault("dense", {}).setdefault(1.0, [row.get("dense_top1", row["top1"])])
    return {
        network: {method: {keep: mean(top1) for keep, top1 in cells.items()} for method, cells in methods.items()}
        for network, methods in sorted(found.items())
    }


LONG = 20
"""Trainings of this many epochs or more are not part of the comparison."""


def comparison(name: str, columns: dict[str, str]) -> str:
    """Return a table with a line for each network: accuracies from the largest share of the MACs to the smallest."""
    first = next(iter(columns.values()))
    networks, rows = {network: cells for network, cells in by_cell(name).items() if first in cells}, []
    for network, methods in networks.items():
        shares = sorted({keep for cells in methods.values() for keep in cells} - {1.0}, reverse=True)
        shown = [methods.get(method, {}) for method in columns.values()]
        best = {keep: max(round(top1.get(keep, 0), 1) for top1 in shown) for keep in shares}
        cells = []
        for top1 in shown:
            texts = {keep: f"{top1[keep]:.1f}" if keep in top1 else "-" for keep in shares}
            marked = (f"**{text}**" if text == f"{best[keep]:.1f}" else text for keep, text in texts.items())
            cells.append(" / ".join(marked))
        left = " / ".join(f"{100 * keep:g}" for keep in shares) + "%"
        rows.append([network, f"{methods['dense'][1.0]:.1f}", left, *cells])
    whole = [
        [methods[method][keep] for method in columns.values()]
        for methods in networks.values()
        for keep in methods[first]
        if all(keep in methods.get(method, {}) for method in columns.values())
    ]
    means = [f"{mean(column):.1f}" for column in zip(*whole, strict=True)]
    rows.append([f"mean of the {len(whole)} cells without a gap", "", "", *means])
    return markdown(["network", "dense", "MACs left", *columns], rows)


def from_trained() -> str:
    """Return the comparison of methods from the same trained networks."""
    columns = {"SCP": "scp:8", "Torch-Pruning": "tp-l2-global", "one-shot L1": "l1", "Taylor": "taylor"}
    return comparison("from_trained", columns)


def means() -> str:
    """Return the means of the comparison over networks, at three shares of the MACs."""
    columns = ("scp:8", "tp-l2-global", "l1")
    # A network "(2)" was measured again, from other dense weights, and replaces the first.
    found = {name.removesuffix(" (2)"): cells for name, cells in by_cell("from_trained").items() if "scp:8" in cells}
    rows = []
    for keep in (0.5, 0.25, 0.125):
        whole = [cells for cells in found.values() if all(keep in cells.get(method, {}) for method in columns)]
        top1 = [mean(cells[method][keep] for cells in whole) for method in columns]
        marked = [f"**{each:.1f}**" if each == max(top1) else f"{each:.1f}" for each in top1]
        rows.append([f"{100 * keep:g}%", str(len(whole)), f"{mean(each['dense'][1.0] for each in whole):.1f}", *marked])
    return markdown(["MACs left", "networks", "dense", "SCP", "Torch-Pruning", "one-shot L1"], rows)


def choices() -> str:
    """Return the settings of a budget beside each other."""
    streams = "scp-streams:8"
    columns = {
        "default": streams,
        "without streams": "scp:8",
        "every width": "scp-streams",
        "`final_at=0.5`": f"{streams}@final_at=0.5",
        "eight rounds": f"{streams}@ROUNDS=8",
        "512 samples": f"{streams}@SAMPLES=512,EFFORT=24",
        "eight levels": f"{streams}@LEVELS=8,EFFORT=12",
    }
    return comparison("from_trained_choices", columns)


def noise() -> str:
    """Return the noise of kept channels, and a later end of the cut, beside the default."""
    columns = {"default": "scp:8", "kept channels sampled": "scp:8@noise", "`final_at=0.4`": "scp:8@final_at=0.4"}
    return comparison("from_trained_noise", columns)


def speed(device: str) -> str:
    """Return the time of cuts at half of the MACs on a device."""
    rows = []
    for row in record("speed")["rows"]:
        if row["device"].startswith(device):
            how = f"{row['runtime']}, {row['dtype']}, {row['batch']}"
            ratios = [f"{100 * row['activations_ratio']:.0f}%", f"{row['speed_up']:.2f}x"]
            times = [f"{row[key]:.2f}" for key in ("dense_ms", "compact_ms")]
            realised = f"{row['speed_up'] * row['macs_ratio']:.2f}"
            rows.append([row["network"], f"{row['cut']}, {row['round_to']}", how, *times, *ratios, realised])
    head = ["network", "cut, multiple", "runtime, precision, batch", "dense ms", "compact ms", "activations"]
    return markdown([*head, "speed-up", "realised"], sorted(rows, key=lambda row: (row[2], row[0], row[1])), left=3)


def latency_targets() -> str:
    """Return cuts to a share of the time beside cuts to half of the MACs, from the same dense weights."""
    rows = [row for row in record("speed")["rows"] if (row["runtime"], row["dtype"]) == ("compile", "bfloat16")]
    times = {(row["network"], row["cut"], row["batch"]): row for row in rows}
    found: dict[tuple[str, str, float, float], list[float]] = {}
    for row in record("from_trained_latency")["rows"]:
        if row["method"].startswith("scp"):
            target = "latency" if "latency" in row["method"] else "MACs"
            found.setdefault((row["network"], target, row["keep"], row["dense_top1"]), []).append(row["top1"])
    rows = []
    for (network, target, keep, before), top1 in sorted(found.items()):
        cut = f"latency {keep}" if target == "latency" else "chosen" if keep == 0.5 else f"chosen {keep}"
        measured = [times.get((network, cut, batch)) for batch in (256, 64)]
        shares = [f"{each['compact_ms'] / each['dense_ms']:.2f}" if each else "-" for each in measured]
        accuracies = " / ".join(f"{each:.1f}" for each in top1)
        rows.append([network, f"{target} {keep:g}", f"{before:.1f}", accuracies, *shares])
    return markdown(["network", "target", "dense", "top-1", "time, batch 256", "time, batch 64"], rows, left=2)


def yolo() -> str:
    """Return detectors before and after they were pruned inside ultralytics' training."""
    rows = []
    for row in record("yolo")["rows"]:
        dense, more = (f"{epochs} epochs" for epochs in row["epochs"].values())
        labels = {"dense": f"dense, {dense}", "control": f"{more} more, dense", "compact": f"{more} more, pruned"}
        for name, label in (labels | {"reloaded": '`YOLO("pruned.pt")`'}).items():
            if name in row["map50"]:
                cells = [row["network"], label, f"{row['map50'][name]:.3f}", f"{row['map50_95'][name]:.3f}"]
                cells += [f"{row[key][name] / 1e6:.1f} M" for key in ("macs", "parameters") if name in row[key]]
                faster = [f", {each['speed_up']:.2f}x" if name == "compact" else "" for each in row["latency"]]
                times = [f"{each[name]['median_ms']:.0f} ms" for each in row["latency"] if name in each]
                cells += [time + gain for time, gain in zip(times, faster, strict=False)]
                cells += [""] * (8 - len(cells))
                rows.append([*cells, f"{row['onnx_difference']:.0e} px" if name == "reloaded" else ""])
    head = ["network", "", "mAP50", "mAP50-95", "MACs, 96 px", "parameters", "PyTorch", "ONNX Runtime", "ONNX off by"]
    return markdown(head, rows, left=2)


def training() -> str:
    """Return how long, and at which learning rate, the recipes that start from trained weights train."""
    rows = []
    recipes = [*(row[0] for row in RIVALS), "finetune-cifar10-resnet56-scp", "finetune-cifar10-resnet56-l1"]
    for recipe in filter(named, recipes):
        settings = tomllib.loads((ROOT / "recipes" / f"{recipe}.toml").read_text(encoding="utf-8"))
        final = settings.get("finetune", {})
        rate = final.get("lr", settings.get("optimizer", {}).get("lr", 0.1))
        epochs = settings["train"]["epochs"] + final.get("epochs", 0)
        found = named(recipe)
        fewer = f"{100 / (100 - mean(values(found, 'macs_cut'))):.1f}x"
        numbers = [fewer, str(epochs), f"{rate:g}", dense(found), top1(found), average(found, "minutes")]
        rows.append([f"`{recipe}`", *numbers])
    return markdown(["recipe", "fewer MACs", "epochs", "learning rate", "dense", "pruned", "minutes"], rows)


def goals() -> str:
    """Return each recipe beside its goal."""
    rows = []
    for recipe, _, published, goal in RIVALS:
        found, before = named(recipe), named(recipe + EARLIER)
        pruned = [each for runs in (found, before) for each in ((dense(runs), top1(runs)) if runs else ("-", "-"))]
        rows.append([f"`{recipe}`", f"{average(found or before, 'macs_cut')}%", *pruned, f"{goal:g}", published])
    head = ["recipe", "MACs cut", "dense", "pruned", "earlier: dense", "earlier: pruned", "goal", "published"]
    return markdown(head, rows)


def finetuned() -> str:
    """Return the trainings of 40 epochs from one trained network."""
    found = ((words, named(name)) for name, words in FINETUNED.items())
    rows = [[words, f"{average(own, 'macs_cut')}%", dense(own), top1(own)] for words, own in found if own]
    return markdown(["training", "MACs cut", "dense", "pruned"], rows)


def compared() -> str:
    """Return SCP minus one-shot L1 for every dense network that they started from, superseded runs too."""
    rows = []
    for words, of_scp, of_l1 in COMPARED:
        scp, l1 = (
            [run for run in all_runs() if run["name"] == f"finetune-cifar10-resnet56-{method}{end}"]
            for method, end in (("scp", of_scp), ("l1", of_l1))
        )
        for start in sorted({run["dense_top1"] for run in scp}):
            ours, theirs = (
                values([run for run in found if run["dense_top1"] == start], "compact_top1") for found in (scp, l1)
            )
            if ours and theirs:
                cells = [start, *(f"{figure(each)} ({len(each)})" for each in (ours, theirs))]
                rows.append([words, *cells, f"{mean(ours) - mean(theirs):+.2f}"])
    return markdown(["comparison", "dense", "SCP", "one-shot L1", "difference"], rows)


def site_kinds() -> str:
    """Return the kinds of sites against each other."""
    rows = []
    for name, words in SITES.items():
        found = [run for run in all_runs() if run["name"] == name]
        rows.append([words, f"{average(found, 'macs_cut')}%", f"{average(found, 'params_cut')}%", top1(found)])
    return markdown(["kinds of sites", "MACs cut", "parameters cut", "pruned"], rows)


def record(name: str) -> Any:
    return json.loads((HERE / "records" / f"{name}.json").read_text(encoding="utf-8"))


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}%"


EXACT = ("exact", "not smaller")


def both(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what became of a network of the zoo with the default kinds of sites, and with all; a crash ends both."""
    return [row, row.get("all_kinds", row)]


def zoo() -> str:
    """Return the totals of the zoo."""
    found = record("zoo")["rows"]
    norms, rows = sum(row.get("batch_norms", 0) for row in found), []
    for words, results in zip(("default", "all kinds"), zip(*map(both, found), strict=True), strict=True):
        states = Counter(result["status"] for result in results)
        counts = [str(sum(states[state] for state in group)) for group in (EXACT, ["refused"], ["failed", "crash"])]
        masked = sum(result.get("masked", 0) for result in results)
        rows.append([words, *counts, f"{masked:,} of {norms:,} ({100 * masked / norms:.1f}%)"])
    return markdown(["kinds of sites", "networks exact", "refused", "failed", "BatchNorms that can be masked"], rows)


def packages() -> str:
    """Return the totals of the networks of other packages."""
    states: dict[str, Counter[str]] = {}
    for row in record("packages")["rows"]:
        if row["setting"] == "default":
            states.setdefault(row["source"], Counter())[row["status"]] += 1
    rows = []
    for source, counts in states.items():
        exact, refused, total = sum(counts[key] for key in EXACT), counts["refused"], sum(counts.values())
        rows.append([source, str(total), str(exact), str(refused), str(total - exact - refused)])
    return markdown(["package", "networks", "exact", "refused", "failed"], rows)


def networks() -> str:
    """Return every network of the zoo and of other packages."""
    rows = []
    for row in (*record("zoo")["rows"], *(row for row in record("packages")["rows"] if row["setting"] == "default")):
        cells = [row["name"], row["source"], str(row.get("batch_norms", ""))]
        for result in both(row) if "all_kinds" in row else [row, {}]:
            cells += [result.get("status", ""), str(result.get("masked", "")), percent(result.get("macs_kept"))]
        rows.append(cells)
    head = ["network", "source", "BatchNorms", "default kinds", "masked", "MACs kept", "all kinds", "masked"]
    return markdown([*head, "MACs kept"], rows, left=2)


def refused() -> str:
    """Return why networks are refused, and how many."""
    found = (*record("zoo")["rows"], *record("packages")["rows"])
    reasons = Counter(re.split(r"[.:;] ", row["reason"])[0][:160] for row in found if row["status"] == "refused")
    return markdown(["reason", "networks"], [[reason, str(count)] for reason, count in reasons.most_common()])


def torch_pruning() -> str:
    """Return what both tools make of the same dead channels."""
    rows = []
    for row in record("torch_pruning")["rows"]:
        cells = [row["name"]]
        for tool in ("softprune", "torch_pruning"):
            result = row[tool]
            seconds = f"{sum(result['seconds'].values()):.1f}" if "seconds" in result else ""
            cells += [result["status"], percent(result.get("macs_kept")), seconds]
        rows.append(cells)
    return markdown(["network", "softprune", "MACs kept", "s", "Torch-Pruning", "MACs kept", "s"], rows)


def certificates() -> str:
    """Return what the compact and the masked network are off by in each precision."""
    rows = []
    for row in record("certificates")["rows"]:
        numbers = [f"{row[key]:.0e}" if key in row else "refused" for key in ("float64", "own", "own_masked")]
        rows.append([row["network"], row["dtype"], percent(row["macs_kept"]), *numbers])
    head = ["network", "precision", "MACs kept", "float64", "compact, own precision", "masked, own precision"]
    return markdown(head, rows, left=2)


def latency(device: str) -> str:
    """Return milliseconds per forward of dense and compact networks."""
    rows = []
    for row in record(f"latency-{device}")["rows"]:
        if row["speed_up"] is None:
            continue
        kind = row["backend"] + (", folded" if row["fold_bn"] else "") + ("" if row["gathers"] else ", no gathers")
        cells = [row["model"], kind, row["dtype"], str(row["multiple"]), str(row["batch"])]
        cells += [f"{row[side]['median_ms']:.3f}" for side in ("dense", "compact")]
        rows.append([*cells, percent(1 / row["mac_ratio"]), f"{row['speed_up']:.2f}", f"{row['realised']:.2f}"])
    head = ["network", "backend", "dtype", "multiple", "batch", "dense ms", "compact ms", "MACs", "speed-up"]
    return markdown([*head, "realised"], rows, left=3)


def steps() -> str:
    """Return milliseconds per training step: softprune's with masks, and plain loops of the dense network."""
    found = {(row["model"], row["form"]): row["ms"] for row in record("train_step")["rows"]}
    forms = {"softprune, with masks": "scp", "torch.compile, reduce-overhead": "reduce-overhead", "eager": "eager"}
    rows = [[model, *(f"{found[model, form]:.2f}" for form in forms.values())] for model in ("vgg16", "resnet56")]
    return markdown(["network", *forms], rows)


def robustness() -> str:
    """Return what random inputs, kills and random networks found."""
    fuzz, kill, networks = record("fuzz"), record("kill"), record("property")
    cuts = ", ".join(f"{count} {state}" for state, count in networks["cuts"].items())
    rows = [
        ["`make fuzz`", f"{fuzz['inputs']:,} damaged files and options", str(fuzz["findings"])],
        ["`make kill`", f"{kill['kills']:,} processes killed with SIGKILL", str(kill["findings"])],
        ["`make property`", f"{networks['networks']:,} random networks: {cuts}", str(len(networks["failed"]))],
    ]
    return markdown(["command", "inputs", "findings"], rows, left=2)


def reach() -> str:
    """Return how many BatchNorms can be masked, by kind of site."""
    rows = []
    for row in record("reach")["rows"]:
        masked = [f"{count} ({100 * count / row['norms']:.0f}%)" for count in row["masked"]]
        rows.append([row["name"], str(row["norms"]), *masked, percent(row["floor"][0]), percent(row["floor"][-1])])
    head = ["network", "BatchNorms", "activated", "+ sum", "+ linear", "+ stream", "MACs at the floor, before", "after"]
    return markdown(head, rows)


TABLES: dict[str, Callable[..., str]] = {
    "accuracy": accuracy,
    "from_trained": from_trained,
    "means": means,
    "choices": choices,
    "noise": noise,
    "speed": speed,
    "latency_targets": latency_targets,
    "yolo": yolo,
    "training": training,
    "goals": goals,
    "finetuned": finetuned,
    "compared": compared,
    "paper": lambda number: paper_table(int(number)),
    "figure4": figure4.table,
    "summary": summary,
    "missing": missing_table,
    "wanted": wanted_table,
    "site-kinds": site_kinds,
    "zoo": zoo,
    "packages": packages,
    "networks": networks,
    "refused": refused,
    "torch-pruning": torch_pruning,
    "certificates": certificates,
    "latency": latency,
    "steps": steps,
    "robustness": robustness,
    "reach": reach,
}


def rendered(text: str) -> str:
    """Return a document with new content in each of its tables."""

    def replaced(match: re.Match[str]) -> str:
        name, *arguments = match[2].split()
        return f"{match[1]}\n{TABLES[name](*arguments)}\n<!-- end -->"

    return MARKS.sub(replaced, text)


def main() -> None:
    """Write the documents, or check them."""
    differ = []
    for path in (ROOT / name for name in DOCUMENTS):
        text = path.read_text(encoding="utf-8")
        if rendered(text) != text:
            differ.append(str(path.relative_to(ROOT)))
            if "--check" not in sys.argv:
                path.write_text(rendered(text), encoding="utf-8")
    if "--check" not in sys.argv:
        figure4.write()
    print(*(differ or ["All documents are as their records say."]), sep="\n")
    sys.exit(bool(differ and "--check" in sys.argv))


if __name__ == "__main__":
    main()
