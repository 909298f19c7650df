"""The examples of deploy/routing, run before servers of a test."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from rigs.image import ROOT

FOLDER = ROOT / "deploy" / "routing"
BY_AFFINITY, IN_TURNS = "by affinity", "in turns"
BY_NAME, BY_SESSION = "by name, else in turns", "by session, else in turns"


def free_port() -> int:
    """A port of loopback that nobody has, below those that the system gives to who asks for any (from 32768)."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with suppress(OSError), socket.socket() as found:
            found.bind(("127.0.0.1", port))
            return port


def nginx_options(folder: Path, servers: Sequence[str], port: int, policy: str, has_tls: bool) -> list[str]:
    """The options of nginx that run its example before these servers."""
    text = (FOLDER / "nginx.conf").read_text()
    if has_tls:
        for plain in ("listen 50051 http2;", "grpc_pass grpc://deltaline;"):
            text = replaced(text, f" {plain}\n", "\n")
        text = replaced(text, "# tls: ", "")
    text = replaced(text, "listen 50051", f"listen 127.0.0.1:{port}")
    before, _, behind = text.partition("        server deltaline-0")
    text = (
        before + "".join(f"        server {one};\n" for one in servers) + behind[behind.index("        keepalive 64") :]
    )
    if policy == IN_TURNS:
        text = replaced(text, "hash $http_deltaline_affinity consistent;", "")
    # As another user than root it may write to its own folders alone, and in the foreground.
    temps = "".join(
        f"    {kind}_temp_path {folder}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    text = replaced(text, "http {\n", f"http {{\n    access_log off;\n{temps}")
    text = f"daemon off;\nerror_log stderr;\npid {folder}/nginx.pid;\nworker_processes 1;\n{text}"
    path = folder / "nginx.conf"
    put(path, text)
    return ["-c", str(path), "-p", str(folder), "-e", "stderr"]


def envoy_options(folder: Path, servers: Sequence[str], port: int, policy: str, has_tls: bool) -> list[str]:
    """The options of Envoy that run its example before these servers."""
    text = (FOLDER / "envoy.yaml").read_text()
    if has_tls:
        text = replaced(replaced(text, "        - filters:\n", ""), "# tls: ", "")
    if policy == BY_NAME:
        text = replaced(replaced(text, "      lb_policy: RING_HASH\n", ""), "# name: ", "")
        text = replaced(replaced(text, ".ring_hash", ".round_robin"), "RingHash", "RoundRobin")
    if policy == BY_SESSION:
        text = replaced(text, "# session: ", "")
    config: Any = yaml.safe_load(text)
    [listener], [cluster] = (config["static_resources"][key] for key in ("listeners", "clusters"))
    listener["address"]["socket_address"] |= {"address": "127.0.0.1", "port_value": port}
    # Of names each would be looked up and looked at by itself, and the ring grow while clients open. A file of
    # addresses is read again when another one takes its place.
    endpoints = folder / "endpoints.yaml"
    put(endpoints, yaml.safe_dump({"resources": [assignment(cluster.pop("load_assignment"), servers)]}))
    cluster |= {"type": "EDS", "eds_cluster_config": {"eds_config": {"path_config_source": {"path": str(endpoints)}}}}
    config["node"] = {"id": "test", "cluster": "test"}
    if policy in (IN_TURNS, BY_SESSION):
        cluster["lb_policy"] = "ROUND_ROBIN"
    path = folder / "envoy.yaml"
    put(path, yaml.safe_dump(config))
    return ["-c", str(path), "--concurrency", "1", "--disable-hot-restart", "-l", "error"]


def assignment(example: Any, servers: Sequence[str]) -> dict[str, Any]:
    """The example's load assignment with these servers, as Envoy's discovery has it."""
    example["endpoints"][0]["lb_endpoints"] = [
        {"endpoint": {"address": {"socket_address": {"address": host, "port_value": int(number)}}}}
        for host, _, number in (server.rpartition(":") for server in servers)
    ]
    return {"@type": "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment", **example}


OPTIONS: dict[str, Callable[[Path, Sequence[str], int, str, bool], list[str]]] = {
    "envoy": envoy_options,
    "nginx": nginx_options,
}


@dataclass
class Router:
    """An example that runs. address: where clients call; lead_to: sends what comes from now on to these servers."""

    address: str
    lead_to: Callable[[Sequence[str]], None]


@contextmanager
def routed(name: str, folder: Path, servers: Sequence[str], policy: str, *, has_tls: bool = False) -> Iterator[Router]:
    """Run an example before servers. Skips where the program is not installed. has_tls: with tls.crt, tls.key and
    ca.crt of the folder."""
    # A package of Python's may have brought it.
    program = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if program is None:
        pytest.skip(f"{name} is not installed: its example is not run")
    port = free_port()

    def lead_to(servers: Sequence[str]) -> None:
        OPTIONS[name](folder, servers, port, policy, has_tls)
        process.send_signal(signal.SIGHUP)  # nginx reads its file again; Envoy has seen its own, and passes over this

    with subprocess.Popen([program, *OPTIONS[name](folder, servers, port, policy, has_tls)], cwd=folder) as process:
        try:
            yield Router(f"127.0.0.1:{port}", lead_to)
            assert process.poll() is None, f"{name} ended"
        finally:
            process.terminate()


def put(path: Path, text: str) -> None:
    """Write a file, whole in one moment."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)


def replaced(text: str, old: str, new: str) -> str:
    """The text with a part that it has replaced."""
    assert old in text
    return text.replace(old, new)
