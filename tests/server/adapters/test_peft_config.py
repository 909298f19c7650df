"""adapter_config.json means what it means to PEFT, or is refused by its key."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rigs.adapter_cases import adapter_config

from deltaline_server.adapters.directory import MAX_CONFIG_BYTES
from deltaline_server.adapters.peft_config import AdapterConfig, ModuleConfig
from deltaline_server.checkpoints.config_reader import ModelError

UP = "model.layers.1.mlp.up_proj"
QKV = "model.layers.11.linear_attn.in_proj_qkv"


def selected(name: str, **changes: Any) -> bool:
    return AdapterConfig(adapter_config(**changes)).module(name) is not None


@pytest.mark.parametrize(
    ("targets", "names"),
    [
        ("all-linear", {UP, QKV}),
        ("All-Linear", {UP, QKV}),
        (["up_proj"], {UP}),
        (["mlp.up_proj", "in_proj_qkv"], {UP, QKV}),
        ([UP], {UP}),
        (["roj", "up_pro", "1.mlp", "proj_qkv"], set()),
        ([], set()),
        (r".*\.mlp\..*", {UP}),
        (r"model\.layers\.(1|11)\..*", {UP, QKV}),
        ("up_proj", set()),
        (r".*up_proj|.*in_proj_.*", {UP, QKV}),
    ],
)
def test_target_modules(targets: Any, names: set[str]) -> None:
    assert {name for name in (UP, QKV) if selected(name, target_modules=targets)} == names


@pytest.mark.parametrize(("excluded", "is_left"), [(["up_proj"], False), (["p_proj"], True), (r".*\.mlp\..*", False)])
def test_exclude_modules(excluded: Any, is_left: bool) -> None:
    assert selected(UP, exclude_modules=excluded) == is_left
    assert selected(QKV, exclude_modules=excluded)


def test_layers_to_transform() -> None:
    targets = ["up_proj", QKV]
    assert selected(UP, target_modules=targets, layers_to_transform=1)
    assert not selected(UP, target_modules=targets, layers_to_transform=[0, 2], layers_pattern="layers")
    assert selected(UP, target_modules=targets, layers_to_transform=[])
    assert not selected("model.visual.blocks.1.mlp.up_proj", target_modules=targets, layers_to_transform=0)
    assert selected("model.visual.blocks.1.mlp.up_proj", target_modules=targets, layers_to_transform=1)
    assert not selected(
        "model.visual.blocks.1.mlp.up_proj", target_modules=targets, layers_to_transform=1, layers_pattern="layers"
    )
    # A whole name is meant whatever its layer, as it is to PEFT.
    assert selected(QKV, target_modules=targets, layers_to_transform=[0])


@pytest.mark.parametrize(
    ("pattern", "rank"),
    [
        ({}, 3),
        ({"up_proj": 4}, 4),
        ({"p_proj": 4}, 3),
        ({"mlp.up_proj": 4, "up_proj": 5}, 4),
        ({"up_proj": 5, "mlp.up_proj": 4}, 5),
        ({"^" + UP: 6}, 6),
        ({"^mlp.up_proj": 6}, 3),
        ({UP: 7}, 7),
        ({"mlpXup_proj": 7}, 3),
        ({"mlp.up.proj": 7}, 7),  # a dot is any character
        ({r"layers\.\d\.mlp\..*": 8, "up_proj": 9}, 8),
        ({"gate_proj": 1, ".*": 2, "up_proj": 9}, 2),
        ({"up_proj$": 4}, 4),
        ({"": 4}, 3),
    ],
)
def test_the_first_pattern_that_matches_gives_the_rank(pattern: dict[str, int], rank: int) -> None:
    config = AdapterConfig(adapter_config(rank_pattern=pattern))
    assert config.module(UP) == ModuleConfig(rank, 6 / rank, False)


def test_scales() -> None:
    raw = adapter_config(lora_alpha=16, r=8, alpha_pattern={"up_proj": 4.5}, use_dora=True)
    assert AdapterConfig(raw).module(UP) == ModuleConfig(8, 4.5 / 8, True)
    assert AdapterConfig(raw | {"use_rslora": True}).module(QKV) == ModuleConfig(8, 16 / math.sqrt(8), True)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "another type": ({"peft_type": "LOHA"}, "peft_type: expected 'LORA'"),
    "biases": ({"bias": "all"}, "bias: expected 'none'"),
    "biases of LoRA": ({"bias": "lora_only"}, "bias: expected 'none'"),
    "a bias of B": ({"lora_bias": True}, "'lora_bias': expected none"),
    "modules to save": ({"modules_to_save": ["lm_head"]}, "'modules_to_save': expected none"),
    "tokens": ({"trainable_token_indices": [1]}, "'trainable_token_indices': expected none"),
    "replication": ({"layer_replication": [[0, 2]]}, "'layer_replication': expected none"),
    "transposed weights": ({"fan_in_fan_out": True}, "'fan_in_fan_out': expected none"),
    "aLoRA": ({"alora_invocation_tokens": [1, 2]}, "'alora_invocation_tokens': expected none"),
    "QALoRA": ({"use_qalora": True}, "'use_qalora': expected none"),
    "block diagonals": ({"use_bdlora": {"nblocks": 2}}, "'use_bdlora': expected none"),
    "KaSA": ({"kasa_config": {"beta": 1.0}}, "'kasa_config': expected none"),
    "a key that is not known": ({"use_magic": True}, "'use_magic': expected none"),
    "pissa": ({"init_lora_weights": "pissa"}, "init_lora_weights: expected one that leaves"),
    "pissa, fast": ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights: expected one that leaves"),
    "olora": ({"init_lora_weights": "olora"}, "init_lora_weights: expected one that leaves"),
    "corda": ({"init_lora_weights": "corda"}, "init_lora_weights: expected one that leaves"),
    "loftq": ({"init_lora_weights": "loftq"}, "init_lora_weights: expected one that leaves"),
    "lora_ga": ({"init_lora_weights": "lora_ga"}, "init_lora_weights: expected one that leaves"),
    "an init that is a number": ({"init_lora_weights": 1}, "init_lora_weights: expected one that leaves"),
    "rank 0": ({"r": 0}, "r: expected an integer in 1..256"),
    "rank above the limit": ({"r": 257}, "r: expected an integer in 1..256"),
    "rank true": ({"r": True}, "r: expected an integer in 1..256"),
    "a fractional rank": ({"r": 2.0}, "r: expected an integer in 1..256"),
    "a huge rank": ({"r": 10**100}, "r: expected an integer in 1..256"),
    "rank above the limit in a pattern": (
        {"rank_pattern": {"a": 257}},
        "rank_pattern.a: expected an integer in 1..256",
    ),
    "ranks in a list": ({"rank_pattern": [1]}, "rank_pattern: expected an object"),
    "alpha as text": ({"lora_alpha": "8"}, "lora_alpha: expected a number"),
    "alpha not a number": ({"lora_alpha": float("nan")}, "lora_alpha: expected a number"),
    "alpha infinite": ({"alpha_pattern": {"a": float("inf")}}, "alpha_pattern.a: expected a number"),
    "alpha true": ({"alpha_pattern": {"a": True}}, "alpha_pattern.a: expected a number"),
    "targets unknown": ({"target_modules": None}, "target_modules: expected names of modules"),
    "targets as numbers": ({"target_modules": [1]}, "target_modules: expected at most"),
    "targets as an object": ({"target_modules": {"a": 1}}, "target_modules: expected at most"),
    "a pattern that is none": ({"target_modules": "(q"}, "pattern: expected"),
    "a pattern that looks back": ({"target_modules": r"(q)\1"}, "pattern: expected characters"),
    "a pattern that breaks out": ({"rank_pattern": {"a)|(b": 2}}, "pattern: expected"),
    "too many patterns": ({"rank_pattern": {f"a{i}*": 2 for i in range(65)}}, "rank_pattern: expected at most 64"),
    "a negative layer": ({"target_modules": ["q"], "layers_to_transform": -1}, "layers_to_transform: expected numbers"),
    "a layer as text": (
        {"target_modules": ["q"], "layers_to_transform": ["1"]},
        "layers_to_transform: expected numbers",
    ),
    "a layer that is true": ({"target_modules": ["q"], "layers_to_transform": True}, "layers_to_transform: expected"),
    "layers beside a pattern": ({"layers_to_transform": 1}, "layers_to_transform: expected none beside"),
    "other lists of layers": ({"layers_pattern": ["h"]}, "layers_pattern: expected 'layers'"),
    "DoRA as text": ({"use_dora": "yes"}, "use_dora: expected true or false"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_honoured_is_refused_by_its_key(case: str) -> None:
    changes, message = BAD[case]
    with pytest.raises(ModelError) as error:
        AdapterConfig(adapter_config(**changes))
    assert str(error.value).startswith(message)


TEXT = st.text("aZ0._*()[]{}\\ \n\0\u00e4\ud800", max_size=8)
JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        TEXT,
        st.sampled_from(["all-linear", "\ud800", "a" * 5000, "none", 10**400, 10**30, "(a*)*", "up_proj"]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(sorted([*adapter_config(), "\ud800", "x" * 5000])), JSON, max_size=6))
@settings(max_examples=100, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_it_says_it_is_taken_or_refused_in_a_short_sentence(changes: dict[str, Any]) -> None:
    try:
        AdapterConfig(adapter_config(**changes)).module(UP)
    except ModelError as error:
        assert len(str(error).encode()) < 400
        assert str(error).isprintable()


@pytest.mark.parametrize("key", ["\ud800", "a" * 5000, "a\n", "\x00"])
def test_a_pattern_that_no_message_could_carry_is_not_in_the_message(key: str) -> None:
    with pytest.raises(ModelError, match=r"^rank_pattern: expected patterns of at most") as error:
        AdapterConfig(adapter_config(rank_pattern={key: 0}))
    assert len(str(error.value).encode()) < 200


@pytest.mark.parametrize("init", [True, False, "gaussian", "eva", "orthogonal"])
def test_beginnings_that_leave_the_base_alone(init: Any) -> None:
    assert selected(UP, init_lora_weights=init)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "adapter_config.json: expected JSON"),
        (b"[1]", "adapter_config.json: expected a JSON object"),
        (b"\xff\xfe", "adapter_config.json: expected JSON"),
        (b"[" * 100_000, "adapter_config.json: expected JSON"),
        (b" " * (MAX_CONFIG_BYTES + 1), "adapter_config.json: expected at most"),
        (b"{}", "peft_type: expected 'LORA', got nothing"),
    ],
    ids=["empty", "a list", "no text", "deep", "large", "nothing said"],
)
def test_a_file_that_is_no_config_is_refused(text: bytes, message: str) -> None:
    with pytest.raises(ModelError) as error:
        AdapterConfig.parse(text)
    assert str(error.value).startswith(message)


def test_keys_are_required_where_a_default_would_be_a_guess() -> None:
    for key in ("r", "lora_alpha"):
        raw = adapter_config()
        del raw[key]
        with pytest.raises(ModelError, match=f"^{key}: expected"):
            AdapterConfig.parse(json.dumps(raw).encode())


def test_there_may_be_a_rank_for_every_module_by_name() -> None:
    names = [f"model.layers.{i}.{module}" for i in range(96) for module in ("mlp.up_proj", "linear_attn.in_proj_qkvz")]
    names += [f"model.layers.{i}.self_attn.{head}_proj" for i in range(96) for head in "abcdefghijklmnop"]
    ranks = {name: i % 16 + 1 for i, name in enumerate(reversed(names))}
    config = AdapterConfig(adapter_config(rank_pattern=ranks, target_modules=names))
    found = {name: config.module(name) for name in names}
    assert {name: module.rank for name, module in found.items() if module is not None} == ranks


@pytest.mark.parametrize("key", ["r", "target_modules", "rank_pattern"])
def test_a_value_nested_as_deeply_as_it_can_be_read_is_refused(key: str) -> None:
    refusals = set()
    for depth in range(800, 1000):  # somewhere there it can be read, and not be written into a message
        text = json.dumps(adapter_config(**{key: None}))
        nested = text.replace(f'"{key}": null', f'"{key}": {"[" * depth}{"]" * depth}')
        with pytest.raises(ModelError) as error:
            AdapterConfig.parse(nested.encode())
        refusals.add(str(error.value).partition(":")[0])
    assert refusals == {key, "adapter_config.json"}
