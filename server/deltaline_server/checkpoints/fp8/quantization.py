"""What a config says of quantised weights: those in e4m3 with scales are served, no others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from deltaline_server.checkpoints.config_reader import ConfigReader

KEY = "quantization_config"
# A block may be larger than a tensor, but no larger than the largest that is served.
MAX_BLOCK = 1 << 20
# Where a config does not say it.
USUAL_BLOCK = (128, 128)
SERVED = "'fp8' (e4m3 weights with scales of blocks or of whole tensors; no other quantised weights are served)"


@dataclass(frozen=True)
class Quantization:
    """FP8 weights. weight_block_size: the rows and columns that have one scale, None where whole tensors have one.

    usual_block_size: those of a weight that has several scales all the same, None where none may.

    left: the ends of the names of modules that are not quantised. Of stored tensors their own dtype says whether they
    are, whatever these say.
    """

    weight_block_size: tuple[int, int] | None
    left: tuple[str, ...] = ()
    usual_block_size: tuple[int, int] | None = None

    def covers(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this name and shape is to be quantised: the weight of a linear module, or stacked ones,
        which are no module's `weight`."""
        module = name.removesuffix(".weight")
        is_linear = len(shape) == 2 or (len(shape) == 3 and module == name)
        return is_linear and not any(f".{module}".endswith(f".{left}") for left in self.left)

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> Self | None:
        """Read the parsed config.json; None where it tells of none. Raises ModelError naming the key."""
        if raw.get(KEY) is None:
            return None
        config = ConfigReader(raw, "").nested(KEY)
        if config.get("quant_method") != "fp8":
            raise config.fail("quant_method", SERVED)
        config.choice("fmt", "e4m3")
        config.choice("activation_scheme", "dynamic", "static")
        left = list[str]()
        for key in ("modules_to_not_convert", "ignored_layers"):
            names = config.get(key) or []
            if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
                raise config.fail(key, "a list of names of modules")
            left += names
        size = config.get("weight_block_size")
        if size is None:
            return cls(None, tuple(left), None if config.says("weight_block_size") else USUAL_BLOCK)
        if not isinstance(size, list) or len(size) != 2 or not all(_is_size(one) for one in size):
            raise config.fail("weight_block_size", f"two integers in 1..{MAX_BLOCK}")
        return cls((size[0], size[1]), tuple(left))


def _is_size(value: object) -> bool:
    return type(value) is int and 1 <= value <= MAX_BLOCK
