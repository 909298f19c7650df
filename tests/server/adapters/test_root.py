"""No name leads out of the folder of adapters, and nothing but regular files is read in it."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rigs.adapter_bad import BAD_NAMES
from rigs.adapter_cases import adapter_config, write_adapter

from deltaline_server.adapters.root import AdapterRoot
from deltaline_server.checkpoints.config_reader import ModelError

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


class Opened:
    """Whatever is opened, as the process sees it: the place that each descriptor leads to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.places: list[str] = []
        real = os.open

        def spy(path: Any, flags: int, *args: Any, **options: Any) -> int:
            descriptor = real(path, flags, *args, **options)
            self.places.append(os.readlink(f"/proc/self/fd/{descriptor}"))
            return descriptor

        monkeypatch.setattr(os, "open", spy)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one sound adapter, and one like it outside."""
    for name in ("root/good", "outside"):
        write_adapter(tmp_path / name, adapter_config(), {"x": torch.ones(2)})
    return tmp_path / "root"


def read(folder: Path, name: str) -> tuple[bytes, int]:
    root = AdapterRoot(folder)
    try:
        with root.open(name) as (config, tensors):
            return config, len(tensors.read(0, tensors.size))
    finally:
        root.close()


def test_an_adapter_is_found_by_its_name(folder: Path) -> None:
    assert read(folder, "good") == ((folder / "good" / CONFIG).read_bytes(), (folder / "good" / TENSORS).stat().st_size)


@pytest.mark.parametrize("name", BAD_NAMES, ids=lambda name: repr(name)[:24])
def test_a_bad_name_is_refused_and_nothing_is_opened(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    root = AdapterRoot(folder)
    opened = Opened(monkeypatch)
    with pytest.raises(ModelError, match=r"^name: expected 1 \.\. 64 of"), root.open(name):
        raise AssertionError("was opened")
    root.close()
    assert opened.places == []


def link_to_a_directory(folder: Path) -> None:
    (folder / "bad").symlink_to(folder.parent / "outside")


def link_inside(folder: Path) -> None:
    (folder / "bad").symlink_to(folder / "good")


def link_to_nothing(folder: Path) -> None:
    (folder / "bad").symlink_to(folder / "nothing")


def links_as_files(folder: Path) -> None:
    (folder / "bad").mkdir()
    for file in (CONFIG, TENSORS):
        (folder / "bad" / file).symlink_to(folder.parent / "outside" / file)


def link_as_tensors(folder: Path) -> None:
    shutil.copytree(folder / "good", folder / "bad")
    (folder / "bad" / TENSORS).unlink()
    (folder / "bad" / TENSORS).symlink_to(folder.parent / "outside" / TENSORS)


def fifo(folder: Path) -> None:
    shutil.copytree(folder / "good", folder / "bad")
    (folder / "bad" / TENSORS).unlink()
    os.mkfifo(folder / "bad" / TENSORS)


def fifo_as_config(folder: Path) -> None:
    (folder / "bad").mkdir()
    os.mkfifo(folder / "bad" / CONFIG)


def fifo_as_adapter(folder: Path) -> None:
    os.mkfifo(folder / "bad")


def directory_as_tensors(folder: Path) -> None:
    shutil.copytree(folder / "good", folder / "bad")
    (folder / "bad" / TENSORS).unlink()
    (folder / "bad" / TENSORS).mkdir()


def file_as_adapter(folder: Path) -> None:
    (folder / "bad").write_bytes(b"{}")


def pickle_only(folder: Path) -> None:
    shutil.copytree(folder / "good", folder / "bad")
    (folder / "bad" / TENSORS).rename(folder / "bad" / "adapter_model.bin")


def no_config(folder: Path) -> None:
    shutil.copytree(folder / "good", folder / "bad")
    (folder / "bad" / CONFIG).unlink()


def large_config(folder: Path) -> None:
    shutil.copytree(folder / "good", folder / "bad")
    os.truncate(folder / "bad" / CONFIG, 1 << 40)  # sparse: takes no space


def zero_device(folder: Path) -> None:
    shutil.copytree(folder / "good", folder / "bad")
    (folder / "bad" / TENSORS).unlink()
    try:
        os.mknod(folder / "bad" / TENSORS, 0o600 | 0o020000, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("this user may not make device files")


MADE = {
    link_to_a_directory: r"^name: expected a directory.*; links are not followed$",
    link_inside: r"^name: expected a directory.*; links are not followed$",
    link_to_nothing: r"^name: expected a directory.*; links are not followed$",
    links_as_files: r"^adapter_config\.json: expected a file.*; links are not followed$",
    link_as_tensors: r"^adapter_model\.safetensors: expected a file.*; links are not followed$",
    fifo: r"^adapter_model\.safetensors: expected a regular file",
    fifo_as_config: r"^adapter_config\.json: expected a regular file",
    fifo_as_adapter: r"^name: expected a directory",
    directory_as_tensors: r"^adapter_model\.safetensors: expected a regular file",
    file_as_adapter: r"^name: expected a directory",
    pickle_only: r"^adapter_model\.safetensors: expected a file.*adapter_model\.bin can run code",
    no_config: r"^adapter_config\.json: expected a file",
    large_config: r"^adapter_config\.json: expected at most",
    zero_device: r"^adapter_model\.safetensors: expected a regular file",
}


@pytest.mark.parametrize("make", MADE, ids=lambda make: make.__name__)
def test_what_is_no_adapter_is_refused_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    make(folder)
    root = AdapterRoot(folder)
    opened = Opened(monkeypatch)
    begin_s = time.monotonic()
    with pytest.raises(ModelError, match=MADE[make]) as error, root.open("bad"):
        raise AssertionError("was opened")
    root.close()
    assert time.monotonic() - begin_s < 1.0
    assert str(folder) not in str(error.value)
    assert [place for place in opened.places if not place.startswith(str(folder))] == []


@pytest.mark.parametrize("moment", [0, 1, 2])
def test_a_swap_between_one_open_and_the_next_leads_nowhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """Before the n-th open the adapter's directory becomes a link to one outside."""
    root = AdapterRoot(folder)
    opened = Opened(monkeypatch)
    spy, count = os.open, 0

    def swap(path: Any, flags: int, *args: Any, **options: Any) -> int:
        nonlocal count
        if count == moment:
            (folder / "good").rename(folder / "away")
            (folder / "good").symlink_to(folder.parent / "outside")
        count += 1
        return spy(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", swap)
    if moment == 0:
        with pytest.raises(ModelError, match=r"^name: expected a directory"), root.open("good"):
            raise AssertionError("was opened")
    else:
        with root.open("good") as (config, tensors):
            assert config == (folder / "away" / CONFIG).read_bytes()
            assert tensors.size == (folder / "away" / TENSORS).stat().st_size
    root.close()
    assert [place for place in opened.places if not place.startswith(str(folder))] == []


def test_the_folder_stays_the_one_that_was_opened(folder: Path) -> None:
    root = AdapterRoot(folder)
    folder.rename(folder.parent / "before")
    shutil.copytree(folder.parent / "outside", folder / "bad")
    with root.open("good") as (config, _):
        assert config
    with pytest.raises(ModelError), root.open("bad"):
        raise AssertionError("was opened")
    root.close()


def test_no_descriptor_is_left_open(folder: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for make in (no_config, fifo_as_adapter):
        make(folder)
        with pytest.raises(ModelError):
            read(folder, "bad")
        shutil.rmtree(folder / "bad") if (folder / "bad").is_dir() else (folder / "bad").unlink()
    read(folder, "good")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^--adapter-root: expected a directory"):
        AdapterRoot(tmp_path / "nothing")
