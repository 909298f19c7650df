"""The Kubernetes manifests as kustomize renders them: that their parts fit each other, the image and the server.

Their schema is checked by `make check`; no cluster has run them.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml
from rigs.dashboards import metrics_of
from rigs.image import ROOT, stages
from torch.distributed.run import get_args_parser

from deltaline_cli import drain
from deltaline_cli.address import add_server
from deltaline_server import app
from deltaline_server.computing import check
from deltaline_server.config import Config, unknown_variables
from deltaline_server.front import layer_service
from deltaline_server.moving.peers import REACH_S
from deltaline_server.moving.records import MAX_BYTES

FOLDER = ROOT / "deploy" / "kubernetes"
OVERLAYS = sorted(path.name for path in (FOLDER / "overlays").iterdir())
IMAGE = stages()
# In place of an overlay's file.
ARGUMENTS = ["--model", "/model", "--host-state-bytes", "1MiB"]
Manifests = dict[tuple[str, str], dict[str, Any]]


def render(folder: Path) -> Manifests:
    """What `kubectl kustomize` makes of a folder, by kind and name."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed: nothing renders the overlays")
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(done.stdout)}


@pytest.fixture(scope="module", params=OVERLAYS)
def rendered(request: pytest.FixtureRequest) -> Manifests:
    return render(FOLDER / "overlays" / request.param)


@pytest.fixture
def pod(rendered: Manifests) -> dict[str, Any]:
    template: dict[str, Any] = rendered["StatefulSet", "deltaline"]["spec"]["template"]
    return template


@pytest.fixture
def container(pod: dict[str, Any]) -> dict[str, Any]:
    [only] = pod["spec"]["containers"]
    return dict(only)


def test_there_is_an_overlay_for_each_target_of_the_image(rendered: Manifests, container: dict[str, Any]) -> None:
    assert OVERLAYS == ["cpu", "gpu", "tls"]
    assert container["image"].removeprefix("deltaline:") in IMAGE
    wants_gpu = "nvidia.com/gpu" in container["resources"]["limits"]
    assert wants_gpu == (container["image"] == "deltaline:gpu")


def test_every_selector_finds_the_pods(rendered: Manifests, pod: dict[str, Any]) -> None:
    labels = pod["metadata"]["labels"].items()
    selectors = [
        rendered["StatefulSet", "deltaline"]["spec"]["selector"]["matchLabels"],
        rendered["PodDisruptionBudget", "deltaline"]["spec"]["selector"]["matchLabels"],
        rendered["NetworkPolicy", "deltaline"]["spec"]["podSelector"]["matchLabels"],
        *(one["spec"]["selector"] for (kind, _), one in rendered.items() if kind == "Service"),
    ]
    assert len(selectors) == 5
    assert all(selector and selector.items() <= labels for selector in selectors)


def test_clients_and_prometheus_are_let_in_and_nobody_else(rendered: Manifests) -> None:
    spec = rendered["NetworkPolicy", "deltaline"]["spec"]
    steps, metrics = spec["ingress"]
    pods = {"podSelector": {"matchLabels": spec["podSelector"]["matchLabels"]}}
    assert steps["from"] == [{"podSelector": {"matchLabels": {"deltaline-client": "true"}}}, pods]
    assert metrics["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    assert [rule["ports"][0]["port"] for rule in (steps, metrics)] == ["grpc", "metrics"]
    siblings, names = spec["egress"]
    assert siblings == {"to": [pods], "ports": [{"protocol": "TCP", "port": "grpc"}]}
    assert names["to"] == [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}}}]
    assert {port["port"] for port in names["ports"]} == {53} and spec["policyTypes"] == ["Ingress", "Egress"]


def test_a_pod_that_drains_is_found_by_its_name_and_not_offered(rendered: Manifests) -> None:
    offered, named = rendered["Service", "deltaline"]["spec"], rendered["Service", "deltaline-pods"]["spec"]
    assert offered["clusterIP"] == named["clusterIP"] == "None"
    assert "publishNotReadyAddresses" not in offered and named["publishNotReadyAddresses"] is True
    assert rendered["StatefulSet", "deltaline"]["spec"]["serviceName"] == "deltaline-pods"


