"""Writes a LoRA with random weights for a checkpoint, as PEFT writes it: python examples/make_adapter.py MODEL_DIR DIR

It changes every linear module of the recurrent and attention mixers and the dense MLPs. Needs numpy and safetensors.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

# "model.layers.3.mlp.up_proj.weight", "backbone.layers.3.mixer.in_proj.weight"
WEIGHT = re.compile(r".*layers\.\d+\.(?:linear_attn|self_attn|mixer|mlp)\.(\w+_proj\w*)\.weight")


def make_adapter(model: Path, directory: Path, *, rank: int = 8, seed: int = 0) -> None:
    """Write adapter_config.json and adapter_model.safetensors (fp32); the same seed writes the same weights.

    Raises ValueError when the model has no projection that is known here; then nothing is written.
    """
    rng = np.random.default_rng(seed)
    tensors, modules = dict[str, np.ndarray](), set[str]()
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            names = file.keys()
            for name in names:
                if found := WEIGHT.fullmatch(name):
                    rows, columns = file.get_slice(name).get_shape()
                    stem = "base_model.model." + name.removesuffix(".weight")
                    tensors[f"{stem}.lora_A.weight"] = _draw(rng, rank, columns)
                    tensors[f"{stem}.lora_B.weight"] = _draw(rng, rows, rank)
                    modules.add(found[1])
    if not modules:
        raise ValueError(f"{model}: expected projections of mixers or of an mlp in its *.safetensors, found none")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": sorted(modules)}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2))
    # Not save_file: it writes files that only their owner may read, whatever the umask says.
    (directory / "adapter_model.safetensors").write_bytes(save(tensors))


def _draw(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    return rng.standard_normal((rows, columns), dtype=np.float32) / np.float32(columns) ** 0.5


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="the checkpoint's directory")
    parser.add_argument("directory", type=Path, help="where to write; made if it is not there")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights [%(default)s]")
    options = parser.parse_args()
    try:
        make_adapter(options.model, options.directory, seed=options.seed)
    except ValueError as error:
        raise SystemExit(f"make_adapter: error: {error}; nothing is written") from error
    name = options.directory.resolve().name
    print(f"now load it: deltaline adapters load {name} --from {options.directory}")
