"""The contract builds from proto/ and nothing else, and `make check-contract` sees what would break its callers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2
from google.rpc import error_details_pb2, status_pb2

ROOT = Path(__file__).parents[2]
PROTO = ROOT / "proto"
VENDORED = {"google/rpc/status.proto": status_pb2, "google/rpc/error_details.proto": error_details_pb2}
STEP = "deltaline/v1/layer_service.proto"


def compiled(*files: str, into: Path) -> descriptor_pb2.FileDescriptorSet:
    """What protoc makes of files of proto/, of which and of its own folder alone it knows."""
    protoc = pytest.importorskip("grpc_tools.protoc", reason="grpcio-tools, which has protoc, is not installed")
    folders, output = (PROTO, PROTO / "third_party", Path(protoc.__file__).parent / "_proto"), into / "contract.binpb"
    command = ["protoc", *(f"-I{folder}" for folder in folders), "--include_imports", f"-o{output}", *files]
    assert protoc.main(command) == 0
    return descriptor_pb2.FileDescriptorSet.FromString(output.read_bytes())


def test_it_builds_by_itself(tmp_path: Path) -> None:
    sources = [path.relative_to(PROTO).as_posix() for path in sorted(PROTO.glob("deltaline/v1/*.proto"))]
    names = {file.name for file in compiled(*sources, into=tmp_path).file}
    assert names == {*sources, "google/rpc/status.proto", "google/protobuf/any.proto"}


@pytest.mark.parametrize("name", VENDORED)
def test_what_lies_beside_it_is_what_the_python_package_has(name: str) -> None:
    def rules(path: Path) -> list[str]:
        return [line for line in path.read_text().splitlines() if not line.lstrip().startswith("//")]

    module = VENDORED[name].__file__
    assert module is not None
    assert rules(PROTO / "third_party" / name) == rules(Path(module).with_name(Path(name).name))


class Copy:
    """A repository that has the contract, as it was and as it is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        shutil.copytree(PROTO, path / "proto", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "Makefile", path)
        (path / ".venv").symlink_to((ROOT / ".venv").resolve())
        self._git("init", "--quiet")

    def _git(self, *arguments: str) -> None:
        who = ("-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "tag.gpgSign=false")
        subprocess.run(["git", *who, *arguments], cwd=self.path, check=True, capture_output=True)

    def commit(self, tag: str = "") -> None:
        self._git("add", "proto")
        self._git("commit", "--quiet", "--no-gpg-sign", "--allow-empty", "--message", "x")
        if tag:
            self._git("tag", tag)

    def change(self, old: str, new: str, file: str = STEP) -> None:
        source = self.path / "proto" / file
        text = source.read_text()
        assert text.count(old) == 1
        source.write_text(text.replace(old, new))

    def check(self) -> subprocess.CompletedProcess[str]:
        """Run the target as if everything were installed, since it is."""
        command = ["make", "--no-print-directory", "-o", ".venv/.installed", "check-contract"]
        return subprocess.run(command, cwd=self.path, capture_output=True, text=True)


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    for program in (ROOT / ".venv/bin/buf", shutil.which("git"), shutil.which("make")):
        if program is None or not Path(program).exists():
            pytest.skip("make, git, and buf in .venv compare the contract with what it was; one of them is missing")
    return Copy(tmp_path / "copy")


BREAKS: dict[str, tuple[str, str]] = {
    "a number": ("uint64 queue_timeout_us = 12;", "uint64 queue_timeout_us = 16;"),
    "a type": ("uint64 queue_timeout_us = 12;", "sint64 queue_timeout_us = 12;"),
    "a name": ("uint64 queue_timeout_us = 12;", "uint64 queue_timeout_ms = 12;"),
    "a field that goes": ("  uint64 queue_timeout_us = 12;\n", ""),
    "a value": ("ROW_KIND_VERIFY = 3;", "ROW_KIND_VERIFY = 4;"),
}


@pytest.mark.parametrize("what", BREAKS)
def test_a_change_that_breaks_callers_fails_the_check(copy: Copy, what: str) -> None:
    copy.commit()
    copy.change(*BREAKS[what])
    copy.commit()
    checked = copy.check()
    assert checked.returncode != 0 and STEP in checked.stdout + checked.stderr


def test_a_contract_that_grows_passes_once_its_code_is_current(copy: Copy) -> None:
    copy.commit()
    copy.change("  uint64 max_reply_bytes = 15;", "  uint64 max_reply_bytes = 15;\n  // More.\n  uint32 more = 16;")
    copy.commit()
    checked = copy.check()
    assert "has only grown" in checked.stdout and checked.returncode != 0
    assert "layer_service_pb2.py differ" in checked.stdout
    made: Any = subprocess.run(
        ["make", "-o", ".venv/.installed", "proto"], cwd=copy.path, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    assert copy.check().returncode == 0


def test_it_is_compared_with_the_last_release(copy: Copy) -> None:
    """Not with the commit before, in which the field is gone already; a release's own commit with the one before it."""
    copy.commit("v1.0.0")
    assert copy.check().returncode == 0
    copy.change(*BREAKS["a field that goes"])
    copy.commit()
    copy.commit()
    checked = copy.check()
    assert checked.returncode != 0 and "queue_timeout_us" in checked.stdout + checked.stderr


def test_a_first_commit_is_compared_with_nothing(copy: Copy) -> None:
    """As a shallow clone is, and a tree without git."""
    copy.commit()
    checked = copy.check()
    assert checked.returncode == 0 and "compared with none" in checked.stdout
