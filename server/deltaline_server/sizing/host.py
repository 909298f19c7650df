"""Whether this host's memory holds a server that computes on its CPU: the kernel ends a process that takes more."""

from __future__ import annotations

from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.computing import model_options
from deltaline_server.config import Config
from deltaline_server.memory.host import host_bytes
from deltaline_server.sizing.sizes import size


def on_host(config: Config) -> int | None:
    """The bytes of this host's memory where a server with these options computes in it, else None.

    Raises ModelError.
    """
    return host_bytes() if model_options(config).device.type == "cpu" else None


def check_host(config: Config) -> None:
    """Raise ModelError where what is allocated at start is more than the host's memory: stored states', and of a server
    that computes on its CPU weights, state and adapter slots.

    Allocates nothing; raises ModelError as `size` does.
    """
    limit_bytes, stored_bytes = host_bytes(), config.host_state_bytes
    if limit_bytes is None:
        return
    if stored_bytes > limit_bytes:
        message = f"expected at most {limit_bytes} bytes, the memory of this host, got {stored_bytes}"
        raise ModelError(f"--host-state-bytes: {message}")
    if on_host(config) is None:
        return
    sizes = size(config, None)
    taken_bytes = sizes.total_bytes + stored_bytes
    if sizes.fits and taken_bytes > limit_bytes:
        state_bytes = sizes.state.total_bytes
        others = f"{sizes.weight_bytes} of weights and {sizes.adapter_bytes} of adapter slots"
        if stored_bytes:
            others = f"{others}, {stored_bytes} for stored states"
        if sizes.total_bytes - state_bytes > limit_bytes:
            named = "--layers, --adapter-slots"
        elif sizes.total_bytes > limit_bytes:
            named = "--max-sequences, --snapshot-lines, --state-bytes"
        else:
            named = "--host-state-bytes"
        raise ModelError(
            f"{named}: expected at most {limit_bytes} bytes, the memory of this host, got {taken_bytes}: "
            f"{state_bytes} of state, {others}"
        )
