"""What the image promises, without Docker: the Dockerfile's entry point, user, health check, read-only tree and
compiler are tried in a tree laid out as the image's, with the volumes and the configuration of deploy/compose."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from rigs.authority import Authority
from rigs.image import ROOT, is_sent, stages
from rigs.image_root import ImageRoot, require
from rigs.routers import free_port

from deltaline_client import Client, Tls

STAGES = stages()
CACHE = "/var/cache/deltaline"
START_TIMEOUT_S = 60.0
COMPILE = """\
import os, pathlib
from triton.runtime.build import compile_module_from_src
source = '''
#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "probe", 0, -1, 0};
PyMODINIT_FUNC PyInit_probe(void) { return PyModule_Create(&module); }
'''
print(compile_module_from_src(source, "probe").__file__)
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> ImageRoot:
    require()
    return ImageRoot(STAGES["cpu"], tmp_path_factory.mktemp("image"))


@pytest.fixture
def volumes(tmp_path: Path) -> dict[str, Path]:
    """The mounts of the CPU server of deploy/compose: configuration, model, and the cache as Docker makes it."""
    compose = yaml.safe_load((ROOT / "deploy" / "compose" / "compose.yaml").read_text(encoding="utf-8"))
    found: dict[str, Path] = {}
    for mount in compose["services"]["server-cpu"]["volumes"]:
        source, place = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", mount).removesuffix(":ro").split(":")
        found[place] = ROOT / "deploy" / "compose" / source if source.startswith(".") else tmp_path / source
    user, group = (int(number) for number in STAGES["cpu"].last["USER"].split(":"))
    found[CACHE].mkdir(mode=0o700)
    os.chown(found[CACHE], user, group)
    return found


def environment_of_compose() -> dict[str, str]:
    compose = yaml.safe_load((ROOT / "deploy" / "compose" / "compose.yaml").read_text(encoding="utf-8"))
    return dict(compose["services"]["server-cpu"]["environment"])


def environment_of_tls() -> dict[str, str]:
    tls = yaml.safe_load((ROOT / "deploy" / "compose" / "tls.yaml").read_text(encoding="utf-8"))
    return dict(tls["services"]["server-cpu"]["environment"])


def certificates(folder: Path) -> Path:
    """The folder that TLS_DIR names, as its first lines ask for it."""
    folder.mkdir()
    authority = Authority(folder)
    pair = authority.issue("tls", "server")
    authority.ca.rename(folder / "ca.crt")
    pair.key.chmod(0o644)
    return folder


# -- what the Dockerfile says ----------------------------------------------------------------------------------------


def test_gpu_and_cpu_are_targets_of_one_runtime_and_gpu_is_the_default() -> None:
    assert list(STAGES) == ["builder", "runtime", "cpu", "gpu"]
    for target, device in (("cpu", "cpu"), ("gpu", "cuda")):
        stage = STAGES[target]
        assert stage.environment["DELTALINE_DEVICE"] == device
        assert stage.command("ENTRYPOINT") == ["deltaline-server"]
        assert stage.command("HEALTHCHECK") == ["deltaline", "health"]
        assert (stage.last["USER"], stage.last["STOPSIGNAL"]) == ("10001:10001", "SIGTERM")
        assert ["--from=builder", "/opt/deltaline", "/opt/deltaline"] in stage.copies
        assert stage.environment["DELTALINE_HOST"] == "0.0.0.0"
        assert stage.last["EXPOSE"].split() == [stage.environment["DELTALINE_PORT"], "9464"]
        assert stage.environment["TRITON_CACHE_DIR"].startswith(CACHE) and stage.environment["HOME"] == CACHE


