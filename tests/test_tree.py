"""Rules of the source tree that no linter knows. Reads files; imports none of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONTAINERS = ("proto", "kernels", "server", "client")
GENERATED = re.compile(r"_pb2(_grpc)?\.pyi?$")
SAYS_NOTHING = {"utils", "util", "common", "helpers", "misc"}
UNSAFE_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "torch.load"}
MAX_LINES = 400
MAX_KERNEL_ARGUMENTS = 16


def sources() -> list[Path]:
    """Every hand-written Python file of the four packages."""
    found = [path for folder in CONTAINERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in found if not GENERATED.search(path.name)]


def unsafe(tree: ast.AST) -> Iterator[str]:
    """Name what could run code from data: pickle and its kin, torch.load, eval, exec."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in UNSAFE_MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in UNSAFE_MODULES:
            yield node.module
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in UNSAFE_CALLS:
            yield ast.unparse(node.func)


def kernels(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Name every Triton kernel that a launcher can launch, with the number of its run-time arguments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            constants = [a for a in arguments if a.annotation and "constexpr" in ast.unparse(a.annotation)]
            yield node.name, len(arguments) - len(constants)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_source_file_keeps_the_rules(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    too_wide = [name for name, count in kernels(tree) if count > MAX_KERNEL_ARGUMENTS]
    assert len(text.splitlines()) <= MAX_LINES
    assert path.stem not in SAYS_NOTHING
    assert list(unsafe(tree)) == []
    assert too_wide == []


def test_containers_are_not_packages() -> None:
    found = [name_of(ROOT / folder) for folder in CONTAINERS if (ROOT / folder / "__init__.py").exists()]
    assert found + [name_of(path) for path in (ROOT / "tests").rglob("__init__.py")] == []


def test_packages_say_that_they_are_typed() -> None:
    packages = [path.parent for folder in CONTAINERS for path in (ROOT / folder).glob("*/__init__.py")]
    assert len(packages) == len(CONTAINERS)
    assert [name_of(package) for package in packages if not (package / "py.typed").exists()] == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import pickle", ["pickle"]),
        ("from pickle import loads", ["pickle"]),
        ("torch.load(path)", ["torch.load"]),
        ("eval('1')", ["eval"]),
        ("model.eval()", []),
    ],
)
def test_unsafe_code_is_found(code: str, found: list[str]) -> None:
    assert list(unsafe(ast.parse(code))) == found


def test_run_time_arguments_are_counted() -> None:
    code = "@triton.jit\ndef kernel(a, b, C: tl.constexpr): ..."
    assert list(kernels(ast.parse(code))) == [("kernel", 2)]
