"""Rules of the source tree that no linter knows. Reads files; imports none of them."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONTAINERS = ("proto", "kernels", "server", "client")
GENERATED = re.compile(r"_pb2(_grpc)?\.pyi?$")
SAYS_NOTHING = {"utils", "util", "common", "helpers", "misc"}
UNSAFE_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "torch.load"}
# Not those that every named tuple has, nor the switch by which torch runs flex_attention without a compiler.
PRIVATE = re.compile(r"_(?!_|asdict$|fields$|replace$|FLEX_ATTENTION_)")
OWN_PATH = re.compile(r"deltaline\w*(\.\w+)*\._(?!_)\w+")
MAX_LINES = 400
MAX_FILES_IN_A_FOLDER = 15
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


def modules() -> dict[str, Path]:
    """Every module of the four packages by its import name."""
    found = {}
    for path in sources():
        parts = path.relative_to(ROOT).with_suffix("").parts[1:]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(tree: ast.AST, known: Iterable[str]) -> set[str]:
    """The known modules that a module imports, wherever it does so."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in known else node.module)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return found & set(known)


def circles(graph: dict[str, set[str]]) -> list[str]:
    """Name the modules that import each other, directly or by others: what is left when all others have been removed,
    again and again, that import nothing which is left, or which nothing that is left imports."""
    left = dict(graph)
    while True:
        imported = {target for module in left for target in left[module] & left.keys() if target != module}
        over = [module for module in left if module not in imported or not left[module] & left.keys() - {module}]
        if not over:
            return sorted(left)
        for module in over:
            del left[module]


def private(tree: ast.AST) -> Iterator[str]:
    """Name what a test touches that is another's own: attributes and imported names that begin with one underscore."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and PRIVATE.match(node.attr)
            and ast.unparse(node.value) not in ("self", "cls")
        ):
            yield ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("getattr", "setattr", "delattr")):
            named = [each.value for each in node.args if isinstance(each, ast.Constant)]
            yield from (name for name in named if isinstance(name, str) and PRIVATE.match(name))
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("deltaline"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names if PRIVATE.match(alias.name))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and OWN_PATH.match(node.value):
            yield node.value


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


def test_no_modules_import_each_other() -> None:
    known = modules()
    assert circles({name: imports(ast.parse(path.read_text()), known) for name, path in known.items()}) == []


def test_folders_are_small_and_say_what_they_are() -> None:
    counts = Counter(path.parent for path in sources())
    assert {name_of(folder): count for folder, count in counts.items() if count > MAX_FILES_IN_A_FOLDER} == {}
    packages = [path for name, path in modules().items() if path.stem == "__init__" and name.startswith("deltaline_")]
    assert [name_of(path) for path in packages if not ast.get_docstring(ast.parse(path.read_text()))] == []


def test_containers_are_not_packages() -> None:
    found = [name_of(ROOT / folder) for folder in CONTAINERS if (ROOT / folder / "__init__.py").exists()]
    assert found + [name_of(path) for path in (ROOT / "tests").rglob("__init__.py")] == []


def test_packages_say_that_they_are_typed() -> None:
    packages = [path.parent for folder in CONTAINERS for path in (ROOT / folder).glob("*/__init__.py")]
    assert len(packages) == len(CONTAINERS) + 2  # the client has the command and a model beside it
    assert [name_of(package) for package in packages if not (package / "py.typed").exists()] == []


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["b", "c"]
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert imports(ast.parse("def f():\n    from a.b import c\n    import d"), ["a.b.c", "a.b", "d"]) == {"a.b.c", "d"}


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


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("*.py")), ids=name_of)
def test_no_test_touches_what_is_private(path: Path) -> None:
    assert list(private(ast.parse(path.read_text(encoding="utf-8")))) == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("engine._queue.clear()", "engine._queue"),
        ("monkeypatch.setattr(engine, '_" + "queue', [])", "_" + "queue"),
        ("from deltaline_server.engine import _run", "deltaline_server.engine." + "_run"),
        ("setattr('deltaline_server.engine._run', 0)", "deltaline_server.engine." + "_run"),
        ("self._queue, cls._made, module.__name__", None),
    ],
)
def test_what_is_private_is_found(code: str, found: str | None) -> None:
    assert next(private(ast.parse(code)), None) == found


def test_run_time_arguments_are_counted() -> None:
    code = "@triton.jit\ndef kernel(a, b, C: tl.constexpr): ..."
    assert list(kernels(ast.parse(code))) == [("kernel", 2)]
