"""No name leads out of the folder of adapters, and nothing but regular files is read in it."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable
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


def link_to(target: str) -> Callable[[Path], None]:
    """Make the adapter's directory a link."""
    return lambda bad: bad.symlink_to(bad.parent / target)


def instead_of(file: str, make: Callable[[Path], object] = lambda _: None) -> Callable[[Path], None]:
    """Make an adapter that has something else in the place of one file, or nothing."""

    def change(bad: Path) -> None:
        shutil.copytree(bad.parent / "good", bad)
        (bad / file).unlink()
        make(bad / file)

    return change


def link_outside(path: Path) -> None:
    path.symlink_to(path.parents[2] / "outside" / path.name)


def large_file(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)  # sparse: takes no space


def zero_device(path: Path) -> None:
    try:
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("this user may not make device files")


def pickle(path: Path) -> None:
    path.with_name("adapter_model.bin").touch()


NO_DIRECTORY = r"^name: expected a directory"
MADE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a link to a directory": (link_to("../outside"), NO_DIRECTORY + r".*; links are not followed$"),
    "a link inside": (link_to("good"), NO_DIRECTORY + r".*; links are not followed$"),
    "a link to nothing": (link_to("nothing"), NO_DIRECTORY + r".*; links are not followed$"),
    "a FIFO": (os.mkfifo, NO_DIRECTORY),
    "a file": (Path.touch, NO_DIRECTORY),
    "a link as config": (instead_of(CONFIG, link_outside), rf"^{CONFIG}: expected a file.*; links are not followed$"),
    "a link as tensors": (
        instead_of(TENSORS, link_outside),
        rf"^{TENSORS}: expected a file.*; links are not followed$",
    ),
    "a FIFO as tensors": (instead_of(TENSORS, os.mkfifo), rf"^{TENSORS}: expected a regular file"),
    "a FIFO as config": (instead_of(CONFIG, os.mkfifo), rf"^{CONFIG}: expected a regular file"),
    "a directory as tensors": (instead_of(TENSORS, Path.mkdir), rf"^{TENSORS}: expected a regular file"),
    "a pickle": (instead_of(TENSORS, pickle), rf"^{TENSORS}: expected a file.*adapter_model\.bin can run code"),
    "no config": (instead_of(CONFIG), rf"^{CONFIG}: expected a file"),
    "a large config": (instead_of(CONFIG, large_file), rf"^{CONFIG}: expected at most"),
    "a device": (instead_of(TENSORS, zero_device), rf"^{TENSORS}: expected a regular file"),
}


@pytest.mark.parametrize("case", MADE)
def test_what_is_no_adapter_is_refused_and_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    make, message = MADE[case]
    make(folder / "bad")
    root = AdapterRoot(folder)
    opened = Opened(monkeypatch)
    with pytest.raises(ModelError, match=message) as error, root.open("bad"):
        raise AssertionError("was opened")
    root.close()
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
    gc.collect()  # else what other tests left may go in between
    before = len(os.listdir("/proc/self/fd"))
    os.mkfifo(folder / "fifo")
    instead_of(CONFIG)(folder / "bad")
    for name in ("fifo", "bad"):
        with pytest.raises(ModelError):
            read(folder, name)
    read(folder, "good")
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^--adapter-root: expected a directory"):
        AdapterRoot(tmp_path / "nothing")
