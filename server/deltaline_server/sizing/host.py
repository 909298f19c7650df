"""Whether this host's memory holds a server that computes on its CPU: the kernel ends a process that takes more."""

from __future__ import annotations

from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.config import Config
from deltaline_server.memory.host import host_bytes
from deltaline_server.runtime import model_options
from deltaline_server.sizing.sizes import size


def on_host(config: Config) -> int | None:
    """The bytes of this host's memory where a server with these options computes in it, else None.

    Raises ModelError.
    """
    return host_bytes() if model_options(config).device.type == "cpu" else None


def check_host(config: Config) -> None:
    """Raise ModelError where weights, state and adapter slots, all allocated at start, are more than the host's memory.

    Allocates nothing; raises ModelError as `size` does.
    """
    limit_bytes = on_host(config)
    if limit_bytes is None:
        return
    sizes = size(config, None)
    if sizes.fits and sizes.total_bytes > limit_bytes:
        state_bytes = sizes.state.total_bytes
        others = f"{sizes.weight_bytes} of weights and {sizes.adapter_bytes} of adapter slots"
        if sizes.total_bytes - state_bytes > limit_bytes:
            named = "--layers, --adapter-slots"
        else:
            named = "--max-sequences, --snapshot-lines, --state-bytes"
        raise ModelError(
            f"{named}: expected at most {limit_bytes} bytes, the memory of this host, got {sizes.total_bytes}: "
            f"{state_bytes} of state, {others}"
        )
