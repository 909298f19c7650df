"""The code of the pages runs, and what its comments say comes out does.

The fenced blocks of a page run in its order: `python` in one namespace, `sh` command by command. A server takes the
place of the one before, but that with `--port 50052` stands beside it. A comment is checked where it stands
behind `print`, or begins with the shape of what is assigned: `[T, D]`, or one for each value.
"""

from __future__ import annotations

import ast
import asyncio
import doctest
import io
import os
import re
import shlex
import subprocess
import sys
import tokenize
from contextlib import AsyncExitStack, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token
from rigs.routers import free_port

from deltaline_server.app import Server
from deltaline_server.config import Config

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("deploy/*.md")])
# The README starts the server that the samples of these call.
SERVED = [ROOT / page for page in ("README.md", "docs/client.md", "docs/transformers.md", "docs/adapters.md")]
SHAPE = re.compile(r"\[[^\]]+\]|\([^()]*,[^()]*\)")


def blocks(path: Path, kind: str = "fence") -> list[Token]:
    return [token for token in MarkdownIt().parse(path.read_text(encoding="utf-8")) if token.type == kind]


class Sample(ast.NodeTransformer):
    """A Python block; with a check behind each assignment whose comment begins with a shape."""

    def __init__(self, code: str) -> None:
        lines, tokens = code.splitlines(), tokenize.generate_tokens(io.StringIO(code).readline)
        comments = {t.start[0]: t.string.strip("# ") for t in tokens if t.type == tokenize.COMMENT}
        printed = [line for line in comments if lines[line - 1].lstrip().startswith("print(")]
        self.printed = [comments.pop(line) for line in printed]
        self.shapes = {line: text for line, text in comments.items() if SHAPE.match(text)}
        tree = ast.parse(code)
        self.assigned = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        self.sizes: dict[str, int] = {}
        self.tree = ast.fix_missing_locations(self.visit(tree))

    def visit_Assign(self, node: ast.Assign) -> Any:
        shapes = self.shapes.pop(node.end_lineno or 0, None)
        if shapes is None:
            return node
        return [node, *ast.parse(f"check_shapes({ast.unparse(node.targets[0])}, {shapes!r})").body]

    def run(self, names: dict[str, Any]) -> None:
        """Run it in the namespace `names`."""
        assert not self.shapes, "shapes that stand behind no assignment"
        names["check_shapes"] = lambda values, text: self.check_shapes(values, SHAPE.findall(text), names)
        with redirect_stdout(io.StringIO()) as out:
            exec(compile(self.tree, "<sample>", "exec"), names)
        expected = "\n".join([*self.printed, ""])
        assert doctest.OutputChecker().check_output(expected, out.getvalue(), doctest.ELLIPSIS), out.getvalue()

    def check_shapes(self, values: Any, shapes: list[str], names: dict[str, Any]) -> None:
        """Check that a letter is the number that the block calls so, or else one and the same wherever it stands."""
        self.sizes |= {name: names[name] for name in self.assigned if isinstance(names.get(name), int)}
        values = values if isinstance(values, tuple) else (values,)
        for value, shape in zip(values, shapes * len(values) if len(shapes) == 1 else shapes, strict=True):
            expected = [text for text in re.split(r",\s*", shape[1:-1]) if text]
            assert len(expected) == len(value.shape), f"{shape}: is {value.shape}"
            for text, size in zip(expected, value.shape, strict=True):
                known = self.sizes.setdefault(text, size) if text.isidentifier() else size
                assert (int(text) if text.isdecimal() else known) == size, f"{shape}: is {value.shape}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_block_is_run_or_is_no_python(path: Path) -> None:
    assert {token.info for token in blocks(path)} <= {"python", "sh"}
    python = re.compile(r"^\s*(import \w|from \w+ import|with .*:$|print\()", re.M)
    assert [token.content for token in blocks(path, "code_block") if python.search(token.content)] == []


@pytest.mark.parametrize(
    "pages", [SERVED, *([path] for path in PAGES if path not in SERVED and blocks(path))], ids=lambda p: p[0].stem
)
async def test_code_of_the_pages_runs(pages: list[Path], tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    async with AsyncExitStack() as servers:
        address, beside = "no server", str(free_port())
        for page in pages:
            names: dict[str, Any] = {}
            for block in blocks(page):
                text = block.content.replace("127.0.0.1:50051", address).replace("50052", beside)
                text = text.replace("/tmp/", f"{tmp_path}/")
                if block.info == "python":
                    await asyncio.to_thread(Sample(text).run, names)
                    continue
                for line in text.splitlines():
                    program, *arguments = shlex.split(line, comments=True)
                    if program == "deltaline-server":
                        is_beside = "--port" in arguments
                        port = beside if is_beside else "0"
                        config = Config.parse([*arguments, "--port", port, "--metrics-port", "0"], {})
                        if not is_beside:
                            await servers.aclose()
                        server = await servers.enter_async_context(Server(config))
                        address = address if is_beside else server.address
                        continue
                    assert program in ("python", "deltaline"), f"{line}: what runs this?"
                    if program == "deltaline":
                        arguments = ["-m", "deltaline_cli", *arguments, "--server", address]
                    command = [sys.executable, *arguments]
                    await asyncio.to_thread(subprocess.run, command, check=True, cwd=ROOT, env=environment)
