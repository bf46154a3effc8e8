"""`train` and `resume`: what is printed, what exit codes mean, and which mistakes are answered."""

import time
from pathlib import Path

import pytest
from forked import run_command
from killing import fork_server
from tiny import metrics, tiny_recipe

from softprune.lab.runs.folder import RunFolder

OWN = ("--model", "tiny_networks:tiny")
"""The network of the tiny run, whose folder alone may not name code."""


def test_a_run_ends_with_the_table_and_the_report(softprune, tmp_path: Path) -> None:
    result = softprune("train", "tiny.toml", "--set", "train.epochs=2", "--seed", "3", "--out", "run")
    assert result.exit_code == 0, result.output
    assert "epoch 1/2" in result.output
    assert "epoch 2/2" in result.output
    for variant in ("dense", "masked", "compact"):
        assert f"\n{variant}" in result.output
    assert "Compact network: run/compact" in result.output
    assert "Report: run/report.html" in result.output
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
    assert RunFolder("run").read_result().seed == 3


def test_stopped_by_the_time_limit_and_resumed(softprune, tmp_path: Path) -> None:
    stopped = softprune("train", "tiny.toml", "--out", "run", "--time-limit", "0s")
    assert stopped.exit_code == 75
    assert "softprune resume run --model tiny_networks:tiny" in stopped.output
    assert not (tmp_path / "run" / "result.json").exists()
    refused = softprune("resume", "run")
    assert refused.exit_code == 2
    assert "add `--model tiny_networks:tiny`" in refused.stderr
    assert softprune("resume", "run", "--model", "digits_net").exit_code == 2
    resumed = softprune("resume", "run", *OWN)
    assert resumed.exit_code == 0, resumed.output
    assert len(metrics(tmp_path / "run")) == 4
    again = softprune("resume", "run")
    assert again.exit_code == 0
    assert "compact" in again.output


@pytest.mark.filterwarnings("default")  # of the child, not of this process
@pytest.mark.usefixtures("forking")
def test_sigterm_saves_and_exits_with_75(tmp_path: Path) -> None:
    tiny_recipe(tmp_path)
    out = tmp_path / "out"
    command = ("train", "tiny.toml", "--set", "train.epochs=100000", "--out", "run")
    process = fork_server().Process(target=run_command, args=(str(tmp_path), command, str(out)))
    process.start()
    deadline = time.monotonic() + 120
    while not (tmp_path / "run" / "checkpoints").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.terminate()
    process.join(60)
    assert process.exitcode == 75
    assert "Stopped by SIGTERM; everything is saved. Resume: softprune resume run" in out.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("tiny.tml", "Did you mean 'tiny.toml'?"),
        ("misspelled.toml", "Did you mean 'train.epochs'?"),
        ("tiny.toml --set method.target.macs=1.5", "Got macs = 1.5, which means 1.5 MACs"),
        ("tiny.toml --set model.name=nets:none", "must be importable"),
        ("tiny.toml --model ./mine.py", "model.name must be one of"),
        ("tiny.toml --set model.weights=tiny_networks.py", "model.weights"),
        ("tiny.toml --time-limit soon", "--time-limit must be a number of seconds"),
        ("tiny.toml --device cuda:256", "--device must be auto, cpu, cuda"),
        ("imagenet-resnet50-scp", "--data-dir"),
    ],
)
def test_mistakes_end_in_one_clear_message(softprune, tmp_path: Path, arguments: str, message: str) -> None:
    (tmp_path / "misspelled.toml").write_text("[train]\nepoch = 3\n")
    result = softprune("train", *arguments.split())
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.output
    assert not (tmp_path / "runs").exists()


def image_folder(root: Path) -> None:
    """Two classes of small images, in the ImageNet layout."""
    Image = pytest.importorskip("PIL.Image", reason='the "vision" extra is not installed')
    for split in ("train", "val"):
        for name, shade in (("dark", 40), ("light", 200)):
            (root / split / name).mkdir(parents=True)
            for number in range(4):
                Image.new("RGB", (20, 16), (shade, shade, shade + number)).save(root / split / name / f"{number}.png")


