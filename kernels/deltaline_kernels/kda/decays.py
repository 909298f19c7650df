"""The log decays of KDA alone, for who keeps them: checked arguments, by device."""

from torch import Tensor

from deltaline_kernels.kda.reference import log_decays


def find_decays(g: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None, out: Tensor) -> None:
    """Write the log decays of g `[T, HV*K]`, a row stride is fine, to out `[T, HV*K]`, rounded to its dtype.

    Args:
        A_log: `[HV]`, dt_bias: `[HV*K]`, contiguous. lower_bound: at most 0, None for none.
    """
    if g.device.type == "cpu":
        heads = g.unflatten(1, (A_log.shape[0], -1))
        out.copy_(log_decays(heads.float(), A_log.float(), dt_bias.float(), lower_bound).flatten(1))
        return
    # Imported here: only this path needs triton, which is installed on Linux alone.
    from deltaline_kernels.kda.decay_kernel import find_decays_triton

    find_decays_triton(g, A_log, dt_bias, lower_bound, out)
