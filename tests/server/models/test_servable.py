"""What of a checkpoint can be served: spans that are found, what is left out of them, and refusals that say it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rigs.small_models import GATED_DELTA_NET, HYBRID, ZAMBA

from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.computing import model_options
from deltaline_server.config import Config
from deltaline_server.models.config import ModelConfig, Scope
from deltaline_server.models.model import ModelOptions, check_model, load_model, open_plan
from deltaline_server.models.servable import Auto, auto_spans, runs
from deltaline_server.sizing.__main__ import report
from deltaline_server.sizing.sizes import size

NEMOTRON: dict[str, Any] = {
    "model_type": "nemotron_h",
    "hidden_size": 32,
    "intermediate_size": 48,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 16,
    "n_groups": 2,
    "hybrid_override_pattern": "MM*-ME",
}
# Only its Mamba2 layers can be served.
WIDE = NEMOTRON | {"head_dim": 512, "mlp_hidden_act": "gelu"}
WIDE_HEADS = "head_dim: expected an integer in 2..256, got 512"
GELU = "mlp_hidden_act: expected 'relu2', got 'gelu'"
YARN = {"rope_parameters": {"rope_type": "yarn"}}
EXPERTS = {"model_type": "qwen3_next", "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [0]}
MOE = HYBRID | EXPERTS
BLOCK, MIXER = Scope.BLOCK, Scope.MIXER


def options(folder: Path, raw: dict[str, Any], **changes: Any) -> ModelOptions:
    path = folder / "config.json"
    path.write_text(json.dumps(raw))
    return ModelOptions(**{"device": torch.device("cpu"), "random_init": path, **changes})


@pytest.mark.parametrize(
    ("raw", "scope", "expected"),
    [
        (HYBRID, BLOCK, "0:2"),
        (HYBRID, MIXER, "0:1 1:2"),
        (HYBRID | YARN, BLOCK, "0:1"),
        (NEMOTRON, BLOCK, "0:6"),
        (NEMOTRON, MIXER, "0:1 1:2 2:3 4:5"),
        (WIDE, BLOCK, "0:2 4:5"),
        (WIDE, MIXER, "0:1 1:2 4:5"),
        (MOE, BLOCK, "0:2"),
        (MOE, MIXER, "0:1 1:2"),
        (MOE | {"num_experts_per_tok": 9}, BLOCK, "0:1"),
        (MOE | {"num_experts_per_tok": 9}, MIXER, "0:1 1:2"),
    ],
)
def test_spans_of_what_can_be_served(raw: dict[str, Any], scope: Scope, expected: str) -> None:
    config = ModelConfig.from_mapping(raw)
    spans = auto_spans(config, range(len(config.layers)), scope)
    assert " ".join(f"{span.start}:{span.stop}" for span in spans) == expected


def test_runs() -> None:
    assert runs([]) == ()
    assert runs([3]) == (range(3, 4),)
    assert runs([0, 1, 2, 5, 7, 8]) == (range(3), range(5, 6), range(7, 9))


@pytest.mark.parametrize(
    ("raw", "scope", "message"),
    [
        (
            WIDE,
            BLOCK,
            rf"^layer 2: expected mamba2, got attention \({re.escape(WIDE_HEADS)}\); "
            r"what can be served: --spans auto, which is 0:2,4:5$",
        ),
        (
            WIDE | {"hybrid_override_pattern": "M*" * 10},
            MIXER,
            r"^layer 1: .*; what can be served: --spans auto, which is 0:1,2:3,4:5,6:7,8:9,10:11,12:13,14:15,\.\.\.$",
        ),
        (
            WIDE | {"hybrid_override_pattern": "-E"},
            BLOCK,
            rf"^layer 0: expected an MLP that is served, got another \({GELU}\); what can be served: no layer of it$",
        ),
        (
            MOE | {"num_experts_per_tok": 9},
            BLOCK,
            r"^layer 1: expected a dense MLP in block scope, got a mixture of experts "
            r"\(num_experts_per_tok: expected an integer in 1\.\.4, got 9\); "
            "what can be served: its mixer with --scope mixer or --spans auto, which is 0:1$",
        ),
    ],
    ids=["spans", "many", "nothing", "mixer"],
)
def test_a_refusal_says_what_would_do(tmp_path: Path, raw: dict[str, Any], scope: Scope, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        check_model(options(tmp_path, raw, scope=scope))


@pytest.mark.parametrize(
    ("changes", "got"),
    [
        ({"spans": [range(0, 1), range(1, 3)]}, "1:"),
        ({"layers": range(1, 3)}, "1:"),
        ({"scope": MIXER}, "1:"),
    ],
)
def test_what_takes_embeddings_is_served_behind_them(tmp_path: Path, changes: dict[str, Any], got: str) -> None:
    check_model(options(tmp_path, ZAMBA))
    why = r"expected mamba2, got mamba2_behind_attention \(it takes the embeddings too, which are what a span of whole"
    with pytest.raises(
        ModelError, match=rf"^layer {got} {why} layers from layer 0 on is given\); what can be served: "
    ):
        check_model(options(tmp_path, ZAMBA, **changes))
    with open_plan(options(tmp_path, ZAMBA, spans=Auto.AUTO)) as plan:
        assert plan.spans == (range(3),) and plan.left_out == ""
    mixed = ZAMBA | {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "hybrid", "mamba"]}
    with open_plan(options(tmp_path, mixed, spans=Auto.AUTO, layers=range(1, 4))) as plan:
        assert plan.spans == (range(3, 4),) and plan.left_out.startswith("1:3: expected mamba2, got mamba2_behind_att")


def test_experts_are_served_on_a_gpu(tmp_path: Path) -> None:
    check_model(options(tmp_path, MOE, device=torch.device("cuda")))


def test_what_is_served_and_what_is_left_out(tmp_path: Path) -> None:
    with open_plan(options(tmp_path, WIDE, spans=Auto.AUTO)) as plan:
        assert plan.spans == (range(0, 2), range(4, 5))
        assert plan.left_out == (
            f"2:3: expected mamba2, got attention ({WIDE_HEADS}); "
            f"3:4: expected an MLP that is served, got another ({GELU}); "
            f"5:6: expected a dense MLP in block scope, got a mixture of experts ({GELU})"
        )
    with open_plan(options(tmp_path, WIDE, spans=Auto.AUTO, layers=range(1, 4))) as plan:
        assert plan.spans == (range(1, 2),)
    model = load_model(options(tmp_path, GATED_DELTA_NET, spans=Auto.AUTO))
    assert (model.spans, model.left_out) == ((range(0, 2),), "")


def test_nothing_to_serve_is_refused(tmp_path: Path) -> None:
    message = r"^--spans: expected layers that can be served in block scope, got none of 2:3: expected mamba2"
    with pytest.raises(ModelError, match=message):
        check_model(options(tmp_path, WIDE, spans=Auto.AUTO, layers=range(2, 4)))


def test_the_option(tmp_path: Path) -> None:
    path = options(tmp_path, WIDE).random_init
    config = Config.parse(["--random-init", str(path), "--spans", "auto"], {})
    assert config.span_ranges is None and model_options(config).spans is Auto.AUTO
    first, second, *_ = report(size(config, None), config, None).splitlines()
    assert first.startswith("nemotron_h, block scope, spans 0:2, 4:5, ")
    assert second.startswith("left to the orchestrator: 2:3: expected mamba2, got attention")
