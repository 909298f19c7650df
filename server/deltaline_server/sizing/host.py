"""Whether this host's memory holds a server that computes on its CPU: the kernel ends a process that takes more."""

from __future__ import annotations

from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.computing import device_of, device_type
from deltaline_server.config import Config
from deltaline_server.memory.host import host_bytes
from deltaline_server.ranks.place import Place
from deltaline_server.sizing.sizes import Sizes, size


def on_host(config: Config) -> int | None:
    """The bytes of this host's memory where a server with these options computes in it, else None."""
    return host_bytes() if device_type(config) == "cpu" else None


def ranks_on_host(sizes: Sizes, place: Place | None = None) -> int:
    """Processes of this host that take what is sized each. place: this one's among them; None: all are here."""
    return sizes.plan.layout.placement.world_size if place is None else place.local_size


def check_host(config: Config, place: Place | None = None) -> None:
    """Raise ModelError where what is allocated at start is more than the host's memory: stored states', and of a server
    that computes on its CPU weights, state and adapter slots, of all its ranks on this host.

    place: rank 0's, None where there are no ranks or none has been started. Allocates nothing; raises ModelError as
    `size` and `device_of` do.
    """
    limit_bytes, stored_bytes = host_bytes(), config.host_state_bytes
    if limit_bytes is None:
        return
    if stored_bytes > limit_bytes:
        message = f"expected at most {limit_bytes} bytes, the memory of this host, got {stored_bytes}"
        raise ModelError(f"--host-state-bytes: {message}")
    if device_of(config, place).type != "cpu":
        return
    sizes = size(config, None, place)
    ranks = ranks_on_host(sizes, place)
    computing_bytes, state_bytes = ranks * sizes.total_bytes, ranks * sizes.state.total_bytes
    taken_bytes = computing_bytes + stored_bytes
    if sizes.fits and taken_bytes > limit_bytes:
        others = f"{ranks * sizes.weight_bytes} of weights and {ranks * sizes.adapter_bytes} of adapter slots"
        if stored_bytes:
            others = f"{others}, {stored_bytes} for stored states"
        if computing_bytes - state_bytes > limit_bytes:
            named = "--layers, --adapter-slots"
        elif computing_bytes > limit_bytes:
            named = "--max-sequences, --snapshot-lines, --state-bytes"
        else:
            named = "--host-state-bytes"
        raise ModelError(
            f"{named}: expected at most {limit_bytes} bytes, the memory of this host, got {taken_bytes}: "
            f"{state_bytes} of state, {others}"
        )
