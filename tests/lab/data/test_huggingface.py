"""Sets of the Hugging Face Hub, on a pretended package `datasets`; the real one is used where it is installed."""

import io
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from softprune.errors import DataError
from softprune.lab.data import load_data

PIL_Image = pytest.importorskip("PIL.Image", reason='the "vision" extra is not installed')


class Image:
    def __init__(self, decode: bool = True) -> None: ...


class ClassLabel:
    names = ("ant", "bee")


class Value: ...


def png(red: int) -> bytes:
    out = io.BytesIO()
    PIL_Image.new("RGB", (20, 30), (red, 0, 0)).save(out, "png")
    return out.getvalue()


class Rows:
    """As much of a `datasets.Dataset` as is used."""

    def __init__(self, features: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        self.features, self._rows = features, rows

    def __getitem__(self, key: Any) -> Any:
        return [row[key] for row in self._rows] if isinstance(key, str) else self._rows[key]

    def cast_column(self, column: str, kind: Any) -> "Rows":
        assert column == "img"
        return self

    def select_columns(self, columns: list[str]) -> "Rows":
        return Rows(self.features, [{name: row[name] for name in columns} for row in self._rows])


def rows(count: int, features: dict[str, Any] | None = None, label: int = 1) -> Rows:
    found = {"img": Image(), "label": ClassLabel(), "note": Value()} if features is None else features
    content = [{"img": {"bytes": png(10 * i), "path": None}, "label": i % 2 * label, "note": ""} for i in range(count)]
    return Rows(found, content)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(**splits: Rows) -> None:
        def load_dataset(repo: str, cache_dir: str | None, download_config: Any) -> dict[str, Rows]:
            assert download_config == {"local_files_only": True}
            if repo == "gone":
                raise FileNotFoundError("Dataset 'gone' doesn't exist on the Hub.\nmore")
            return splits

        module = SimpleNamespace(Image=Image, ClassLabel=ClassLabel, load_dataset=load_dataset, DownloadConfig=dict)
        monkeypatch.setitem(sys.modules, "datasets", module)

    return install


def _load(**options: Any) -> Any:
    return load_data("huggingface", repo=options.pop("repo", "a/b"), image_size=16, **options)


def test_a_set_is_loaded(hub: Any) -> None:
    hub(train=rows(6), test=rows(2), validation=rows(4))
    bundle = _load(augment=False)
    assert (bundle.class_names, bundle.num_classes, bundle.name) == (("ant", "bee"), 2, "huggingface")
    assert (len(bundle.train), len(bundle.test)) == (6, 4)
    image, label = bundle.train[3, 0]
    assert (image.shape, label, image[0].unique().tolist()) == ((3, 16, 16), 1, [30])
    held = _load(holdout=2)
    assert (len(held.train), len(held.holdout)) == (4, 2)


def test_mistakes(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hub(train=rows(6), test=rows(2))
    with pytest.raises(DataError, match=r"needs data\.repo"):
        _load(repo="")
    with pytest.raises(DataError, match=r"Got 'gone': Dataset 'gone' doesn't exist on the Hub\. Check"):
        _load(repo="gone")
    hub(train=rows(6))
    with pytest.raises(DataError, match=r"must have the split train, and one of validation.* Got train in"):
        _load()
    unlabelled = rows(2)
    unlabelled._rows[1]["label"] = None
    for without in (rows(2, label=-1), unlabelled):
        hub(train=rows(6), test=without)
        with pytest.raises(DataError, match="Got the split test of 'a/b' without them"):
            _load()
    hub(train=rows(6, {"img": Image(), "text": Value()}), test=rows(2))
    with pytest.raises(DataError, match="with the columns img, text; write a factory"):
        _load()
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"install it with `pip install datasets`"):
        _load()


@pytest.mark.filterwarnings("ignore")
def test_a_set_on_disk_with_the_real_package(tmp_path: Any) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=["ant", "bee"])})

    def split(count: int) -> Any:
        content = {"img": [{"bytes": png(10 * i), "path": None} for i in range(count)]}
        return datasets.Dataset.from_dict({**content, "label": [i % 2 for i in range(count)]}, features)

    datasets.DatasetDict(train=split(6), test=split(4)).save_to_disk(tmp_path / "saved")
    bundle = _load(repo=str(tmp_path / "saved"), augment=False)
    assert bundle.train.labels.tolist() == [0, 1, 0, 1, 0, 1]
    image, label = bundle.test[3, 0]
    assert (image.shape, label, image[0].unique().tolist()) == ((3, 16, 16), 1, [30])