def test_the_context_is_small_and_has_all_that_the_build_reads() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    tops = [path for path in ROOT.iterdir() if is_sent(path.name)]
    files = [path for top in tops for path in ([top] if top.is_file() else top.rglob("*")) if path.is_file()]
    sent = [name for path in files if is_sent(name := str(path.relative_to(ROOT)))]
    needed = {"constraints.txt", "pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    needed |= {project["tool"]["hatch"]["version"]["path"]}
    needed |= {
        f"{package}/__init__.py" for package in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    }
    assert needed <= set(sent)
    assert {path.split("/")[0] for path in sent} <= needed | {"client", "kernels", "proto", "server"}
    assert sum((ROOT / path).stat().st_size for path in sent) < 4 << 20


def test_every_package_that_the_image_installs_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {name_of(line.split("==")[0]) for line in lines if "==" in line}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    waiting = [*project["dependencies"], *extras["otel"], *extras["top"], "hatchling"]
    waiting += [*extras["kernels"], *(each for each in extras["server"] if each != "deltaline[kernels]")]
    needed = set[str]()
    while waiting:
        requirement = Requirement(waiting.pop())
        name = name_of(requirement.name)
        if name in needed or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        needed.add(name)
        if name != "hatchling":  # only the image has it
            waiting += distribution(name).requires or []
    assert len(needed) > 15
    # The CUDA build of torch names the exact versions of NVIDIA's libraries itself.
    assert {name for name in needed - pinned if not name.startswith(("nvidia-", "cuda-toolkit"))} == set()


def name_of(package: str) -> str:
    return re.sub("[-_.]+", "-", package).lower()


# -- what a container does -------------------------------------------------------------------------------------------


def test_the_user_has_no_rights_and_writes_to_its_cache_and_tmp_alone(
    root: ImageRoot, volumes: dict[str, Path]
) -> None:
    script = 'id -u; id -un; grep -E "CapEff|CapBnd|NoNewPrivs" /proc/self/status | cut -f2; stat -c %a ' + CACHE
    done = root.run(["sh", "-c", script], volumes=volumes)
    nothing = "0000000000000000"
    assert done.stdout.split() == ["10001", "deltaline", nothing, nothing, "1", "700"], done.stderr
    for place in ("/", "/opt/deltaline", "/etc", "/usr", "/var", "/etc/deltaline/deltaline.toml", "/model"):
        done = root.run(["sh", "-c", f"echo > {place if place.endswith('toml') else place + '/x'}"], volumes=volumes)
        assert done.returncode != 0, f"{place} can be written"
    assert root.run(["sh", "-c", f"touch {CACHE}/x /tmp/x"], volumes=volumes).returncode == 0


def test_triton_can_compile_into_its_cache_and_nowhere_else(root: ImageRoot, volumes: dict[str, Path]) -> None:
    compile_ = ["python", "-c", COMPILE]
    done = root.run(compile_, volumes=volumes)
    assert done.returncode == 0, done.stderr
    made = Path(done.stdout.strip())
    assert made.is_relative_to(STAGES["cpu"].environment["TRITON_CACHE_DIR"])
    assert (volumes[CACHE] / made.relative_to(CACHE)).is_file()
    assert root.run(compile_, volumes=volumes | {CACHE: made_read_only(volumes[CACHE])}).returncode != 0


def made_read_only(cache: Path) -> Path:
    shutil.rmtree(cache)
    cache.mkdir(mode=0o755)
    return cache


@pytest.mark.parametrize("has_tls", [False, True], ids=["plain", "tls"])
def test_server_is_healthy_drains_and_stops(
    root: ImageRoot, volumes: dict[str, Path], tmp_path: Path, has_tls: bool
) -> None:
    stage = STAGES["cpu"]
    port = free_port()
    # Commands are run in the server's container, and so in its /tmp.
    volumes["/tmp"] = tmp_path / "tmp"
    volumes["/tmp"].mkdir()
    volumes["/tmp"].chmod(0o1777)
    environment = environment_of_compose() | {"DELTALINE_PORT": str(port), "DELTALINE_METRICS_PORT": "0"}
    tls = None
    if has_tls:
        environment |= environment_of_tls()
        files = volumes["/etc/deltaline-tls"] = certificates(tmp_path / "tls")
        tls = Tls(files / "ca.crt", files / "tls.crt", files / "tls.key", server_name="server")
    options: dict[str, Any] = {"volumes": volumes, "environment": environment}

    def health() -> int:
        return root.run(stage.command("HEALTHCHECK"), **options).returncode

    assert health() == 1
    log = tmp_path / "server.log"
    with started(root.command(stage.command("ENTRYPOINT"), **options), log) as container:
        until_s = time.monotonic() + START_TIMEOUT_S
        while health():
            assert container.poll() is None and time.monotonic() < until_s, log.read_text()
        with Client(f"127.0.0.1:{port}", tls=tls) as client:
            sequence = client.open()
            done = root.run(pre_stop(), **options)
            assert done.returncode == 0, done.stderr
            assert health() == 1, "a server that drains takes no new sequences"
            assert root.run([*stage.command("HEALTHCHECK"), "--liveness"], **options).returncode == 0
            os.kill(first_process(container), getattr(signal, stage.last["STOPSIGNAL"]))
            time.sleep(0.5)
            assert container.poll() is None, "the signal after preStop must not end the drain"
            sequence.close()
        assert container.wait(20) == 0, log.read_text()
    assert '"message": "drain over"' in log.read_text(), "the log is as the mounted configuration says"
    assert health() == 1
    assert [path.name for path in volumes[CACHE].iterdir()] == [], "the server wrote where it need not"


def pre_stop() -> list[str]:
    """The command that Kubernetes runs before it stops a pod."""
    text = (ROOT / "deploy" / "kubernetes" / "base" / "statefulset.yaml").read_text(encoding="utf-8")
    [container] = yaml.safe_load(text)["spec"]["template"]["spec"]["containers"]
    return list(container["lifecycle"]["preStop"]["exec"]["command"])


@contextmanager
def started(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A container that runs; killed at the end if it still does."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def first_process(container: subprocess.Popen[bytes]) -> int:
    """The container's process 1, as the host numbers it."""
    return int(Path(f"/proc/{container.pid}/task/{container.pid}/children").read_text().split()[0])
