"""What an adapter's adapter_config.json says, as PEFT writes it: which modules it changes, their ranks and scales.

What can't be honoured is refused by its key, and so is every key that is not known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from deltaline_server.adapters.directory import CONFIG_FILE, MAX_CONFIG_BYTES
from deltaline_server.adapters.name_pattern import MAX_CHARS, NamePattern, Work, is_readable
from deltaline_server.checkpoints.config_reader import ConfigReader, ModelError, parse_json_object
from deltaline_server.errors import shown
from deltaline_server.models.parts import MAX_LAYERS

MAX_RANK = 256
MAX_NAMES = 8192
MAX_EXPRESSIONS = 64
MATCHING_STEPS = 1 << 20
# How training began, where it leaves the base weights alone. The others (pissa, olora, corda, loftq, lora_ga) change
# them, and what they wrote is wrong on the weights that are served.
INITS = (True, False, "gaussian", "orthogonal", "eva")
HONOURED = {
    "peft_type",
    "r",
    "lora_alpha",
    "target_modules",
    "exclude_modules",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "use_dora",
    "bias",
    "init_lora_weights",
    "layers_to_transform",
    "layers_pattern",
}
# They mean nothing to inference. Parameters (of experts) are another way to name what is changed: their tensors match
# no module that is served, and are refused by name when there are any.
WITHOUT_MEANING = {
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "inference_mode",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_parameters",
    "task_type",
}
# None of them is honoured; PEFT writes them all, with these values.
UNSET: tuple[object, ...] = (None, False, [], {})
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.")


@dataclass(frozen=True)
class ModuleConfig:
    """What an adapter does to one module: rank R, the scale of B A, and whether it has a magnitude (DoRA)."""

    rank: int
    scale: float
    has_magnitude: bool


class AdapterConfig:
    """The part of an adapter's config that matters. Names of modules are whole, without PEFT's `base_model.model.`."""

    def __init__(self, raw: Mapping[str, Any], max_rank: int = MAX_RANK) -> None:
        """Raises ModelError naming the key: it is not honoured, not known, of a wrong type or out of its range."""
        config = ConfigReader(raw, "")
        _refuse_what_is_not_honoured(config, raw)
        work = Work(MATCHING_STEPS)
        self._is_dora, self._is_rank_stabilised = _flag(config, "use_dora"), _flag(config, "use_rslora")
        self._rank, self._alpha = (
            config.integer("r", 1, max_rank),
            _number(config, "lora_alpha", config.get("lora_alpha")),
        )
        ranks, alphas = _patterns(config, "rank_pattern"), _patterns(config, "alpha_pattern")
        ranks = {name: ConfigReader(ranks, "rank_pattern.").integer(name, 1, max_rank) for name in ranks}
        alphas = {name: _number(ConfigReader(alphas, "alpha_pattern."), name, alpha) for name, alpha in alphas.items()}
        self._ranks = _FirstMatch(ranks, work, config, "rank_pattern")
        self._alphas = _FirstMatch(alphas, work, config, "alpha_pattern")
        if config.get("target_modules") is None:
            raise config.fail("target_modules", "names of modules, a pattern or 'all-linear'")
        self._targets = _Names(config, "target_modules", work)
        self._excluded = _Names(config, "exclude_modules", work)
        self._layers, self._has_layers_pattern = _layers(config), bool(config.get("layers_pattern"))

    @classmethod
    def parse(cls, text: bytes, max_rank: int = MAX_RANK) -> AdapterConfig:
        """Read the text of the file. Raises ModelError."""
        if len(text) > MAX_CONFIG_BYTES:
            raise ModelError(f"{CONFIG_FILE}: expected at most {MAX_CONFIG_BYTES} bytes, got {len(text)}")
        return cls(parse_json_object(text, CONFIG_FILE), max_rank)

    def module(self, name: str) -> ModuleConfig | None:
        """What becomes of a linear module, None where the adapter leaves it alone. Raises ModelError when the patterns
        take too much work."""
        if self._excluded.include(name) or not self._targets.include(name):
            return None
        if self._layers is not None and not self._targets.name_whole(name):
            layer = _number_after_layers(name) if self._has_layers_pattern else _first_number(name)
            if layer not in self._layers:
                return None
        rank = self._ranks.value(name, self._rank)
        alpha = self._alphas.value(name, self._alpha)
        scale = alpha / (math.sqrt(rank) if self._is_rank_stabilised else rank)
        return ModuleConfig(int(rank), scale, self._is_dora)


class _Names:
    """Names of modules: whole names or their ends in a list, a pattern for whole names, or all linear modules."""

    def __init__(self, config: ConfigReader, key: str, work: Work) -> None:
        value = config.get(key) or []
        self._is_all = isinstance(value, str) and value.lower() == "all-linear" and key == "target_modules"
        self._pattern = NamePattern(value, work) if isinstance(value, str) and not self._is_all else None
        if isinstance(value, str):
            value = []
        if not isinstance(value, list) or len(value) > MAX_NAMES or not all(isinstance(name, str) for name in value):
            raise config.fail(key, f"at most {MAX_NAMES} names of modules, or a pattern")
        self._names = frozenset(value)

    def include(self, name: str) -> bool:
        """Whether a module is meant."""
        if self._is_all:
            return True
        if self._pattern is not None:
            return self._pattern.matches(name)
        return not self._names.isdisjoint(_ends(name))

    def name_whole(self, name: str) -> bool:
        """Whether a list has the module's whole name; then it is meant whatever its layer."""
        return name in self._names


