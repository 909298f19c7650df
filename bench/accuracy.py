"""bf16 beside transformers' own bf16: error against fp32 on the same weights, and teacher-forced top-1 agreement.

The weights are rounded to bf16 once; the truth is transformers in fp32 on them. Both sides compute the decoder layers
of the same token sequences (8 x 256), ours once as prefill and once as a prefill of 128 tokens with decodes behind
it; transformers' final norm and lm_head, in the side's dtype, make logits of both.

Two models: one with random weights, and the same after a short training on a synthetic language. The error is judged
on both. The agreement is judged on the trained one: with random weights the two best logits are often closer than
bf16 resolves, and transformers in bf16 does not agree with itself in fp32 either; that figure is printed beside ours.

    python bench/accuracy.py --device cuda [--output FILE.json]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextForCausalLM

from deltaline_bench.device import name_device, provenance
from deltaline_kernels import Rows
from deltaline_server.layers.state_pool import StateOptions
from deltaline_server.models.model import Model, ModelOptions, load_model

SEQUENCES, TOKENS, PROMPT, VOCABULARY = 8, 256, 128, 1024
MAX_DRAFT = 8
ERROR_BAR, AGREEMENT_BAR = 1.5, 0.99


def draw_text(count: int, tokens: int, generator: torch.Generator) -> Tensor:
    """Sequences [count, tokens] of a language in which each word has one usual successor, followed 9 times in 10."""
    successor = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0))
    text = torch.randint(VOCABULARY, (count, tokens), generator=generator)
    usual = torch.rand(count, tokens, generator=generator) < 0.9
    for t in range(1, tokens):
        text[:, t] = torch.where(usual[:, t], successor[text[:, t - 1]], text[:, t])
    return text


def train(model: Any, steps: int, device: torch.device) -> None:
    """Teach the model the language; progress is shown."""
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(3)
    for step in range(steps):
        text = draw_text(32, 64, generator).to(device)
        loss = model(text, labels=text, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"training: step {step} of {steps}, loss {loss.item():.3f}", flush=True)
    model.cpu().eval()


def write_checkpoint(directory: Path, training_steps: int, device: torch.device) -> None:
    """Write a checkpoint of 4 layers in bf16, with gates and norms that are not their initial constants."""
    config = transformers.Qwen3NextConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 4,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=0,
        mlp_only_layers=[0, 1, 2, 3],
        tie_word_embeddings=False,
    )
    torch.manual_seed(1)
    model = Qwen3NextForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.linear_attn.dt_bias.normal_(-2.0, 1.0)
            layer.input_layernorm.weight.normal_(0.0, 0.1)
            layer.post_attention_layernorm.weight.normal_(0.0, 0.1)
    if training_steps:
        train(model, training_steps, device)
    model.to(torch.bfloat16).save_pretrained(directory)


def ours(model: Model, embedded: Tensor, prompt: int) -> Tensor:
    """Decoder outputs [sequences, tokens, hidden]: a prefill of `prompt` tokens, then one decode per token."""
    count = len(embedded)
    pool = model.make_pool(StateOptions(num_lines=count, max_draft=MAX_DRAFT))
    lines, zeros = list(range(1, count + 1)), [0] * count
    outputs, begin = [], 0
    for length in [prompt] + [1] * (embedded.shape[1] - prompt):
        rows = Rows.build(
            [length] * count,
            lines if begin else zeros,
            lines,
            [length] * count,
            zeros,
            zeros,
            max_short=MAX_DRAFT,
            device=model.device,
        )
        hidden = embedded[:, begin : begin + length].reshape(count * length, -1)
        outputs.append(model.forward(0, hidden, rows, pool).view(count, length, -1))
        begin += length
    return torch.cat(outputs, dim=1)


def decoder_outputs(oracle: Any, embedded: Tensor) -> Tensor:
    """transformers' decoder layers without the final norm."""
    hidden = embedded
    for layer in oracle.model.layers:
        hidden = layer(hidden, position_embeddings=None)
    return hidden


def logits(oracle: Any, hidden: Tensor) -> Tensor:
    """transformers' final norm and lm_head, in fp32 from there on."""
    result: Tensor = oracle.lm_head(oracle.model.norm(hidden)).float()
    return result


def error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    return float((actual.float() - expected).norm() / expected.norm())


def agreement(one: Tensor, other: Tensor) -> float:
    """Share of positions at which both choose the same word."""
    return float((one.argmax(-1) == other.argmax(-1)).float().mean())


def measure(device: torch.device, training_steps: int) -> dict[str, float]:
    """The figures of one model on a device."""
    with tempfile.TemporaryDirectory() as name:
        write_checkpoint(Path(name), training_steps, device)
        with torch.inference_mode():
            return compare(Path(name), device)


def compare(directory: Path, device: torch.device) -> dict[str, float]:
    """Errors and agreements on the checkpoint in a directory."""
    truth = Qwen3NextForCausalLM.from_pretrained(directory, dtype=torch.float32).to(device).eval()
    oracle = Qwen3NextForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).to(device).eval()
    model = load_model(ModelOptions(device, model=directory, dtype=torch.bfloat16))
    tokens = draw_text(SEQUENCES, TOKENS, torch.Generator().manual_seed(2)).to(device)
    embedded = oracle.model.embed_tokens(tokens)
    expected = decoder_outputs(truth, embedded.float())
    theirs = decoder_outputs(oracle, embedded)
    prefilled, decoded = ours(model, embedded, TOKENS), ours(model, embedded, PROMPT)
    top = logits(oracle, theirs)
    return {
        "transformers_error": error(theirs, expected),
        "prefill_error": error(prefilled, expected),
        "decode_error": error(decoded, expected),
        "prefill_agreement": agreement(logits(oracle, prefilled), top),
        "decode_agreement": agreement(logits(oracle, decoded), top),
        "transformers_agreement_with_fp32": agreement(top, logits(truth, expected)),
        "prefill_agreement_with_fp32": agreement(logits(oracle, prefilled), logits(truth, expected)),
    }


def main() -> int:
    """Run, print the figures, and return 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--training-steps", type=int, default=200, help="steps of the short training (default 200)")
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.set_float32_matmul_precision("highest")
    name = name_device(device)
    figures = {
        "random weights": measure(device, 0),
        f"trained {arguments.training_steps} steps": measure(device, arguments.training_steps),
    }
    print(f"\n{name}, torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"{'':36}" + "".join(f"{column:>20}" for column in figures))
    random, trained = figures.values()
    for key in random:
        print(f"{key:36}{random[key]:>20.5f}{trained[key]:>20.5f}")
    ratio = max(max(f["prefill_error"], f["decode_error"]) / f["transformers_error"] for f in figures.values())
    agrees = min(trained["prefill_agreement"], trained["decode_agreement"])
    print(f"{'error in errors of transformers':36}{ratio:>20.3f}   at most {ERROR_BAR}")
    print(f"{'top-1 agreement with transformers':36}{agrees:>20.4f}   at least {AGREEMENT_BAR} (trained)")
    if arguments.output:
        record = provenance(name, torch, transformers) | {"figures": figures, "error_ratio": ratio}
        arguments.output.write_text(json.dumps(record, indent=2) + "\n")
    return 0 if ratio <= ERROR_BAR and agrees >= AGREEMENT_BAR else 1


if __name__ == "__main__":
    sys.exit(main())
