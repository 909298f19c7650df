"""Options come from flags, environment and file in this order, and a wrong one is named."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

import pytest

from deltaline_server.config import MAX_CONFIG_BYTES, Config, ConfigError, asked_log_format, unknown_variables

BASE = ["--model", "somewhere"]


def parse(*argv: str, **environ: str) -> Config:
    return Config.parse([*BASE, *argv], {f"DELTALINE_{name}": value for name, value in environ.items()})


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = write(tmp_path / "deltaline.toml", "max_sequences = 3\nport = 3\nqueue_rows = 3\n")
    config = parse("--config", file, "--max-sequences", "1", MAX_SEQUENCES="2", PORT="2")
    assert (config.max_sequences, config.port, config.queue_rows, config.max_draft_tokens) == (1, 2, 3, 8)


def test_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    assert parse(CONFIG=write(tmp_path / "deltaline.toml", "seed = 5\n")).seed == 5


PATH_FLAGS = ("--model", "--random-init", "--config")
URI = [("--uds", character) for character in "%?#"]
FREE_TEXT = {"model", "random_init", "adapter_root", "state_dir", "host", "advertise", "uds", "audit_log"}
OPTIONS = [field.name for field in fields(Config)]


def test_the_help_has_every_option_and_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        Config.parse(["--help"], {})
    text = " ".join(capsys.readouterr().out.split())
    assert [option for option in OPTIONS if f"--{option.replace('_', '-')} " not in text] == []
    for shown in ("random weights [0]", "0 for a server without them [0]", "kept for retries, at most [256MiB]"):
        assert shown in text
    assert "[None]" not in text


@pytest.mark.parametrize("option", [option for option in OPTIONS if option not in FREE_TEXT])
def test_every_variable_is_read_and_judged(option: str) -> None:
    with pytest.raises(ConfigError, match=f"DELTALINE_{option.upper()}|--{option.replace('_', '-')}"):
        parse(**{option.upper(): "nothing"})


@pytest.mark.parametrize(
    ("text", "expected"), [("4096", 4096), ("4KiB", 4096), ("1.5gib", 3 * 2**29), ("2MB", 2_000_000)]
)
def test_bytes_may_have_a_unit(text: str, expected: int) -> None:
    assert parse("--state-bytes", text).state_bytes == expected


def test_file_takes_bytes_with_a_unit_and_whole_seconds(tmp_path: Path) -> None:
    file = write(tmp_path / "deltaline.toml", 'state_bytes = "1GiB"\ndrain_timeout_s = 5\ncheck = true\n')
    config = parse("--config", file)
    assert (config.state_bytes, config.drain_timeout_s, config.check) == (2**30, 5.0, True)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("max_sequence = 3", "max_sequence"),
        ('max_sequences = "3"', "max_sequences"),
        ("max_sequences = true", "max_sequences"),
        ("max_sequences = 0", "--max-sequences"),
        ("[server]\nport = 1", "server"),
        ("not toml", "can't be read"),
        ("a=" + "[" * 10_000, "^--config: .* can't be read: it is nested too deeply"),
        ("seed = " + "9" * 5000, "^--config: .* can't be read: "),
        ("seed = 0x" + "f" * 5000, r"^--seed: expected 0 .. \d+, got 0xf+[.]{3}$"),
        ("drain_timeout_s = 0x" + "f" * 5000, "drain_timeout_s: expected a number, got 0xf"),
        ('host = "a\\u0000b"', "--host"),
        ('"a\\nb" = 3', "unknown option 'a.nb'$"),
        ("#" * (MAX_CONFIG_BYTES + 1), "--config: expected at most"),
    ],
)
def test_wrong_file_is_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        parse("--config", write(tmp_path / "deltaline.toml", text))
    assert "\n" not in str(caught.value)


NUMBERS = {field.name: field.metadata for field in fields(Config) if field.metadata["low"] is not None}


@pytest.mark.parametrize("option", NUMBERS)
def test_a_number_has_an_upper_bound_that_is_told(option: str) -> None:
    low, high = NUMBERS[option]["low"], NUMBERS[option]["high"]
    with pytest.raises(ConfigError, match=rf"^--{option.replace('_', '-')}: expected {low} \.\. {high}, got 1"):
        parse(**{option.upper(): str(10**30)})


def test_a_file_that_is_a_pipe_is_read_once() -> None:
    reader, writer = os.pipe()
    os.write(writer, b'log_format = "json"\nport = -1\n')
    os.close(writer)
    with pytest.raises(ConfigError, match="--port") as caught:
        parse("--config", f"/dev/fd/{reader}")
    os.close(reader)
    assert caught.value.log_format == "json"


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--max-sequences", "0"], "--max-sequences"),
        (["--max-sequences", "many"], "--max-sequences: expected a whole number, got 'many'$"),
        (["--max-seq", "3"], "--max-seq"),
        (["--port", "65536"], "--port"),
        (["--scope", "layer"], "--scope"),
        (["--state-bytes", "1G"], "--state-bytes: expected .* KiB, MiB, GiB, TiB, KB, MB, GB, TB .*'1G'"),
        (["--state-bytes", "-1"], "--state-bytes"),
        (["--drain-timeout-s", "nan"], "--drain-timeout-s"),
        (["--drain-timeout-s", "x"], "--drain-timeout-s: expected a number, got 'x'$"),
        (["--layers", "4"], "--layers"),
        (["--layers", "4:4"], "--layers"),
        (["--spans", "0:2,"], "--spans"),
        (["--spans", ""], "--spans"),
        (["--default-lease-ms", "2000", "--max-lease-ms", "1000"], "--default-lease-ms"),
        (["--random-init", "config.json"], "--model, --random-init"),
        (["--config", "/nowhere/x.toml"], "^--config: /nowhere/x.toml can't be read: No such file or directory$"),
        (["--adapter-root", "."], "--adapter-root: expected --adapter-bytes"),
        (["--adapter-bytes", "1GiB", "--adapter-root", "/nowhere"], "--adapter-root: expected a folder"),
        (["--state-dir", "."], "^--state-dir: expected --state-dir-bytes above 0 beside it, got 0$"),
        (
            ["--state-dir", ".", "--state-dir-bytes", "5"],
            "^--state-dir: expected --host-state-bytes above 0 beside it, by which files go, got 0$",
        ),
        (["--state-dir-bytes", "5"], "^--state-dir-bytes: expected --state-dir beside it, got 5 alone$"),
        (["--adapter-slots", "0"], "--adapter-slots"),
        (["--max-adapter-rank", "257"], "--max-adapter-rank"),
        (["--uds", "/nowhere/deltaline.sock"], "--uds: expected a socket in a folder"),
        (["--uds", f"/tmp/{'é' * 52}"], "--uds: expected a path of 1 .. 107 bytes"),
        *(([flag, "x" * 300], f"^{flag}: expected a path .*File name too long") for flag in PATH_FLAGS),
        *(([flag, f"/tmp/a{character}b"], f"^{flag}: expected a path without % [?] #") for flag, character in URI),
        (["--model", "a\0b"], "--model: expected a path that the system takes, got 'a.x00b'"),
        (["--layers", f"0:{'9' * 5000}"], "--layers: expected FIRST:END"),
        (["--queue-rows", "9" * 5000], "--queue-rows: expected a whole number, got '9+[.]{3}$"),
        (["--config", "/dev/zero"], "--config: expected at most"),
        *((["--host", host], "--host: expected the name of a host") for host in ("a..b", "x" * 64, "a b", "", "a\0b")),
        (["--otlp-endpoint", "127.0.0.1:4317"], "--otlp-endpoint: expected http://HOST:PORT"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_wrong_option_is_refused_in_one_line_that_names_it(argv: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        parse(*argv)
    assert "\n" not in str(caught.value)


def test_model_is_needed() -> None:
    with pytest.raises(ConfigError, match="--model"):
        Config.parse([], {})


def test_spans_and_layers_become_ranges() -> None:
    config = parse("--layers", "0:4", "--spans", "2:4,0:2")
    assert (config.layer_range, config.span_ranges) == (range(4), (range(2, 4), range(2)))


def test_the_limits_themselves_are_taken() -> None:
    config = parse("--port", "65535", "--max-sequences", "1", "--uds", f"/tmp/{'x' * 102}")
    assert (config.port, config.max_sequences) == (65535, 1)


@pytest.mark.parametrize(
    ("environ", "cache"),
    [
        ({"HF_HUB_CACHE": "{0}/cache", "HF_HOME": "/nowhere"}, "cache"),
        ({"HF_HOME": "{0}/home"}, "home/hub"),
        ({"XDG_CACHE_HOME": "{0}"}, "huggingface/hub"),
    ],
    ids=lambda value: "".join(value) if isinstance(value, dict) else "",
)
def test_a_model_of_the_hugging_face_cache_is_served_by_its_name(
    tmp_path: Path, environ: dict[str, str], cache: str
) -> None:
    places = {"HF_HUB_OFFLINE": "1"} | {name: value.format(tmp_path) for name, value in environ.items()}
    with pytest.raises(ConfigError, match=rf"^--model: .* {tmp_path / cache}, got 'org/m-1.5B'.*`hf download org/m"):
        Config.parse(["--model", "org/m-1.5B"], places)
    folder = tmp_path / cache / "models--org--m-1.5B"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc123")
    snapshot = folder / "snapshots" / "abc123"
    for lacks, file in (("config.json and no weights", "config.json"), ("weights", "model.safetensors")):
        with pytest.raises(ConfigError, match=rf"in {snapshot}, found no {lacks}: .*`hf download org/m"):
            Config.parse(["--model", "org/m-1.5B"], places)
        snapshot.mkdir(parents=True, exist_ok=True)
        (snapshot / file).touch()
    assert Config.parse(["--model", "org/m-1.5B"], places).model == str(snapshot)


@pytest.mark.parametrize("revision", [b"\xff", b"a\0b", b"a" * 300, b"../x"])
def test_a_cache_that_is_none_is_told(tmp_path: Path, revision: bytes) -> None:
    refs = tmp_path / "models--org--m" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_bytes(revision)
    with pytest.raises(ConfigError, match=r"^--model: expected the name of a snapshot of 'org/m'.* `hf download"):
        Config.parse(["--model", "org/m"], {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"})
    with pytest.raises(ConfigError, match=r"^--model: expected a directory, or a model in ~nobody-here.* no user has"):
        Config.parse(["--model", "org/m"], {"HF_HUB_CACHE": "~nobody-here/cache", "HF_HUB_OFFLINE": "1"})


def test_a_directory_goes_before_a_name_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model").mkdir(parents=True)
    for path in ("org/model", "./org", "/org/model", "a/b/c"):
        assert Config.parse(["--model", path], {"HF_HOME": "/nowhere"}).model == path


@pytest.mark.parametrize(
    ("argv", "environ", "expected"),
    [
        (["--bogus", "--log-format", "json"], {}, "json"),
        (["--log-format=json", "--port", "x"], {"DELTALINE_LOG_FORMAT": "text"}, "json"),
        ([], {"DELTALINE_LOG_FORMAT": "json"}, "json"),
        (["--config", "{0}"], {}, "json"),
        (["--log-format", "text"], {"DELTALINE_CONFIG": "{0}"}, "text"),
        (["--log-format", "xml"], {}, "text"),
        (["--log-format"], {}, "text"),
        (["--config", "/nowhere"], {}, "text"),
    ],
)
def test_the_logs_format_is_known_though_another_option_is_wrong(
    tmp_path: Path, argv: list[str], environ: dict[str, str], expected: str
) -> None:
    file = write(tmp_path / "deltaline.toml", 'max_sequence = 3\nlog_format = "json"\n')
    filled = {name: value.format(file) for name, value in environ.items()}
    assert asked_log_format([word.format(file) for word in argv], filled) == expected


def test_unrelated_environment_is_ignored() -> None:
    parsed = Config.parse(BASE, {"PORT": "1", "DELTALINE_UNKNOWN": "1"})
    assert parsed == Config(model="somewhere", link=parsed.link)


def test_unknown_variables_are_those_that_nothing_else_sets() -> None:
    ours = {"DELTALINE_CONFIG": "", "DELTALINE_PORT": "", "DELTALINE_MAX_SEQUENCES": ""}
    of_kubernetes = {"DELTALINE_SERVICE_HOST": "", "DELTALINE_SERVICE_PORT_GRPC": "", "DELTALINE_PORT_50051_TCP": ""}
    of_kubernetes |= {"DELTALINE_GPU_PORT": "tcp://10.0.0.1:50051", "DELTALINE_GPU_PORT_50051_TCP_ADDR": ""}
    typos = dict.fromkeys(("DELTALINE_SEEDS", "DELTALINE_METRIC_PORT", "DELTALINE_PORTS", "DELTALINE_PORT_GRPC"), "9")
    typos |= {"DELTALINE_MY_SERVICE_NAME": ""}
    assert unknown_variables(typos | ours | of_kubernetes | {"PATH": ""}) == sorted(typos)


@pytest.mark.parametrize(
    ("flags", "environ", "folder"),
    [
        ([], {"XDG_RUNTIME_DIR": "/run/user/7"}, "/run/user/7/deltaline/"),
        ([], {"TMPDIR": "/var/tmp"}, f"/var/tmp/deltaline-{os.geteuid()}/"),
        ([], {}, f"/tmp/deltaline-{os.geteuid()}/"),
        (["--host", "::1"], {}, f"/tmp/deltaline-{os.geteuid()}/"),
        (["--host", "0.0.0.0", "--insecure"], {}, None),
        (["--host", "0.0.0.0", "--insecure", "--uds", "/tmp/a.sock"], {}, f"/tmp/deltaline-{os.geteuid()}/"),
        (["--link", "off"], {}, "off"),
        (["--link", "/run/x.sock"], {"XDG_RUNTIME_DIR": "/run/user/7"}, "/run/x.sock"),
        ([], {"XDG_RUNTIME_DIR": "/" + "x" * 200}, None),
    ],
)
def test_the_local_link_is_on_where_clients_may_be_of_this_host(
    flags: list[str], environ: dict[str, str], folder: str | None
) -> None:
    assert Config.parse([*BASE, *flags], environ).link == folder


@pytest.mark.parametrize(
    "link", ["", "on", "relative.sock", "/run/link", "/" + "x" * 110 + ".sock", "/" + "x" * 100 + "/"]
)
def test_a_local_link_that_can_not_be_is_refused(link: str) -> None:
    with pytest.raises(ConfigError, match=r"--link: expected .*path that|--link: expected off or"):
        Config(model="somewhere", link=link)


def test_the_group_of_the_local_link_has_to_exist() -> None:
    with pytest.raises(ConfigError, match="--link-group: expected the name of a group, got 'no such'"):
        Config(model="somewhere", link_group="no such")
