"""How many connections a process may take, so that descriptors are left for all else."""

from __future__ import annotations

import os
import resource
from contextlib import suppress

# Connections of a process's gRPC ports, where there are descriptors for more.
MAX_CONNECTIONS = 1024
# Fewer are no service.
MIN_CONNECTIONS = 16
# Kept for what is opened later: files of adapters, front ends' sockets, the log.
SPARE = 48
# The part of all that the local link and shared memory may take.
LINK_PART = 8


class DescriptorError(RuntimeError):
    """The process may open too few files; the message is for the operator."""


def connections(num_ports: int, num_reserved: int) -> int:
    """Raise the limit of open files as far as it may be, and return how many connections each of the ports may have.

    num_reserved: descriptors that others will need. Raises DescriptorError.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # more than the system has
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS // num_ports
    needed = num_open() + num_reserved + SPARE + soft // LINK_PART
    each = min(soft - needed, MAX_CONNECTIONS) // num_ports
    if each < MIN_CONNECTIONS:
        least = (needed - soft // LINK_PART + MIN_CONNECTIONS * num_ports) * LINK_PART // (LINK_PART - 1) + 1
        raise DescriptorError(f"ulimit -n: expected at least {least} open files, got {soft}")
    return each


def num_open() -> int:
    """Descriptors that this process has open."""
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else SPARE
