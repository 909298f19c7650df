"""A file tree laid out as the image's, and commands run in it as a container runs them: changed root that is read-only,
the image's user without capabilities, its environment, volumes where a container has them, first process of its own.

Stands in for Docker where there is none. Of the image it has what the Dockerfile says; the interpreter, the installed
packages and the compiler are this machine's. Needs root and util-linux's unshare.
"""

from __future__ import annotations

import shlex
import shutil
import site
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rigs.image import ROOT, Stage, is_sent

HOST_PATHS = ("/usr", "/proc", "/sys", "/dev")
LINKS = ("bin", "lib", "lib64", "sbin")
_NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--kill-child")
_ENTRY = """\
#!/opt/deltaline/bin/python
import sys
from {module} import {function}
sys.exit({function}())
"""


def require() -> None:
    """Skip the test where no such tree can be made."""
    for name in ("unshare", "setpriv", "chroot", "gcc"):
        if shutil.which(name) is None:
            pytest.skip(f"{name} is not installed: the image's layout can't be made")
    if subprocess.run([*_NAMESPACES, "true"], capture_output=True, check=False).returncode:
        pytest.skip("unshare --mount --pid is refused: the image's layout needs root and namespaces")


class ImageRoot:
    """The tree of a stage under a folder, with the project installed as the wheel has it."""

    def __init__(self, stage: Stage, folder: Path) -> None:
        self._stage, self._root = stage, folder / "root"
        self._root.mkdir(mode=0o755)
        self._bind: dict[str, str] = {path: path for path in HOST_PATHS}
        for name in LINKS:
            if Path("/", name).is_symlink():
                (self._root / name).symlink_to(f"usr/{name}")
            elif Path("/", name).is_dir():
                self._bind[f"/{name}"] = f"/{name}"
        self._make_etc()
        self._install()

    def command(
        self, arguments: Sequence[str], *, volumes: Mapping[str, Path], environment: Mapping[str, str] = {}
    ) -> list[str]:
        """What runs a command in the tree; `volumes` are the host's folders or files by their place in it.

        Only /tmp and volumes that are not read-only to the image's user can be written.
        """
        user, _, group = self._stage.last["USER"].partition(":")
        variables = self._stage.environment | dict(environment)
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        variables = {name: value.replace("$PATH", path) for name, value in variables.items()}
        root, script = self._root, ["set -e", "mount --make-rprivate /"]
        script.append(f"mount --bind {shlex.quote(str(root))} {shlex.quote(str(root))}")
        # First, as the project and what is installed may lie under /tmp.
        temporary = shlex.quote(str(root / "tmp"))
        script.append(f"mkdir -p {temporary}")
        volumes = dict(volumes)
        if (shared := volumes.pop("/tmp", None)) is None:
            script.append(f"mount -t tmpfs -o mode=1777,noexec,nosuid,nodev tmpfs {temporary}")
        else:
            script.append(f"mount --bind {shlex.quote(str(shared))} {temporary}")
        for source, place in [*self._bind.items(), *((str(host), at) for at, host in volumes.items())]:
            inside = root / place.lstrip("/")
            if Path(source).is_dir():
                script.append(f"mkdir -p {shlex.quote(str(inside))}")
            else:
                script.append(f"mkdir -p {shlex.quote(str(inside.parent))}")
                script.append(f"touch {shlex.quote(str(inside))}")
            script.append(f"mount --rbind {shlex.quote(source)} {shlex.quote(str(inside))}")
            if place in self._bind and place not in ("/proc", "/dev"):
                script.append(f"mount -o remount,bind,ro {shlex.quote(str(inside))}")
        script.append(f"mount -o remount,bind,ro {shlex.quote(str(root))}")
        words = ["chroot", str(root), "setpriv", "--reuid", user, "--regid", group, "--clear-groups"]
        words += ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all", "env", "-i"]
        words += [f"{name}={value}" for name, value in variables.items()]
        script.append("exec " + shlex.join([*words, *arguments]))
        return [*_NAMESPACES, "sh", "-c", "\n".join(script)]

    def run(self, arguments: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command in the tree to its end."""
        return subprocess.run(
            self.command(arguments, **options), capture_output=True, text=True, check=False, timeout=60
        )

    def _make_etc(self) -> None:
        """/etc with the user that the Dockerfile makes, and what the loader needs."""
        etc = self._root / "etc"
        etc.mkdir()
        [made] = [run for run in self._stage.runs if "useradd" in run]
        words = shlex.split(next(part for part in made.split("&&") if "useradd" in part))
        uid, gid, home, shell = (words[words.index(f"--{it}") + 1] for it in ("uid", "gid", "home-dir", "shell"))
        line = f"{words[-1]}:x:{uid}:{gid}::{home}:{shell}\n"
        (etc / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n" + line)
        for name in ("ld.so.cache", "ld.so.conf", "hosts", "nsswitch.conf"):
            if Path("/etc", name).is_file():
                shutil.copy(Path("/etc", name), etc / name)

    def _install(self) -> None:
        """Make /opt/deltaline as the builder does: an environment with the packages of the wheel, from the context."""
        home = self._root / "opt" / "deltaline"
        python = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
        make = [str(python), "-m", "venv", "--without-pip", str(home)]
        subprocess.run(make, check=True)
        if not sys.base_prefix.startswith("/usr"):
            self._bind[sys.base_prefix] = sys.base_prefix
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        [packages] = home.glob("lib/python*/site-packages")
        for package in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
            for path in (ROOT / package).rglob("*"):
                if path.is_file() and is_sent(str(path.relative_to(ROOT))):
                    copy = packages / path.relative_to((ROOT / package).parent)
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, copy)
        theirs = {path for path in [*sys.path, *site.getsitepackages()] if path.endswith("-packages")}
        for path in sorted(path for path in theirs if Path(path).is_dir()):
            self._bind[path] = path
            with (packages / "installed.pth").open("a") as file:
                file.write(f"{path}\n")
        for name, target in project["project"]["scripts"].items():
            module, _, function = target.partition(":")
            script = home / "bin" / name
            script.write_text(_ENTRY.format(module=module, function=function))
            script.chmod(0o755)
