"""How the processes of a server over ranks meet, and agree on what has to be the same in all of them."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from deltaline_server.log import event
from deltaline_server.ranks.peer_memory import PeerMemory
from deltaline_server.ranks.place import Place
from deltaline_server.ranks.ways import Ranks

# Until all processes have come: on other hosts they may still be started.
MEET = timedelta(minutes=10)
# Until all have loaded: a rank that ends before is noticed by who started it.
LOAD = timedelta(hours=12)


# Of summands that the ranks read in each other's memory; what is larger is gathered.
PEER_BYTES = 96 << 20

_log = logging.getLogger(__name__)


class LostRankError(RuntimeError):
    """Another rank is gone, which says why itself."""


class GroupError(RuntimeError):
    """A rank can't serve, or differs from the others; the message is one line."""


class Group:
    """This process among its group, in which all ranks call the same methods in the same order.

    Attributes: place, and ranks, once it has been made: then all have met.
    """

    def __init__(self, place: Place, device: torch.device) -> None:
        """Wait for the others. device: what this rank computes on. Raises LostRankError when they don't come."""
        self.place = place
        is_cuda = device.type == "cuda"
        if is_cuda:
            torch.cuda.set_device(device)
        try:
            self._store = _meet(place)
            dist.init_process_group(
                "nccl" if is_cuda else "gloo",
                store=PrefixStore("group", self._store),
                rank=place.rank,
                world_size=place.world_size,
                timeout=MEET,
                device_id=device if is_cuda else None,
            )
        except RuntimeError as error:
            raise LostRankError(f"the ranks did not meet: {_first_line(error)}") from error
        assert dist.group.WORLD is not None
        self.ranks = Ranks(dist.group.WORLD, _peer_memory(dist.group.WORLD, device) if is_cuda else None)

    def agree(self, said: Mapping[str, str]) -> None:
        """Wait until all ranks have loaded. said: what has to be the same on all, by name.

        Raises GroupError, on every rank, when one has failed or another says something else; LostRankError.
        """
        self._say({"said": dict(said)})
        heard = self._hear()
        for rank, one in enumerate(heard):
            if "error" in one:
                raise GroupError(f"rank {rank}: {one['error']}")
        for rank, one in enumerate(heard):
            for name, value in heard[0]["said"].items():
                if one["said"].get(name) != value:
                    got = one["said"].get(name)
                    raise GroupError(f"rank {rank}: expected the {name} of rank 0, {value}, got {got}")

    def fail(self, why: str) -> None:
        """Say, in place of `agree`, why this rank can't serve, in one line. Raises LostRankError."""
        self._say({"error": why})

    def _say(self, what: Mapping[str, object]) -> None:
        try:
            self._store.set(f"said by {self.place.rank}", json.dumps(what))
        except RuntimeError as error:
            raise LostRankError(f"the ranks could not agree: {_first_line(error)}") from error

    def _hear(self) -> list[dict[str, dict[str, str]]]:
        keys = [f"said by {rank}" for rank in range(self.place.world_size)]
        try:
            self._store.wait(keys, LOAD)
            heard = [json.loads(self._store.get(key)) for key in keys]
            self._store.set(f"heard by {self.place.rank}", "")
            if self.place.rank == 0:  # with whose end that of the store comes
                self._store.wait([f"heard by {rank}" for rank in range(self.place.world_size)], MEET)
        except RuntimeError as error:
            raise LostRankError(f"the ranks could not agree: {_first_line(error)}") from error
        return heard


def _meet(place: Place) -> Store:
    """The store that all ranks share: the environment's, or rank 0's on the socket that it was given."""
    if place.store_fd is None:
        store: Store = next(rendezvous("env://", timeout=MEET))[0]
        return store
    return TCPStore(
        place.address,
        place.port,
        place.world_size,
        is_master=True,
        timeout=MEET,
        wait_for_workers=False,
        master_listen_fd=place.store_fd,
    )


def _peer_memory(world: dist.ProcessGroup, device: torch.device) -> PeerMemory | None:
    """What small sums are made by; None where the GPUs don't reach each other's memory."""
    try:
        return PeerMemory(world, PEER_BYTES, device)
    except RuntimeError as error:
        event(_log, "no memory shared with peers", level=logging.WARNING, why=_first_line(error))
        return None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
