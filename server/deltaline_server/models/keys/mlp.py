"""What configs say of MLPs and of mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass

from deltaline_kernels import MAX_EXPERTS, MAX_TOP_K
from deltaline_server.checkpoints.activation import Activation
from deltaline_server.checkpoints.config_reader import ConfigReader
from deltaline_server.layers.expert_shape import SIGMOID, SOFTMAX, ExpertsShape
from deltaline_server.models.parts import MAX_SIZE

# Of gates, where there is one and a config does not say which.
USUAL_LIMIT = 10.0


@dataclass(frozen=True)
class ExpertKeys:
    """Experts behind a router, and a shared one behind a gate if has_shared_gate.

    shared_key: None where there is no shared one.

    num_experts, top_k, inner, shared: where a config says nothing; None where it must. normalises: whether a token's
    weights are divided by their sum, None where `norm_topk_prob` says it. count_keys: the spellings of the key of the
    number of experts; top_keys, group_keys, normalises_keys: of those of a token, of their groups, of norm_topk_prob.
    inner_key, shared_key: the keys of their sizes. shared_keys: in place of the latter, the spellings of how many
    experts the shared one is. limit: the key of the limit of gates and what they multiply, None where there is none.
    scale: of weights, where a config says nothing. activation_key: the key that must say their activation. scoring: of
    the router; of sigmoids `routed_scaling_factor` is read, and `n_group` and `topk_group` if has_groups. score_bias:
    the key of whether there is a bias of scores, None where the family says it. latent: the key of the channels that
    experts compute on, null for those of the model; bias: of whether the shared expert, and the projections to and from
    latents, have biases; None where a family has none.
    """

    num_experts: int
    top_k: int
    normalises: bool | None = None
    inner: int | None = 512
    shared: int | None = 512
    count_keys: tuple[str, ...] = ("num_experts",)
    inner_key: str = "moe_intermediate_size"
    shared_key: str | None = "shared_expert_intermediate_size"
    has_shared_gate: bool = True
    activation: Activation = Activation.SILU
    activation_key: str = "hidden_act"
    scoring: str = SOFTMAX
    has_groups: bool = True
    top_keys: tuple[str, ...] = ("num_experts_per_tok",)
    group_keys: tuple[str, ...] = ("n_group",)
    normalises_keys: tuple[str, ...] = ("norm_topk_prob",)
    shared_keys: tuple[str, ...] = ()
    scale: float = 1.0
    limit: str | None = None
    score_bias: str | None = None
    latent: str | None = None
    bias: str | None = None

    def read(self, config: ConfigReader) -> ExpertsShape:
        """Read their sizes. Raises ModelError naming the key."""
        config.require(self.activation_key, self.activation, default=self.activation)
        num_experts = config.integer(config.spelling(*self.count_keys), 1, MAX_EXPERTS, default=self.num_experts)
        groups = top_groups = 1
        group_key, top_key = config.spelling(*self.group_keys), config.spelling(*self.top_keys)
        scale = 1.0
        if self.scoring == SIGMOID:
            if self.has_groups:
                groups = config.integer(group_key, 1, num_experts, default=1)
                top_groups = config.integer("topk_group", 1, groups, default=1)
            scale = config.positive("routed_scaling_factor", default=self.scale)
        size = num_experts // groups
        if num_experts % groups or (groups > 1 and size < 2):
            raise config.fail(group_key, f"a divisor of {num_experts} experts, with at least 2 in a group")
        shape = ExpertsShape(
            num_experts=num_experts,
            top_k=config.integer(top_key, 1, min(top_groups * size, MAX_TOP_K), default=self.top_k),
            intermediate_size=config.integer(self.inner_key, 1, MAX_SIZE, default=self.inner),
            shared_size=self._shared_size(config),
            normalises=self._normalises(config),
            has_shared_gate=self.has_shared_gate and self.shared_key is not None,
            activation=self.activation,
            scoring=self.scoring,
            num_groups=groups,
            top_groups=top_groups,
            weight_scale=scale,
            has_score_bias=self.score_bias is None or config.flag(self.score_bias, default=True),
            latent_size=self._latent_size(config),
            limit=read_limit(config, self.limit),
            has_shared_bias=self.bias is not None and config.flag(self.bias, default=False),
        )
        if self.shared_key is not None and shape.num_shared > MAX_TOP_K:
            expected = f"at most {MAX_TOP_K} times {self.inner_key} ({shape.intermediate_size})"
            raise config.fail(self.shared_key, expected)
        return shape

    def _normalises(self, config: ConfigReader) -> bool:
        """Whether a token's weights are divided by their sum."""
        if self.normalises is not None:
            return self.normalises
        return config.flag(config.spelling(*self.normalises_keys), default=True)

    def _latent_size(self, config: ConfigReader) -> int | None:
        """Channels that experts compute on, None for those of the model."""
        if self.latent is None or config.get(self.latent) is None:
            return None
        return config.integer(self.latent, 1, MAX_SIZE)

    def _shared_size(self, config: ConfigReader) -> int:
        """The size of the shared expert, 0 where there is none."""
        if self.shared_keys:
            inner = config.integer(self.inner_key, 1, MAX_SIZE, default=self.inner)
            return inner * config.integer(config.spelling(*self.shared_keys), 1, MAX_TOP_K, default=1)
        return 0 if self.shared_key is None else config.integer(self.shared_key, 1, MAX_SIZE, default=self.shared)


def read_limit(config: ConfigReader, key: str | None) -> float:
    """The limit of gates and what they multiply that a key says, 0 where there is none."""
    return 0.0 if key is None else config.positive(key, default=USUAL_LIMIT)


def adjusted_size(config: ConfigReader) -> int:
    """The size of the dense MLPs of LFM2, as Lfm2MLP of transformers computes it.

    `block_ff_dim`, or `intermediate_size`; where it is adjusted two thirds of it, times `block_ffn_dim_multiplier`, up
    to a multiple of `block_multiple_of`. Raises ModelError naming the key.
    """
    key = config.spelling("block_ff_dim", "intermediate_size")
    inner = config.integer(key, 1, MAX_SIZE, default=12288)
    if not config.flag("block_auto_adjust_ff_dim", default=True):
        return inner
    inner = int(2 * inner / 3)
    if not (config.says("block_ffn_dim_multiplier") and config.get("block_ffn_dim_multiplier") is None):
        inner = int(config.positive("block_ffn_dim_multiplier", default=1.0) * inner)
        multiple = config.integer("block_multiple_of", 1, MAX_SIZE, default=256)
        inner = -(-inner // multiple) * multiple
    if not 1 <= inner <= MAX_SIZE:
        raise config.fail(key, f"MLPs of 1..{MAX_SIZE} channels once adjusted (block_auto_adjust_ff_dim), not {inner}")
    return inner
