"""Writes a small checkpoint with random weights, as transformers writes it: python examples/make_checkpoint.py DIR

A Qwen3.5 whose layers are Gated DeltaNet and attention in turn; with --gated-delta-net all are Gated DeltaNet, with
--mamba2 all are Mamba2. With --experts layers have a mixture of experts: a Qwen3.5-MoE, or with --next-experts a
Qwen3-Next. With --streams N layers are joined by hyper-connections of N residual streams. A deltaline server can serve
the whole stack of each, and two servers half of it each. Needs torch and transformers.
"""

from __future__ import annotations

import argparse
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from runpy import run_path

if __name__ == "__main__":  # Ctrl-C ends it without a traceback, while it imports torch as well
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import torch
from transformers import (
    Mamba2Config,
    Mamba2ForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.utils import logging


def make_checkpoint(
    directory: Path,
    kind: str = "hybrid",
    *,
    seed: int = 0,
    num_layers: int = 4,
    vocab_size: int = 256,
    streams: int = 0,
) -> None:
    """Write config.json and model.safetensors (fp32) to `directory`; the same seed writes the same weights.

    kind: of the layers, one of KINDS. streams: residual streams, 0 for one plain residual.
    """
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(seed)
    model = KINDS[kind](num_layers, vocab_size)
    if streams:
        run_path(str(Path(__file__).with_name("streams.py")))["add_streams"](model, streams)
    model.save_pretrained(directory)
    # It writes weights that only their owner may read, and the config as the umask says.
    for path in directory.glob("*.safetensors"):
        path.chmod(stat.S_IMODE((directory / "config.json").stat().st_mode))


def make_hybrid(num_layers: int, vocab_size: int) -> Qwen3_5ForCausalLM:
    """Make a Qwen3.5 model of which every other layer is attention."""
    config = Qwen3_5TextConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=num_layers,
        layer_types=["linear_attention", "full_attention"] * (num_layers // 2),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        tie_word_embeddings=False,
        eos_token_id=None,
        dtype="float32",
    )
    return Qwen3_5ForCausalLM(config)


def make_gated_delta_net(num_layers: int, vocab_size: int) -> Qwen3NextForCausalLM:
    """Make a Qwen3-Next model without experts and without attention."""
    config = Qwen3NextConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=num_layers,
        layer_types=["linear_attention"] * num_layers,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=0,
        tie_word_embeddings=False,
        eos_token_id=None,
        dtype="float32",
    )
    return Qwen3NextForCausalLM(config)


EXPERTS = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 96,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "dtype": "float32",
}


def make_experts(num_layers: int, vocab_size: int) -> Qwen3_5MoeForCausalLM:
    """Make a Qwen3.5-MoE model of which every other layer is attention."""
    types = ["linear_attention", "full_attention"] * (num_layers // 2)
    config = Qwen3_5MoeTextConfig(vocab_size=vocab_size, num_hidden_layers=num_layers, layer_types=types, **EXPERTS)
    model = Qwen3_5MoeForCausalLM(config)
    # Logits further apart: fewer tokens are near ties, which decide by rounding.
    with torch.no_grad():
        model.lm_head.weight.mul_(4)
    return model


def make_next_experts(num_layers: int, vocab_size: int) -> Qwen3NextForCausalLM:
    """Make a Qwen3-Next model of which the last layer is attention, and the first has no experts."""
    config = Qwen3NextConfig(
        vocab_size=vocab_size,
        num_hidden_layers=num_layers,
        layer_types=["linear_attention"] * (num_layers - 1) + ["full_attention"],
        mlp_only_layers=[0],
        intermediate_size=256,
        **EXPERTS,
    )
    return Qwen3NextForCausalLM(config)


def make_mamba2(num_layers: int, vocab_size: int) -> Mamba2ForCausalLM:
    """Make a Mamba2 model."""
    config = Mamba2Config(
        vocab_size=vocab_size,
        hidden_size=128,
        num_hidden_layers=num_layers,
        num_heads=8,
        head_dim=32,
        state_size=16,
        n_groups=2,
        chunk_size=8,
        eos_token_id=None,
        dtype="float32",
    )
    model = Mamba2ForCausalLM(config)
    # With outputs as large as they are made, no run of tokens ever comes back: there would be nothing to look up.
    with torch.no_grad():
        for layer in model.backbone.layers:
            layer.mixer.out_proj.weight.mul_(0.04)
    return model


KINDS: dict[str, Callable[[int, int], PreTrainedModel]] = {
    "hybrid": make_hybrid,
    "gated_delta_net": make_gated_delta_net,
    "mamba2": make_mamba2,
    "experts": make_experts,
    "next_experts": make_next_experts,
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where to write; made if it is not there")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights [%(default)s]")
    kinds = parser.add_mutually_exclusive_group()
    for kind, text in (
        ("gated_delta_net", "all layers are Gated DeltaNet"),
        ("mamba2", "all layers are Mamba2"),
        ("experts", "layers have a mixture of experts, as in Qwen3.5-MoE"),
        ("next_experts", "layers have a mixture of experts, as in Qwen3-Next"),
    ):
        flag = f"--{kind.replace('_', '-')}"
        kinds.add_argument(flag, dest="kind", action="store_const", const=kind, default="hybrid", help=text)
    parser.add_argument("--streams", type=int, default=0, metavar="N", help="residual streams, 1 to 8; 0 for none [0]")
    options = parser.parse_args()
    if not 0 <= options.streams <= 8:
        parser.error(f"--streams: expected 0 .. 8, got {options.streams}")
    try:
        options.directory.mkdir(parents=True, exist_ok=True)  # transformers only logs that it is a file
        make_checkpoint(options.directory, options.kind, seed=options.seed, streams=options.streams)
    except OSError as error:
        raise SystemExit(f"make_checkpoint: error: {error}") from error
    for path in sorted(options.directory.iterdir()):
        print(f"wrote {path}, {path.stat().st_size} bytes")
    print(f"now serve it: deltaline-server --model {options.directory}")