FOLDER = ("--set", "data.name=folder", "--set", "data.image_size=16", "--set", "data.batch_size=4")
FOLDER += ("--set", "data.workers=0", "--set", "train.epochs=2", "--set", "model.name=colour_networks:tiny")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    image_folder(tmp_path / "images")
    module = (tmp_path / "tiny_networks.py").read_text()
    (tmp_path / "colour_networks.py").write_text(module.replace("channels=1", "channels=3"))
    return tmp_path / "images"


def test_a_folder_of_images_trains(softprune, images: Path) -> None:
    result = softprune("train", "tiny.toml", *FOLDER, "--data-dir", str(images), "--out", "run")
    assert result.exit_code == 0, result.output
    assert RunFolder("run").read_result().data == "folder"


def test_a_folder_has_defaults_of_its_own(softprune, images: Path) -> None:
    arguments = ("train", "--data", "folder", "--data-dir", str(images), "--set", "data.image_size=32", "--dry-run")
    result = softprune(*arguments, "--model", "resnet20")
    assert result.exit_code == 0, result.output
    assert "target macs = 0.5" in result.output
    assert "30 training steps are too few to meet a target accurately" in " ".join(result.stderr.split())
    assert softprune(*arguments, "--model", "colour_networks:tiny").exit_code == 2  # it has no trained weights


def test_one_shot_pruning_of_the_same_length_is_set_beside(softprune) -> None:
    settings = ("--set", "train.epochs=2", "--set", "data.batch_size=720", "--out", "run")
    settings += ("--set", "schedule.kind=cosine", "--set", "schedule.warmup_epochs=1")
    refused = softprune("train", "tiny.toml", *settings, "--against", "l1")
    assert "--against needs a target" in " ".join(refused.stderr.split())
    result = softprune("train", "tiny.toml", *settings, "--set", "method.target.macs=0.5", "--against", "l1")
    assert result.exit_code == 0, result.output
    assert [line.split()[0] for line in result.stdout.splitlines()[-2:]] == ["SCP", "L1"]
    other = RunFolder("run-l1").read_config()
    assert (other.train.epochs, other.finetune.epochs, other.method.target) == (1, 1, {"macs": 0.5})


def test_common_settings_have_flags(softprune) -> None:
    arguments = ("--epochs", "1", "--batch-size", "32", "--lr", "0.02", "--seed", "4", "--data", "digits")
    result = softprune("train", "tiny.toml", *arguments, "--model", "tiny_networks:tiny")
    assert result.exit_code == 0, result.output
    config = RunFolder("runs/digits-tiny-scp").read_config()
    assert (config.train.epochs, config.data.batch_size, config.optimizer.lr, config.seed) == (1, 32, 0.02, 4)


@pytest.mark.quick  # the smoke test of the package
def test_a_dry_run_checks_and_writes_nothing(softprune, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    result = softprune("train", "tiny.toml", "--dry-run", "--set", "method.target.macs=0.5")
    assert result.exit_code == 0, result.output
    for text in ("tiny_networks:tiny", "1,437 training", "BatchNorms", "target macs = 0.5", "runs/tiny"):
        assert text in result.output
    assert "epochs of 15 steps" in result.output  # 1,437 images in batches of 96
    assert sorted(path for path in tmp_path.rglob("*") if "__pycache__" not in path.parts) == before
    Path("runs/digits-tiny-l1").mkdir(parents=True)
    result = softprune(
        "train", "tiny.toml", "--dry-run", "--set", "method.name=l1", "--set", "method.options.ratio=0.3"
    )
    assert result.output.endswith("folder    runs/digits-tiny-l1-2\n")
    assert "method    l1, ratio = 0.3\n" in result.output  # no strength, which it does not use
    for arguments, text in (
        (("--model", "vgg166"), "vgg16"),
        (("--model", "resnet20"), "The network resnet20 must accept the images of the data set (1x8x8)"),
        (("--set", "method.target.macs=0.000001"), "target"),
    ):
        result = softprune("train", "tiny.toml", "--dry-run", *arguments)
        assert result.exit_code == 2
        assert text in " ".join(result.stderr.split())