def test_ports_are_those_of_the_image(container: dict[str, Any], rendered: Manifests) -> None:
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert list(map(str, ports.values())) == IMAGE["gpu"].last["EXPOSE"].split()
    for (kind, _), one in rendered.items():
        if kind == "Service":
            assert all(ports[port["targetPort"]] == port["port"] for port in one["spec"]["ports"])
    probes = [container[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness")]
    if has_tls(container):
        assert [probe["httpGet"]["port"] for probe in probes] == ["metrics"] * 3
    else:
        assert [probe["grpc"]["port"] for probe in probes] == [ports["grpc"]] * 3


def test_liveness_does_not_follow_a_drain(container: dict[str, Any], pod: dict[str, Any]) -> None:
    # "" lives through a drain, and readiness does not: tests/server/test_app.py.
    probes = [container[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness")]
    if has_tls(container):
        assert [probe["httpGet"]["path"] for probe in probes] == ["/readyz", "/healthz", "/readyz"]
        assert all(probe["httpGet"]["scheme"] == "HTTPS" and "grpc" not in probe for probe in probes)
    else:
        assert [probe["grpc"].get("service", "") for probe in probes] == ["", "", layer_service.NAME]
    # The signal, which drains as well, comes when this command ends: a server that does not answer must not keep it.
    asked = pre_stop(container)
    assert (asked.run, asked.server) == (drain.drain, f"unix:{environment_of(container)['DELTALINE_UDS']}")
    taken_s = len(asked.to) * REACH_S + asked.timeout + app.STOP_GRACE_S
    assert pod["spec"]["terminationGracePeriodSeconds"] >= taken_s + 20
    assert pod["spec"]["enableServiceLinks"] is False


def test_a_pod_that_ends_moves_its_sequences_to_every_other_that_there_may_be(
    rendered: Manifests, container: dict[str, Any]
) -> None:
    config = Config.parse(["--config", "/dev/null", *ARGUMENTS], environment_of(container))
    named = rendered["StatefulSet", "deltaline"]
    most = rendered["HorizontalPodAutoscaler", "deltaline"]["spec"]["maxReplicas"]
    pods = [f"deltaline-{number}.{named['spec']['serviceName']}:{config.port}" for number in range(most)]
    assert config.peers == pre_stop(container).to == pods


def test_volumes_of_states_are_an_option_and_outlive_the_pods(tmp_path: Path) -> None:
    content = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(FOLDER / "overlays" / "cpu", tmp_path)],
        "components": [os.path.relpath(FOLDER / "components" / "states", tmp_path)],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    spec = render(tmp_path)["StatefulSet", "deltaline"]["spec"]
    [claim], [container] = spec["volumeClaimTemplates"], spec["template"]["spec"]["containers"]
    environment = environment_of(container)
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert str(Path(environment["DELTALINE_STATE_DIR"]).parent) == mounts[claim["metadata"]["name"]]
    toml = str(FOLDER / "overlays" / "cpu" / "deltaline.toml")
    config = Config.parse(["--config", toml], environment | {"DELTALINE_RANDOM_INIT": "model.json"})
    assert claim["spec"]["resources"]["requests"]["storage"] == "10Gi"
    assert config.state_dir_bytes + MAX_BYTES < 10 << 30
    assert spec["template"]["spec"]["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"


def test_several_gpus_of_a_pod_are_as_many_ranks(tmp_path: Path) -> None:
    content = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(FOLDER / "overlays" / "gpu", tmp_path)],
        "components": [os.path.relpath(FOLDER / "components" / "gpus", tmp_path)],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    [container] = render(tmp_path)["StatefulSet", "deltaline"]["spec"]["template"]["spec"]["containers"]
    config = Config.parse(ARGUMENTS, environment_of(container))
    assert str(config.tensor_parallel) == container["resources"]["limits"]["nvidia.com/gpu"] == "2"


def test_a_group_over_hosts_is_one_server(tmp_path: Path) -> None:
    """What LeaderWorkerSet makes pods of are pods that Kubernetes takes, and torchrun and the server what they say."""
    made = render(FOLDER / "leaderworkerset")
    template = made["LeaderWorkerSet", "deltaline"]["spec"]["leaderWorkerTemplate"]
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart"
    told = {"LWS_GROUP_SIZE": str(template["size"]), "LWS_LEADER_ADDRESS": "deltaline-0.deltaline"}
    selector = made["Service", "deltaline-group"]["spec"]["selector"].items()
    inside = made["NetworkPolicy", "deltaline-group"]["spec"]["podSelector"]["matchLabels"].items()
    for rank, kind in enumerate(("leaderTemplate", "workerTemplate")):
        pod, told["LWS_WORKER_INDEX"] = template[kind], str(rank)
        as_pod = {"apiVersion": "v1", "kind": "Pod", **pod}
        kubernetes_validate.validate(as_pod, kubernetes_validate.latest_version(), strict=True)
        [container] = pod["spec"]["containers"]
        words = [re.sub(r"\$\((\w+)\)", lambda named: told[named[1]], one) for one in container["command"]]
        assert words[:3] == ["python", "-m", "torch.distributed.run"]
        started = get_args_parser().parse_args(words[3:])
        assert (started.nnodes, started.node_rank, started.module, started.training_script) == (
            "2",
            rank,
            True,
            "deltaline_server",
        )
        assert started.nproc_per_node == container["resources"]["limits"]["nvidia.com/gpu"] == "8"
        config = Config.parse(container["args"], {})
        assert (config.tensor_parallel, config.host) == (1, "0.0.0.0")  # WORLD_SIZE says how many ranks there are
        # torchrun gives its processes 30 s.
        assert config.drain_timeout_s + app.STOP_GRACE_S < 30 < pod["spec"]["terminationGracePeriodSeconds"]
        labels = pod["metadata"]["labels"].items()
        assert inside <= labels and (selector <= labels) == (rank == 0)
        assert ("readinessProbe" in container) == (rank == 0)


def test_the_pod_runs_as_the_image_does_and_without_rights(container: dict[str, Any], pod: dict[str, Any]) -> None:
    context = pod["spec"]["securityContext"]
    user = IMAGE["gpu"].last["USER"]
    assert f"{context['runAsUser']}:{context['runAsGroup']}" == user and context["fsGroup"] == context["runAsGroup"]
    assert context["runAsNonRoot"] is True and context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_what_the_server_writes_and_reads_is_mounted(
    container: dict[str, Any], pod: dict[str, Any], rendered: Manifests
) -> None:
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    if has_tls(container):
        files = {value for name, value in environment_of(container).items() if value.startswith("/etc/deltaline-tls/")}
        assert files == {f"/etc/deltaline-tls/{name}" for name in ("tls.crt", "tls.key", "ca.crt")}
        assert mounts["/etc/deltaline-tls"]["readOnly"] and "secret" in volumes["tls"]
    assert {mount["name"] for mount in mounts.values()} == volumes.keys()
    writable = {path for path, mount in mounts.items() if not mount.get("readOnly")}
    assert writable == {IMAGE["gpu"].environment["HOME"], "/tmp", "/dev/shm"}
    assert all("emptyDir" in volumes[mounts[path]["name"]] for path in writable)
    assert volumes[mounts["/dev/shm"]["name"]]["emptyDir"]["medium"] == "Memory"
    flag, path = container["args"]
    files = rendered["ConfigMap", volumes[mounts[str(Path(path).parent)]["name"]]["configMap"]["name"]]["data"]
    assert flag == "--config" and Path(path).name in files


def test_the_autoscaler_scales_on_what_the_adapter_offers(rendered: Manifests) -> None:
    spec = rendered["HorizontalPodAutoscaler", "deltaline"]["spec"]
    adapter = yaml.safe_load((ROOT / "deploy" / "prometheus" / "adapter-rules.yml").read_text(encoding="utf-8"))
    assert [metric["pods"]["metric"]["name"] for metric in spec["metrics"]] == [
        rule["name"]["as"] for rule in adapter["rules"]
    ]
    filled = [
        rule["metricsQuery"].replace("<<.GroupBy>>", "pod").replace("<<.LabelMatchers>>", 'pod=~"a|b"')
        for rule in adapter["rules"]
    ]
    assert [metrics_of(query) for query in filled] == [{"deltaline_lines_used", "deltaline_lines_capacity"}]
    assert all(query.count('{pod=~"a|b"}') == len(metrics_of(query)) for query in filled), "of the pods asked for alone"
    target = rendered["StatefulSet", spec["scaleTargetRef"]["name"]]
    assert spec["scaleTargetRef"]["kind"] == target["kind"] and spec["minReplicas"] > 1
    budget = rendered["PodDisruptionBudget", "deltaline"]["spec"]
    assert budget["maxUnavailable"] == 1, "a node that is emptied takes one pod's sequences at a time"
    assert "replicas" not in target["spec"], "applying the manifests again would end the pods that the autoscaler added"
    assert spec["behavior"]["scaleDown"]["stabilizationWindowSeconds"] >= Config.default_lease_ms / 1000


def test_the_service_monitor_is_an_option_and_finds_the_metrics(tmp_path: Path) -> None:
    plain = render(FOLDER / "overlays" / "cpu")
    content = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(FOLDER / "overlays" / "cpu", tmp_path)],
        "components": [os.path.relpath(FOLDER / "components" / "servicemonitor", tmp_path)],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    monitored = render(tmp_path)
    assert monitored.keys() - plain.keys() == {("ServiceMonitor", "deltaline")}
    spec = monitored["ServiceMonitor", "deltaline"]["spec"]
    [endpoint] = spec["endpoints"]
    scraped = [
        one
        for (kind, _), one in monitored.items()
        if kind == "Service"
        and spec["selector"]["matchLabels"].items() <= one["metadata"]["labels"].items()
        and endpoint["port"] in {port["name"] for port in one["spec"]["ports"]}
    ]
    assert [one["metadata"]["name"] for one in scraped] == ["deltaline-pods"], "each pod is scraped once"
    assert scraped[0]["metadata"]["labels"][spec["jobLabel"]] == "deltaline", "the alerts' job"


def test_cert_manager_makes_what_the_pods_mount_for_the_names_that_clients_use(tmp_path: Path) -> None:
    content = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(FOLDER / "overlays" / "tls", tmp_path)],
        "components": [os.path.relpath(FOLDER / "components" / "certmanager", tmp_path)],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    made = render(tmp_path)
    spec, client = [made["Certificate", name]["spec"] for name in ("deltaline", "deltaline-client")]
    pod = made["StatefulSet", "deltaline"]["spec"]["template"]["spec"]
    [mounted] = [volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume]
    assert spec["secretName"] == mounted != client["secretName"]
    services = {name for kind, name in made if kind == "Service"}
    assert {"localhost", "deltaline", "*.deltaline-pods"} <= set(spec["dnsNames"])
    assert services == {"deltaline", "deltaline-pods"}
    assert {"server auth", "client auth"} <= set(spec["usages"]) and "server auth" not in client["usages"]
    environment = environment_of(pod["containers"][0])
    assert environment["DELTALINE_TLS_NAME"] in spec["dnsNames"]
    assert environment["DELTALINE_ADVERTISE"].replace("deltaline-0", "*") in spec["dnsNames"]
    ports = [port for name in services for port in made["Service", name]["spec"]["ports"] if port["name"] == "grpc"]
    assert [port["appProtocol"] for port in ports] == ["https"] * 2


def test_the_server_takes_the_environment_with_the_image_s(container: dict[str, Any]) -> None:
    environment = IMAGE["gpu"].environment | environment_of(container)
    assert unknown_variables(environment) == []
    config = Config.parse([*ARGUMENTS, "--config", "/dev/null"], environment)
    assert config.host == "0.0.0.0" and config.insecure != has_tls(container)


def test_a_pod_tells_clients_the_name_by_which_it_is_found(rendered: Manifests, container: dict[str, Any]) -> None:
    config = Config.parse(ARGUMENTS, environment_of(container))
    stateful = rendered["StatefulSet", "deltaline"]
    found_by = f"{stateful['metadata']['name']}-0.{stateful['spec']['serviceName']}.default.svc"
    [port] = [port["containerPort"] for port in container["ports"] if port["name"] == "grpc"]
    assert config.name(config.port) == f"{found_by}:{port}"


def environment_of(container: dict[str, Any]) -> dict[str, str]:
    """As the first pod of the namespace `default` has it: Kubernetes puts in what was named before."""
    told = {"metadata.name": "deltaline-0", "metadata.namespace": "default"}
    values: dict[str, str] = {}
    for one in container["env"]:
        value = one.get("value") or told[one["valueFrom"]["fieldRef"]["fieldPath"]]
        values[one["name"]] = re.sub(r"\$\((\w+)\)", lambda named: values[named[1]], value)
    return values


def pre_stop(container: dict[str, Any]) -> argparse.Namespace:
    """The options of the command that ends a pod; where that fails the same one follows it without targets."""
    shell, option, script = container["lifecycle"]["preStop"]["exec"]["command"]
    assert (shell, option) == ("sh", "-c")
    moving, plain = (shlex.split(part) for part in script.split("||"))
    assert moving[0] == "deltaline" and plain == [word for word in moving if not word.startswith("--to=")]
    parser, served = argparse.ArgumentParser(), argparse.ArgumentParser(add_help=False)
    add_server(served)
    drain.add_drain(parser.add_subparsers(), served)
    return parser.parse_args(moving[1:])


def has_tls(container: dict[str, Any]) -> bool:
    return "DELTALINE_TLS_CERT" in environment_of(container)


@pytest.mark.parametrize("overlay", ["cpu", "gpu"])
def test_configuration_is_one_that_the_server_takes(overlay: str) -> None:
    folder = FOLDER / "overlays" / overlay
    config = Config.parse(["--config", str(folder / "deltaline.toml")], {})
    if config.random_init is not None:
        local = folder / Path(config.random_init).name
        check(Config.parse(["--config", str(folder / "deltaline.toml"), "--random-init", str(local)], {}))
    else:
        assert config.model == "/model"
    assert config.drain_timeout_s == 60  # as preStop says: a signal without it drains for as long
