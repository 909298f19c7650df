"""Nobody reaches a server unprotected, unless that is meant."""

from __future__ import annotations

import pytest

from deltaline_server.config import Config, ConfigError, unknown_variables

BASE = ["--model", "somewhere"]
TLS = ["--tls-cert", "a.crt", "--tls-key", "a.key"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.com", "127.example.com"])
def test_an_address_that_others_reach_needs_tls_or_a_word(host: str) -> None:
    with pytest.raises(ConfigError, match=rf"^--host: expected --tls-cert and --tls-key for '{host}'.*--insecure"):
        Config.parse([*BASE, "--host", host], {})
    assert Config.parse([*BASE, "--host", host, "--insecure"], {}).max_age_s is None
    assert Config.parse([*BASE, "--host", host, *TLS], {}).max_age_s == 3600


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.53", "::1", "localhost"])
def test_loopback_needs_neither(host: str) -> None:
    assert Config.parse([*BASE, "--host", host], {}).tls_cert is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (TLS[:2], "--tls-cert: expected --tls-key beside it"),
        (TLS[2:], "--tls-key: expected --tls-cert beside it"),
        (["--tls-client-ca", "ca.crt"], "--tls-client-ca: expected --tls-cert and --tls-key beside it"),
        ([*TLS, "--insecure"], "--insecure: expected no --tls-cert beside it"),
        (["--move-ca", "ca.crt"], "--move-ca: expected --tls-cert and --tls-key beside it"),
        (["--move-peers", "gpu-2:50051"], "--move-peers: expected --tls-cert and --tls-key for gpu-2:50051"),
        (
            ["--insecure", "--move-peers", "gpu-2:50051", "--move-token-file", __file__],
            "--move-peers: expected --tls-cert and --tls-key for gpu-2:50051",
        ),
        (["--move-peers", "127.0.0.1:50052"], "--move-peers: expected --host-state-bytes above 0 beside it"),
    ],
)
def test_half_of_it_is_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        Config.parse([*BASE, *flags], {})


@pytest.mark.parametrize("names", ["gpu-2", "gpu-2:0", "gpu-2:65536", ":50051", "a:1,,b:2", "", "a/b:1", "unix:/a"])
def test_what_is_no_host_and_port_is_no_peer(names: str) -> None:
    with pytest.raises(ConfigError, match=r"^--move-peers: expected HOST:PORT or link:/PATH, with commas between, got"):
        Config.parse([*BASE, *TLS, "--move-peers", names], {})


@pytest.mark.parametrize("flags", [TLS, ["--insecure"]], ids=str)
def test_peers_are_hosts_and_ports_with_commas_between(flags: list[str]) -> None:
    base = [*BASE, "--host-state-bytes", "1MiB"]
    peers = Config.parse([*base, *flags, "--move-peers", "gpu-2:1, 10.0.0.3:50051,[fd00::1]:2"], {}).peers
    assert peers == ["gpu-2:1", "10.0.0.3:50051", "[fd00::1]:2"]
    assert Config.parse(BASE, {}).peers == []
    assert Config.parse([*base, "--move-peers", "127.0.0.1:1,[::1]:2", "--move-token-file", __file__], {}).peers


def test_what_the_command_reads_is_no_unknown_variable() -> None:
    names = ["TLS_CA", "TLS_NAME", "TLS_CERT", "TLS_CAS"]
    assert unknown_variables({f"DELTALINE_{name}": "x" for name in names}) == ["DELTALINE_TLS_CAS"]
