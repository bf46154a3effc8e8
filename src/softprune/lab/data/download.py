"""Download a file, or an archive that is checked against its checksum and unpacked, as a whole or not at all."""

import hashlib
import importlib
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from softprune.errors import DataError, first_line
from softprune.io import extract_plain
from softprune.log import get_logger

logger = get_logger(__name__)


def fetch_archive(url: str, sha256: str, folder: str, root: Path) -> Path:
    """Download the tar archive at `url` and unpack its top folder, `folder`, under `root`.

    The work is done in a temporary folder under `root`, so an interruption leaves nothing that looks complete.
    """
    goal = root / folder
    with _downloaded(url, root) as archive:
        with archive.open("rb") as file:
            got = hashlib.file_digest(file, "sha256").hexdigest()
        if got != sha256:
            raise DataError(
                f"The file from {url} must have the SHA-256 {sha256}. Got {got}: it is damaged or replaced, and "
                "nothing was unpacked. Try again, or fetch it from elsewhere."
            )
        unpacked = archive.with_name("unpacked")
        try:
            with tarfile.open(archive) as tar:
                extract_plain(tar, unpacked)
        except tarfile.TarError as error:
            raise DataError(f"The archive must be a tar file of plain files. Got {error}.") from error
        if not (unpacked / folder).is_dir():
            raise DataError(f"The archive {url} must hold a folder {folder}. Got none.")
        if goal.exists():  # it is incomplete, or there would have been no download
            goal.rename(archive.with_name("replaced"))
        (unpacked / folder).rename(goal)
    logger.info("unpacked into %s", goal)
    return goal


def fetch_file(url: str, path: Path) -> None:
    """Download `url` to `path`, as a whole or not at all."""
    with _downloaded(url, path.parent) as file:
        file.replace(path)


@contextmanager
def _downloaded(url: str, root: Path) -> Iterator[Path]:
    """Yield the file at `url` in a temporary folder under `root`."""
    logger.info("downloading %s", url)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".softprune-download-", dir=root) as work:
            file = Path(work, "file")
            _download(url, file)
            yield file
    except OSError as error:
        raise DataError(f"{url} could not be stored under {root}: {error}.") from error


def _download(url: str, archive: Path) -> None:
    scheme = url.partition("://")[0].lower()
    if scheme not in ("http", "https", "ftp", "file"):
        _copy_from_storage(url, scheme, archive)
        return
    try:
        with urllib.request.urlopen(url, timeout=60) as response, archive.open("wb") as file:
            shutil.copyfileobj(response, file, 1 << 20)
            expected = response.headers.get("Content-Length")
        if expected is not None and archive.stat().st_size != int(expected):
            raise DataError(
                f"{url} must have {expected} bytes. Got {archive.stat().st_size}: the connection was lost. Try again."
            )
    except urllib.error.URLError as error:
        raise DataError(
            f"{url} could not be downloaded: {error.reason}. Check the network, or fetch the file elsewhere "
            "and unpack it into the data folder."
        ) from error


def _copy_from_storage(url: str, scheme: str, archive: Path) -> None:
    """Copy a file from an object store, or any other storage that fsspec knows."""
    try:
        system, path = importlib.import_module("fsspec.core").url_to_fs(url)
        system.get_file(path, str(archive))
    except ImportError as error:
        raise DataError(
            f"A URL of {scheme}:// needs a package that fsspec loads. Got an ImportError for {url}; install it with "
            f"`pip install 'fsspec[{scheme}]'`."
        ) from error
    except Exception as error:  # each storage raises errors of its own
        # The text of this one may be the path alone.
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else first_line(error)
        raise DataError(
            f"{url} could not be downloaded: {reason}. Check the URL and the credentials of its storage."
        ) from error
