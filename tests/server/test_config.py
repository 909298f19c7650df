"""Options come from flags, environment and file in this order, and a wrong one is named."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from deltaline_server.config import Config, ConfigError, unknown_variables

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


FREE_TEXT = {"model", "random_init", "adapter_root", "host", "uds"}
OPTIONS = [field.name for field in fields(Config)]


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_is_in_the_help(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        Config.parse(["--help"], {})
    assert f"--{option.replace('_', '-')} " in capsys.readouterr().out.replace("\n", " ")


def test_the_help_has_defaults_that_are_0_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        Config.parse(["--help"], {})
    text = " ".join(capsys.readouterr().out.split())
    for shown in ("random weights [0]", "0 for a server without them [0]", "kept for retries, at most [256MiB]"):
        assert shown in text
    assert "[None]" not in text


def test_a_unit_that_is_not_known_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"--adapter-bytes: expected .* KiB, MiB, GiB, TiB, KB, MB, GB, TB .*'1G'"):
        parse("--adapter-bytes", "1G")


@pytest.mark.parametrize("option", [option for option in OPTIONS if option not in FREE_TEXT])
def test_every_variable_is_read_and_judged(option: str) -> None:
    with pytest.raises(ConfigError, match=f"DELTALINE_{option.upper()}|--{option.replace('_', '-')}"):
        parse(**{option.upper(): "nothing"})


@pytest.mark.parametrize(
    ("text", "expected"), [("4096", 4096), ("4KiB", 4096), ("1.5gib", 3 * 2**29), ("2MB", 2_000_000), ("0", 0)]
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
    ],
)
def test_wrong_file_is_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse("--config", write(tmp_path / "deltaline.toml", text))


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--max-sequences", "0"], "--max-sequences"),
        (["--max-sequences", "many"], "--max-sequences"),
        (["--max-seq", "3"], "--max-seq"),
        (["--port", "65536"], "--port"),
        (["--scope", "layer"], "--scope"),
        (["--state-bytes", "4 apples"], "--state-bytes"),
        (["--state-bytes", "-1"], "--state-bytes"),
        (["--drain-timeout-s", "nan"], "--drain-timeout-s"),
        (["--layers", "4"], "--layers"),
        (["--layers", "4:4"], "--layers"),
        (["--spans", "0:2,"], "--spans"),
        (["--spans", ""], "--spans"),
        (["--default-lease-ms", "2000", "--max-lease-ms", "1000"], "--default-lease-ms"),
        (["--random-init", "config.json"], "--model, --random-init"),
        (["--config", "/nowhere/deltaline.toml"], "--config"),
        (["--adapter-root", "."], "--adapter-root: expected --adapter-bytes"),
        (["--adapter-bytes", "1GiB", "--adapter-root", "/nowhere"], "--adapter-root: expected a folder"),
        (["--adapter-slots", "0"], "--adapter-slots"),
        (["--max-adapter-rank", "257"], "--max-adapter-rank"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
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


def test_unrelated_environment_is_ignored() -> None:
    assert Config.parse(BASE, {"PORT": "1", "DELTALINE_UNKNOWN": "1"}) == Config(model="somewhere")


def test_unknown_variables_are_those_that_nothing_else_sets() -> None:
    ours = {"DELTALINE_CONFIG": "", "DELTALINE_PORT": "", "DELTALINE_MAX_SEQUENCES": ""}
    of_kubernetes = {"DELTALINE_SERVICE_HOST": "", "DELTALINE_PORT_50051_TCP_ADDR": ""}
    typos = {"DELTALINE_SEEDS": "", "DELTALINE_MAX_SEQENCES": ""}
    assert unknown_variables(typos | ours | of_kubernetes | {"PATH": ""}) == sorted(typos)


def test_file_that_is_absent_is_named_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse("--config", "/nowhere/deltaline.toml")
    assert str(caught.value) == "--config: /nowhere/deltaline.toml can't be read: No such file or directory"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [(["--seed", "zig"], "a whole number, got 'zig'"), (["--drain-timeout-s", "x"], "a number, got 'x'")],
)
def test_message_says_what_kind_of_value_is_expected(argv: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=f"^{argv[0]}: expected {expected}$"):
        parse(*argv)
