"""What configs say of rotary embeddings."""

from __future__ import annotations

import math
from dataclasses import dataclass

from deltaline_server.checkpoints.config_reader import MAX_FLOAT, MIN_FLOAT, ConfigReader
from deltaline_server.layers.rope_scaling import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from deltaline_server.models.parts import MAX_POSITIONS

# What may stand beside the kind of any. The sections are those of three-dimensional positions (mrope): of text, all
# three positions are the token's, and rotate as one does.
ROPE_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
_FIRST = "original_max_position_embeddings"
# What else may stand beside each kind that is served.
KINDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", _FIRST),
    "yarn": ("factor", _FIRST, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "llama3": ("factor", _FIRST, "low_freq_factor", "high_freq_factor"),
}


def has_rope_theta(config: ConfigReader) -> bool:
    """Whether the base of rotary embeddings is a number or absent; it is null in a config that has none of them."""
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    places = [config.nested(name), config] if config.get(name) else [config]
    saying = next((place for place in places if place.says("rope_theta")), None)
    return saying is None or saying.get("rope_theta") is not None


@dataclass(frozen=True)
class RotaryKeys:
    """Rotary embeddings. share: of a head's channels, where a config says nothing. beside: whether
    `partial_rotary_factor` may stand in the config itself; within: whether it may where the kind stands. theta: the
    base of wavelengths where a config says nothing.
    """

    share: float = 1.0
    beside: bool = False
    within: bool = False
    theta: float = 10000.0

    def read(self, config: ConfigReader, head_dim: int, positions: int) -> tuple[int, float, RopeScaling | None]:
        """Channels that are rotated, the base of their wavelengths, and how these are scaled, None where they are not.

        As `rope_scaling` says, else `rope_parameters`, else the config itself. positions: most tokens of a sequence.
        Raises ModelError naming the key.
        """
        name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
        rope = config.nested(name) if config.get(name) else ConfigReader({}, "")
        kind = _kind(rope)
        rope.only(ROPE_KEYS + KINDS[kind])
        place = rope if rope.get("rope_theta") is not None else config
        theta = place.positive("rope_theta", default=self.theta)
        rotary_dim = self._rotary_dim(config, rope, head_dim, is_scaled=kind != "default")
        if kind == "dynamic":
            # Its frequencies are those of the default kind until a sequence is longer than max_position_embeddings,
            # which none is allowed to be.
            rope.positive("factor")
            if rotary_dim == 2:
                raise rope.fail("partial_rotary_factor", "more than 2 rotated channels of a dynamic kind")
            return rotary_dim, theta, None
        if kind == "yarn" and theta <= 1:
            raise place.fail("rope_theta", "a number above 1 of kind yarn")
        return rotary_dim, theta, _scaling(kind, config, rope, positions)

    def _rotary_dim(self, config: ConfigReader, rope: ConfigReader, head_dim: int, is_scaled: bool) -> int:
        """Channels that are rotated. A family without partial rotations ignores a share, but not of scaled kinds."""
        has_own = rope.get("partial_rotary_factor") is not None
        if is_scaled and not (self.beside or self.within):
            place = rope if has_own else config
            if place.get("partial_rotary_factor") not in (None, 1):
                raise place.fail("partial_rotary_factor", "1 or none (this family rotates whole heads)")
        place = rope if self.within and has_own else config
        share = self.share
        if self.beside or place is rope:
            share = place.positive("partial_rotary_factor", default=share)
        rotary_dim = int(head_dim * share)
        if share > 1 or rotary_dim < 2 or rotary_dim % 2:
            raise place.fail("partial_rotary_factor", f"an even number of rotated channels in 2..{head_dim}")
        return rotary_dim


WHOLE_HEADS = RotaryKeys()


def _kind(rope: ConfigReader) -> str:
    """The kind of rotary embeddings. Raises ModelError naming the key, also of one that is not served."""
    key = "rope_type" if rope.get("rope_type") is not None else "type"
    if rope.get(key) in ("longrope", "su"):
        raise rope.fail(key, f"{', '.join(KINDS)} (longrope turns keys that are stored anew when a sequence grows)")
    kind = rope.choice(key, *KINDS)
    assert kind is not None
    return kind


def _scaling(kind: str, config: ConfigReader, rope: ConfigReader, positions: int) -> RopeScaling | None:
    """How the frequencies of a kind are scaled. Raises ModelError naming the key."""
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(rope.positive("factor"))
    # What stands in the config itself goes before.
    first = (config if config.says(_FIRST) else rope).integer(_FIRST, 1, MAX_POSITIONS, default=positions)
    if kind == "llama3":
        low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
        if high <= low:
            raise rope.fail("high_freq_factor", f"a number above low_freq_factor ({low:g})")
        return Llama3Scaling(rope.positive("factor"), low, high, first)
    is_implied = rope.says("factor") and rope.get("factor") is None
    factor = positions / first if is_implied else rope.positive("factor")
    fast, slow = (
        default if rope.get(key) is None else rope.positive(key)
        for key, default in (("beta_fast", 32.0), ("beta_slow", 1.0))
    )
    if fast < slow:
        raise rope.fail("beta_fast", f"at least beta_slow ({slow:g})")
    truncates = rope.flag("truncate", default=True)
    return YarnScaling(factor, fast, slow, first, truncates, _attention_factor(rope, factor))


def _attention_factor(rope: ConfigReader, factor: float) -> float:
    """What a YaRN config multiplies cos and sin by: as it says, or as its factor implies. An mscale of 0 is none."""
    if rope.get("attention_factor") is not None:
        return rope.positive("attention_factor")
    scales = tuple(rope.positive(key) for key in ("mscale", "mscale_all_dim") if rope.get(key) not in (None, 0))
    growth = max(0.1 * math.log(factor), 0.0)
    if len(scales) < 2:
        return growth + 1
    implied = (scales[0] * growth + 1) / (scales[1] * growth + 1)
    if not MIN_FLOAT <= implied <= MAX_FLOAT:
        raise rope.fail("mscale", "an attention factor that fp32 holds")
    return implied
