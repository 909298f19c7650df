"""Sizes and constants of mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from deltaline_server.checkpoints.activation import Activation
from deltaline_server.checkpoints.config_reader import ModelError

# How experts are scored by their logits.
SOFTMAX, SIGMOID = "softmax", "sigmoid"


@dataclass(frozen=True)
class ExpertsShape:
    """Sizes of a mixture of experts, of the whole layer or of one rank's share.

    A token has `top_k` of `num_experts`, those of the largest score, and one more that all tokens have, behind a gate
    if has_shared_gate. intermediate_size: of each expert; shared_size: of that one, 0 where there is none. normalises:
    whether the weights of a token's experts are divided by their sum. scoring: a softmax over the logits, or the
    sigmoid of each, to which a bias is added where experts are chosen, if the family has one and has_score_bias.
    num_groups: of experts; a token's are in the top_groups best. weight_scale: of the weights of those that are chosen.
    latent_size: channels that experts compute on, between two projections, None for those of the model.
    limit: of gates and what they multiply, 0 for none. has_shared_bias: whether these projections have biases, and the
    expert that all tokens have; others have none.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    shared_size: int
    normalises: bool
    has_shared_gate: bool = True
    activation: Activation = Activation.SILU
    scoring: str = SOFTMAX
    num_groups: int = 1
    top_groups: int = 1
    weight_scale: float = 1.0
    has_score_bias: bool = True
    latent_size: int | None = None
    has_shared_bias: bool = False
    limit: float = 0.0

    @property
    def is_shared_apart(self) -> bool:
        """Whether the shared expert is computed as an MLP, since it takes or adds what the others don't."""
        return self.shared_size > 0 and (self.latent_size is not None or self.has_shared_bias)

    @property
    def num_shared(self) -> int:
        """How many experts of intermediate_size the shared one is, whose inner channels are independent of each other;
        0 where there is none, or it is apart."""
        return 0 if self.is_shared_apart else -(-self.shared_size // self.intermediate_size)

    def shard(self, world_size: int) -> Self:
        """Return one rank's share of each expert's inner channels. Raises ModelError if that can't be done."""
        inner, shared = self.intermediate_size, self.shared_size
        if inner % world_size or shared % world_size:
            expected = f"a divisor of {inner} channels of an expert and {shared} of the shared one"
            raise ModelError(f"--tensor-parallel: expected {expected}, got {world_size}")
        return replace(self, intermediate_size=inner // world_size, shared_size=shared // world_size)
