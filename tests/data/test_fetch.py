"""Fetching: checksums, broken downloads that go on, damaged files that are refused and named."""

from __future__ import annotations

import gzip
import hashlib
import io
import pickle
import shutil
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

import dpulr
from dpulr.cli import main
from dpulr.data import catalog, cifar, fetch
from dpulr.data.catalog import CIFAR10, FASHION, Entry
from dpulr.data.download import download
from dpulr.errors import DataError

BODY = np.random.default_rng(3).integers(0, 256, 700_000, dtype=np.uint8).tobytes()


class Flaky(BaseHTTPRequestHandler):
    """Sends at most `most` bytes per answer; understands ranges unless told not to."""

    most: ClassVar[int] = 1 << 30
    ranges: ClassVar[bool] = True
    asked: ClassVar[list[str]] = []
    body: ClassVar[bytes] = BODY

    def do_GET(self) -> None:
        wanted = self.headers.get("Range", "")
        type(self).asked.append(wanted)
        if self.path != "/file":
            self.send_error(404)
            return
        first = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and self.ranges else 0
        if first >= len(self.body):
            self.send_error(416)
            return
        self.send_response(206 if wanted and self.ranges else 200)
        self.send_header("Content-Length", str(len(self.body) - first))
        self.end_headers()
        self.wfile.write(self.body[first : first + self.most])

    def log_message(self, *_: object) -> None:
        return None


@pytest.fixture
def server() -> Iterator[str]:
    Flaky.most, Flaky.ranges, Flaky.asked, Flaky.body = 1 << 30, True, [], BODY
    running = ThreadingHTTPServer(("127.0.0.1", 0), Flaky)
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{running.server_address[1]}"
    running.shutdown()
    running.server_close()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DPULR_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def quiet(what: str, done: int, total: int) -> None:
    return None


def test_a_broken_download_goes_on(server: str, tmp_path: Path) -> None:
    Flaky.most = 300_000
    shares: list[tuple[int, int]] = []
    path = download(f"{server}/file", tmp_path / "got", lambda _, done, total: shares.append((done, total)))
    assert path.read_bytes() == BODY
    assert Flaky.asked == ["", "bytes=300000-", "bytes=600000-"]
    assert shares[-1] == (len(BODY), len(BODY))
    assert [p.name for p in tmp_path.iterdir()] == ["got"]


def test_what_came_is_kept_for_the_next_time(server: str, tmp_path: Path) -> None:
    Flaky.most = 100_000
    with pytest.raises(ValueError, match="try again to go on"):
        download(f"{server}/file", tmp_path / "got", quiet)
    assert (tmp_path / "got.part").stat().st_size == 400_000
    assert not (tmp_path / "got").exists()
    assert download(f"{server}/file", tmp_path / "got", quiet).read_bytes() == BODY


def test_a_server_without_ranges_starts_again(server: str, tmp_path: Path) -> None:
    (tmp_path / "got.part").write_bytes(b"something else")
    Flaky.ranges = False
    assert download(f"{server}/file", tmp_path / "got", quiet).read_bytes() == BODY
    (tmp_path / "more.part").write_bytes(BODY + b"too much")
    Flaky.ranges = True
    assert download(f"{server}/file", tmp_path / "more", quiet).read_bytes() == BODY


def test_missing_files_and_bad_addresses_are_named(server: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="404"):
        download(f"{server}/other", tmp_path / "got", quiet)
    for bad in ("", "nothing", "http://", "http://127.0.0.1:1/x", "ftp:/x"):
        with pytest.raises(ValueError):
            download(bad, tmp_path / "got", quiet)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, server: str) -> Entry:
    """A data set of one packed file on the server."""
    Flaky.body = gzip.compress(BODY)
    entry = Entry("small", "for tests", "md5", {"file": hashlib.md5(BODY).hexdigest()}, url=server)
    monkeypatch.setitem(catalog.ENTRIES, "small", entry)
    monkeypatch.setattr(fetch, "download", lambda url, path, progress: download(url.removesuffix(".gz"), path, progress))
    monkeypatch.setenv("PATH", "")
    return entry


