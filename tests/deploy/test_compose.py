"""deploy/compose: that its parts fit each other, the image and the server. Its schema is checked by `make check`; no
engine has run it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from rigs.image import ROOT, stages

from deltaline_server import app
from deltaline_server.computing import check
from deltaline_server.config import Config, unknown_variables

FOLDER = ROOT / "deploy" / "compose"
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
SERVERS = {name: one for name, one in SERVICES.items() if name.startswith("server")}
IMAGE = stages()


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_no_rights_and_is_reached_from_this_machine_alone(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True and service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["ports"] and all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert re.fullmatch(r"[a-z/]+:(?!latest)[\w.]+", service["image"])


def test_one_profile_starts_one_server_of_its_target() -> None:
    assert {tuple(one["profiles"]): one["build"]["target"] for one in SERVERS.values()} == {
        ("gpu",): "gpu",
        ("cpu",): "cpu",
    }
    assert all(one["build"]["target"] in IMAGE for one in SERVERS.values())
    devices = SERVERS["server-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert [(one["driver"], one["capabilities"]) for one in devices] == [("nvidia", ["gpu"])]
    assert "deploy" not in SERVERS["server-cpu"]


@pytest.mark.parametrize("name", SERVERS)
def test_what_the_server_reads_and_writes_is_there(name: str) -> None:
    service = SERVERS[name]
    mounts = {place: (source, mode) for source, place, mode in map(split, service["volumes"])}
    source, mode = mounts[service["environment"]["DELTALINE_CONFIG"]]
    assert mode == "ro" and mounts["/model"][1] == "ro"
    cache = IMAGE["gpu"].environment["HOME"]
    assert mounts[cache] == ("kernels", "rw") and "kernels" in COMPOSE["volumes"]
    config = Config.parse(["--config", str(FOLDER / source)], {})
    grace = re.fullmatch(r"(\d+)s", service["stop_grace_period"])
    assert grace is not None and int(grace[1]) >= config.drain_timeout_s + app.STOP_GRACE_S + 20
    if config.random_init is not None:  # the model that is there without MODEL_DIR
        local = FOLDER / mounts["/model"][0] / Path(config.random_init).relative_to("/model")
        check(Config.parse(["--config", str(FOLDER / source), "--random-init", str(local)], {}))
    else:
        assert config.model == "/model"


def split(mount: str) -> tuple[str, str, str]:
    """Source, place and mode of a mount, with the default of a variable."""
    source, place, *mode = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", mount).split(":")
    return source, place, *(mode or ["rw"])  # type: ignore[return-value]


def test_tls_is_an_option_that_all_services_know() -> None:
    tls = yaml.safe_load((FOLDER / "tls.yaml").read_text(encoding="utf-8"))["services"]
    folder = ROOT / "deploy" / "prometheus"
    assert tls.keys() == {*SERVERS, "prometheus"}
    for name in SERVERS:
        environment = IMAGE["gpu"].environment | SERVERS[name]["environment"] | tls[name]["environment"]
        assert unknown_variables(environment) == []
        config = Config.parse(["--model", "/model", "--config", "/dev/null"], environment)
        assert config.tls_client_ca == environment["DELTALINE_TLS_CA"] == "/etc/deltaline-tls/ca.crt"
        assert environment["DELTALINE_TLS_NAME"] in SERVERS[name]["networks"]["default"]["aliases"]
    assert len({mount for one in tls.values() for mount in one["volumes"]}) == 1
    assert "--config.file=/etc/prometheus/tls.yml" in tls["prometheus"]["command"]
    secure, plain = [yaml.safe_load((folder / name).read_text("utf-8")) for name in ("tls.yml", "prometheus.yml")]
    [job] = secure["scrape_configs"]
    assert (job.pop("scheme"), *job.pop("tls_config").values()) == (
        "https",
        *(f"/etc/deltaline-tls/{name}" for name in ("ca.crt", "tls.crt", "tls.key")),
    )
    assert secure == plain


def test_prometheus_scrapes_the_server_by_its_name() -> None:
    folder = ROOT / "deploy" / "prometheus"
    config = yaml.safe_load((folder / "prometheus.yml").read_text(encoding="utf-8"))
    [job] = config["scrape_configs"]
    [static] = job["static_configs"]
    metrics = IMAGE["gpu"].last["EXPOSE"].split()[1]
    assert job["job_name"] == "deltaline", "the alerts' job"
    assert static["targets"] == [f"server:{metrics}"]
    assert all(one["networks"]["default"]["aliases"] == ["server"] for one in SERVERS.values())
    mounts = {place: source for source, place, _ in map(split, SERVICES["prometheus"]["volumes"])}
    assert (FOLDER / mounts["/etc/prometheus"]).resolve() == folder
    assert "--config.file=/etc/prometheus/prometheus.yml" in SERVICES["prometheus"]["command"]
    assert all((folder / name).is_file() for name in config["rule_files"])


def test_every_file_that_is_mounted_exists() -> None:
    for service in SERVICES.values():
        for source, _, _ in map(split, service["volumes"]):
            assert source in COMPOSE["volumes"] or (FOLDER / source).exists(), source