class _FirstMatch:
    """Values by pattern: the first pattern counts that matches a name from its beginning, or from behind a dot.

    Patterns of letters, digits and dots are looked up, not matched, since tuned adapters have one for every module. A
    dot in them stands for any character, as in any pattern.
    """

    def __init__(self, values: Mapping[str, float], work: Work, config: ConfigReader, key: str) -> None:
        self._values = list(values.values())
        self._plain: dict[tuple[int, ...], dict[str, int]] = {}
        self._expressions: list[tuple[int, NamePattern]] = []
        if len(values) > MAX_NAMES:
            raise config.fail(key, f"at most {MAX_NAMES} patterns")
        for i, pattern in enumerate(values):
            if pattern and _PLAIN.issuperset(pattern):
                dots = tuple(at - len(pattern) for at, character in enumerate(pattern) if character == ".")
                self._plain.setdefault((-len(pattern), *dots), {}).setdefault(pattern, i)
            else:
                NamePattern(pattern, work)  # by itself it is whole: it ends no group that it did not begin
                self._expressions.append((i, NamePattern(rf"(.*\.)?({pattern})", work)))
        if len(self._expressions) > MAX_EXPRESSIONS or len(self._plain) > MAX_EXPRESSIONS:
            raise config.fail(key, f"at most {MAX_EXPRESSIONS} patterns that are more than names")

    def value(self, name: str, default: float) -> float:
        """The value for a name, the default where no pattern matches."""
        matches = []
        for (start, *dots), patterns in self._plain.items():
            begin = len(name) + start
            if begin == 0 or (begin > 0 and name[begin - 1] == "."):
                end = list(name[begin:])
                for dot in dots:
                    end[dot] = "."
                matches.append(patterns.get("".join(end), len(self._values)))
        matches += [i for i, pattern in self._expressions if pattern.matches(name)]
        first = min(matches, default=len(self._values))
        return self._values[first] if first < len(self._values) else default


def _ends(name: str) -> Iterable[str]:
    """A name, and what is behind each of its dots."""
    yield name
    while "." in name:
        name = name.partition(".")[2]
        yield name


def _first_number(name: str) -> int | None:
    """The number of a module's layer where no pattern says what stands before it: the first between dots, from the
    third part on."""
    parts = name.split(".")
    return next((int(part) for part in parts[2:-1] if part.isdecimal()), None)


def _number_after_layers(name: str) -> int | None:
    """The number of a module's layer behind `layers`."""
    parts = name.split(".")
    return next((int(b) for a, b in pairwise(parts[:-1]) if a == "layers" and b.isdecimal()), None)


def _refuse_what_is_not_honoured(config: ConfigReader, raw: Mapping[str, Any]) -> None:
    if raw.get("peft_type") != "LORA":
        raise config.fail("peft_type", "'LORA'")
    if raw.get("bias", "none") != "none":
        raise config.fail("bias", "'none' (biases of the base are not changed)")
    init = raw.get("init_lora_weights", True)
    if not any(init is known or (isinstance(init, str) and init == known) for known in INITS):
        raise config.fail("init_lora_weights", "one that leaves the base weights as they are")
    for key, value in raw.items():
        if key not in HONOURED and key not in WITHOUT_MEANING and value not in UNSET:
            raise ModelError(f"{shown(key)}: expected none (it is not honoured), got {shown(value)}")


def _flag(config: ConfigReader, key: str) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise config.fail(key, "true or false")
    return bool(value)


def _number(config: ConfigReader, key: str, value: object) -> float:
    """A finite number that a scale may be made of."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 1e6:
        raise config.fail(key, "a number in -1e6..1e6")
    return float(value)


def _patterns(config: ConfigReader, key: str) -> dict[str, Any]:
    """Values by pattern, not checked yet."""
    value = config.get(key)
    if value is not None and not isinstance(value, dict):
        raise config.fail(key, "an object")
    if not all(is_readable(pattern) for pattern in value or ()):
        raise config.fail(key, f"patterns of at most {MAX_CHARS} printable ASCII characters")
    return value or {}


def _layers(config: ConfigReader) -> frozenset[int] | None:
    """The layers that a list of names is meant for, None for all."""
    value = config.get("layers_to_transform")
    layers = [value] if isinstance(value, int) else value or []
    is_known = isinstance(layers, list) and all(type(layer) is int and 0 <= layer < MAX_LAYERS for layer in layers)
    if not is_known:
        raise config.fail("layers_to_transform", f"numbers of layers, 0..{MAX_LAYERS - 1}")
    if config.get("layers_pattern") not in (None, "", [], "layers", ["layers"]):
        raise config.fail("layers_pattern", "'layers'")
    if layers and isinstance(config.get("target_modules"), str):
        raise config.fail("layers_to_transform", "none beside a pattern in target_modules")
    return frozenset(layers) if layers else None
