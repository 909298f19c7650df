"""Kernels of recurrent layers: each has an fp32 reference, a Triton kernel and a CPU path.

Knows tensors, rows and lines. Does not know models, sequences or the service.
"""

from deltaline_kernels.checks import MAX_CONV_WIDTH, MAX_HEAD_DIM, MIN_CONV_WIDTH
from deltaline_kernels.conv1d import causal_conv1d, causal_conv1d_reference
from deltaline_kernels.gated_delta import gated_delta, gated_delta_reference
from deltaline_kernels.norm import gated_rms_norm, gated_rms_norm_reference
from deltaline_kernels.rows import Rows
from deltaline_kernels.selftest import Check, run_selftest

__all__ = [
    "MAX_CONV_WIDTH",
    "MAX_HEAD_DIM",
    "MIN_CONV_WIDTH",
    "Check",
    "Rows",
    "causal_conv1d",
    "causal_conv1d_reference",
    "gated_delta",
    "gated_delta_reference",
    "gated_rms_norm",
    "gated_rms_norm_reference",
    "run_selftest",
]