def test_fetch_checks_and_puts_in_place(small: Entry, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Flaky.most = 300_000
    assert main(["data", "fetch", "small"]) == 0
    assert (home / "small" / "file").read_bytes() == BODY
    assert [p.name for p in (home / "small").iterdir()] == ["file"]
    assert str(home / "small") in capsys.readouterr().out
    Flaky.asked.clear()
    assert main(["data", "fetch", "small"]) == 0
    assert Flaky.asked == []  # it is there
    (home / "small" / "file").write_bytes(b"damaged")
    assert main(["data", "fetch", "small"]) == 0
    assert (home / "small" / "file").read_bytes() == BODY


def test_a_damaged_file_is_refused_and_named(small: Entry, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Flaky.body = gzip.compress(BODY[:-1])
    assert main(["data", "fetch", "small"]) == 2
    assert "file is damaged" in capsys.readouterr().err
    assert list((home / "small").iterdir()) == []


def test_fashion_mnist_from_a_folder(tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = next((folder for folder in catalog.shared(FASHION) if folder.is_dir()), None)
    if source is None:
        pytest.skip("Fashion-MNIST is not on this machine")
    assert main(["data", "fetch", "fashion-mnist", "--from", str(source)]) == 0
    train, test = dpulr.data.load("fashion-mnist")
    assert train.tensors[0].shape == (60_000, 1, 28, 28)
    assert test.tensors[1].bincount().tolist() == [1_000] * 10
    broken = tmp_path / "broken"
    shutil.copytree(home / "fashion-mnist", broken)
    name = "t10k-labels-idx1-ubyte"
    (broken / name).write_bytes((broken / name).read_bytes()[:-1] + b"\x07")
    with pytest.raises(ValueError, match=f"{name} is damaged"):
        dpulr.data.load("fashion-mnist", broken)
    (broken / name).unlink()
    with pytest.raises(ValueError, match=f"no {name}"):
        dpulr.data.load("fashion-mnist", broken)


def test_archives_are_read_by_member(small: Entry, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        member = tarfile.TarInfo("inside/file")
        member.size = len(BODY)
        tar.addfile(member, io.BytesIO(BODY))
    Flaky.body = packed.getvalue()
    entry = replace(small, url=f"{small.url}/file", inside="inside")
    monkeypatch.setitem(catalog.ENTRIES, "small", entry)
    assert fetch.fetch("small", quiet) == home / "small"
    assert [p.name for p in (home / "small").iterdir()] == ["file"]
    (home / "small" / "file").unlink()
    monkeypatch.setitem(catalog.ENTRIES, "small", replace(entry, inside="elsewhere"))
    with pytest.raises(DataError, match="is damaged"):
        fetch.fetch("small", quiet)
    assert list((home / "small").iterdir()) == []


def test_the_place_of_data_sets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DPULR_DATA", str(tmp_path))
    assert catalog.home(CIFAR10) == tmp_path / "cifar10"
    monkeypatch.delenv("DPULR_DATA")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    assert catalog.home(CIFAR10) == tmp_path / "share" / "dpulr" / "cifar10"


def test_mnist_needs_no_fetch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "fetch", "mnist"]) == 0
    assert "nothing to fetch" in capsys.readouterr().out
    assert main(["data", "check", "mnist"]) == 0
    shown = capsys.readouterr().out
    assert "train: 60,000 records, float32 of shape (1, 28, 28) and int64 of shape ()" in shown
    assert shown.count("nothing wrong was found") == 2
    assert main(["data", "list", "--json"]) == 0
    assert '"in the package"' in capsys.readouterr().out


def test_an_absent_data_set_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dpulr data fetch cifar10"):
        dpulr.data.load("cifar10")
    with pytest.raises(ValueError, match=r"no data_batch_1\.bin"):
        dpulr.data.load("cifar10", tmp_path)
    assert main(["train", "--dataset", "cifar10"]) == 2


def test_cifar_pictures_become_binary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row i of a picture is image i, its pixels one after the other, three colours each."""
    import json

    from PIL import Image

    monkeypatch.setattr(cifar, "RECORDS", 20)
    pixels = np.random.default_rng(0).integers(0, 256, (20, 1024, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "data_batch_2.png")
    (tmp_path / "train_lables.json").write_text(json.dumps([k % 10 for k in range(60)]))
    raw = np.frombuffer(cifar.from_pictures(tmp_path, "data_batch_2.bin"), dtype=np.uint8).reshape(20, 3073)
    assert raw[:, 0].tolist() == [k % 10 for k in range(20, 40)]
    assert raw[3, 1 + 1024 * 2 + 7] == pixels[3, 7, 2]  # blue, eighth pixel


def test_cifar_python_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 3072), dtype=np.uint8)
    batch = {b"data": pixels, b"labels": [k % 10 for k in range(20)], b"filenames": [b"x"] * 20}
    expected = np.concatenate([np.arange(20, dtype=np.uint8).reshape(-1, 1) % 10, pixels], axis=1).tobytes()
    inner = tmp_path / "cifar-10-batches-py"
    inner.mkdir()
    for protocol in (2, 4):
        (inner / "data_batch_1").write_bytes(pickle.dumps(batch, protocol))
        assert cifar.from_python(inner / "data_batch_1") == expected
    with pytest.raises(ValueError, match="data_batch_1 is damaged"):  # not the real ones: the digest differs
        dpulr.data.load("cifar10", tmp_path)
    (inner / "data_batch_1").write_bytes(b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR.")
    with pytest.raises(ValueError, match=r"asks for os\.system"):
        dpulr.data.load("cifar10", tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_cifar_by_npm(home: Path) -> None:
    if shutil.which("npm") is None:
        pytest.skip("npm is not on this machine")
    assert main(["data", "fetch", "cifar10"]) == 0
    assert sorted(p.name for p in (home / "cifar10").iterdir()) == sorted(CIFAR10.files)
    train, test = dpulr.data.load("cifar10")
    assert train.tensors[0].shape == (50_000, 3, 32, 32)
    assert train.tensors[1].bincount().tolist() == [5_000] * 10
    assert test.tensors[1].bincount().tolist() == [1_000] * 10
    assert train.tensors[1][:5].tolist() == [6, 9, 9, 4, 1]
    python = home / "cifar-10-batches-py"  # the same records as the authors' other version of the files
    python.mkdir()
    for name in CIFAR10.files:
        rows = np.frombuffer((home / "cifar10" / name).read_bytes(), dtype=np.uint8).reshape(-1, 3073)
        (python / name.removesuffix(".bin")).write_bytes(pickle.dumps({b"labels": rows[:, 0].tolist(), b"data": rows[:, 1:]}, 2))
    again, _ = dpulr.data.load("cifar10", home)
    assert all((a == b).all() for a, b in zip(again.tensors, train.tensors, strict=True))
