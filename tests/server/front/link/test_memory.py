"""Link memory of a connection: how much of it there is, and what its client hears where it can't be had."""

from __future__ import annotations

import os
import resource
import select
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from rigs.raw_link import RawLink
from rigs.until import until

from deltaline import link
from deltaline.v1 import admin_service_pb2 as admin
from deltaline_server.app import Server
from deltaline_server.front.link.memory import MAX_REGIONS

ADMIN = "/deltaline.v1.AdminService/"
PAGE = 4096


async def ask(raw: RawLink, number: int) -> None:
    await raw.send(link.pack(link.MEMORY, number) + link.Place(0, 0, PAGE).packed())


async def answers(raw: RawLink, count: int) -> tuple[list[int], list[str]]:
    """The regions that so many requests got, and what the others heard."""
    regions, words = list[int](), list[str]()
    for _ in range(count):
        packet = await raw.receive()
        assert packet is not None
        if packet.kind == link.MEMORY:
            regions.append(packet.place.region)
            os.close(packet.fds[0])
        else:
            words.append(packet.status.message)
    return regions, words


async def test_a_connection_has_few_regions_however_fast_it_asks(raw: RawLink, server: Server) -> None:
    refused = "this connection has 8 regions, which is the most"
    for number in range(1, MAX_REGIONS + 5):
        await ask(raw, number)
    regions, words = await answers(raw, MAX_REGIONS + 4)
    assert (len(regions), words) == (MAX_REGIONS, [refused] * 4)
    assert server.runtime.link_regions.used_bytes == MAX_REGIONS * PAGE
    await ask(raw, 100)
    assert await answers(raw, 1) == ([], [refused])
    release = admin.ReleaseSharedMemoryRequest(region=regions[0]).SerializeToString()
    await raw.begin(ADMIN + "ReleaseSharedMemory", release)
    assert (await raw.receive()) is not None
    for number in (101, 102):
        await ask(raw, number)
    regions, words = await answers(raw, 2)
    assert (len(regions), words) == (1, [refused])


async def test_what_was_refused_takes_no_region(raw: RawLink) -> None:
    for number in range(1, 3 * MAX_REGIONS):
        await raw.send(link.pack(link.MEMORY, number) + link.Place(0, 0, 1 << 60).packed())
    _, words = await answers(raw, 3 * MAX_REGIONS - 1)
    assert any("do not fit" in word for word in words)
    await ask(raw, 100)
    assert len((await answers(raw, 1))[0]) == 1


@contextmanager
def spare_files(count: int) -> Iterator[None]:
    """This process has so many file descriptors to spare."""
    limits, held = resource.getrlimit(resource.RLIMIT_NOFILE), list[int]()
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, limits[1]))
    try:
        while True:
            try:
                held.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                break
        for _ in range(count):
            os.close(held.pop())
        yield
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("count", range(4))
async def test_without_a_file_descriptor_it_is_refused_at_once(raw: RawLink, server: Server, count: int) -> None:
    poll = select.poll()
    poll.register(raw.socket, select.POLLIN)
    assert await raw.call(ADMIN + "GetServerInfo")  # a thread waits for it, and is there already
    with spare_files(count):
        await ask(raw, 10)
        await until(lambda: poll.poll(0))
    regions, words = await answers(raw, 1)  # the descriptor is made where it is read
    assert (len(regions), words) == ((1, []) if count >= 2 else (0, ["the host has no such memory to give"]))
    assert server.runtime.link_regions.used_bytes == len(regions) * PAGE
    await ask(raw, 11)
    assert len((await answers(raw, 1))[0]) == 1
