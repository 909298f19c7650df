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
    ],
)
def test_half_of_it_is_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        Config.parse([*BASE, *flags], {})


def test_what_the_command_reads_is_no_unknown_variable() -> None:
    names = ["TLS_CA", "TLS_NAME", "TLS_CERT", "TLS_CAS"]
    assert unknown_variables({f"DELTALINE_{name}": "x" for name in names}) == ["DELTALINE_TLS_CAS"]
