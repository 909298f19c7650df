"""Decays of recurrent states on the CPU: what is left of a state, and of tokens added to it, after other tokens."""

import torch.nn.functional as F
from torch import Tensor

# Decays below exp(-69), about 1e-30, count as zero: what they would leave behind are slow denormal numbers.
LOG_TINY, TINY = -69.1, 1e-30


def exp_(decay: Tensor) -> Tensor:
    """Replace log decays by decays, in place."""
    return F.threshold(decay.clamp_min_(LOG_TINY).exp_(), TINY, 0.0, inplace=True)


def decay_between(g: Tensor) -> Tensor:
    """Return exp(g_{j+1} + .. + g_i) at [x, i, j] for log decays g `[X, C]`; above the diagonal it is 1.

    The sums are added up one by one: differences of prefix sums would cancel.
    """
    return exp_(g[:, :, None].expand(-1, -1, g.shape[1]).tril(-1).cumsum_(1))
