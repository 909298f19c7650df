"""The command `deltaline-server`: options in, exit code out."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys

from deltaline_server import log
from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.config import Config, ConfigError, unknown_variables
from deltaline_server.garbage import settle
from deltaline_server.ranks.launcher import launch
from deltaline_server.ranks.parent import end_with_parent
from deltaline_server.ranks.place import Place, PlaceError

_log = logging.getLogger(__name__)


def _refuse(why: object, log_format: str) -> int:
    """Say in one line why nothing is served, as the log's other lines are asked for; return the exit code."""
    if log_format == "json":
        log.configure("error", "json")
        _log.error("%s", why)
    else:
        print(f"deltaline-server: error: {why}", file=sys.stderr)
    return 1


# What the extra "server" installs.
_EXTRA = {"grpc_health", "grpc_reflection", "prometheus_client", "re2", "safetensors", "torch", "triton"}


def main() -> int:
    """Run the server until a signal or the loss of its device; 0 after a drain, 1 for anything else."""
    for number in (signal.SIGTERM, signal.SIGINT):
        # Not the default action: a container's first process does not have one.
        signal.signal(number, _end)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what it says by itself is no event of the log, nor JSON
    try:
        config = Config.parse(sys.argv[1:], os.environ)
        place = Place.find(os.environ)
        _check_world(config, place)
    except ConfigError as error:
        return _missing(error.log_format) or _refuse(error, error.log_format)
    except PlaceError as error:
        return _refuse(error, config.log_format)
    log.configure(config.log_level, config.log_format)
    if config.tensor_parallel > 1 and place is None and not config.check:
        command = [sys.executable, "-P", "-m", "deltaline_server", *sys.argv[1:]]
        return launch(config.tensor_parallel, command, os.environ)
    if place is None:
        return _run(config, None)
    end_with_parent()
    try:
        code = _run(config, place)
    except SystemExit as error:
        code = int(error.code or 0)
    _end_now(code)
    return code


def _end_now(code: int) -> None:
    """End a rank's process: threads may wait for a rank that is gone, and a group of ranks ends with its processes."""
    sys.stderr.flush()
    os._exit(code)


def _missing(log_format: str) -> int:
    """Import what serves; 1 if a package is missing, which is said then, else 0."""
    try:  # here: torch takes seconds, in which a signal ends the process quietly
        import deltaline_server.app
        import deltaline_server.follower  # noqa: F401
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRA:
            raise
        return _refuse(f"{package} is missing: pip install 'deltaline[server]'", log_format)
    return 0


def _check_world(config: Config, place: Place | None) -> None:
    """Raise ConfigError where the options and who started the process disagree."""
    asked = config.tensor_parallel
    if place is not None and asked not in (1, place.world_size):
        raise ConfigError(f"--tensor-parallel: expected {place.world_size}, as WORLD_SIZE says, got {asked}")


def _run(config: Config, place: Place | None) -> int:
    """Serve, or compute a rank's share, or check the options; the exit code."""
    if _missing(config.log_format):
        return 1
    from deltaline_server.app import StartError
    from deltaline_server.computing import check
    from deltaline_server.follower import serve_rank
    from deltaline_server.front.trust.principals import open_principals
    from deltaline_server.ports import PortError, open_tls
    from deltaline_server.ranks.group import LostRankError
    from deltaline_server.sizing.host import check_host

    try:
        unknown = unknown_variables(os.environ)
        if unknown and (place is None or place.local_rank == 0):
            log.event(_log, "ignored unknown variables", level=logging.WARNING, names=",".join(unknown))
        if config.check:
            check(config, place)
            check_host(config, place)
            open_principals(config.principals, config.host)
            open_tls(config)
            return _say("deltaline-server: the options and the files that they name are sound", config.log_format)
        if place is not None and place.rank:
            return serve_rank(config, place)
        return asyncio.run(serve(config, place))
    except LostRankError as error:  # who has the reason says it
        _log.debug("%s", error)
        return 1
    except (ConfigError, ModelError, PortError, StartError) as error:
        # What is wrong with the options and the model is so on all ranks.
        return _refuse(error, config.log_format) if place is None or place.local_rank == 0 else 1
    except Exception:
        _log.exception("the server ended by a fault of its own")
        return 1


def _say(text: str, log_format: str) -> int:
    """Print a line; the exit code, which is 1 where it can't be written."""
    try:
        print(text, flush=True)
    except OSError as error:
        return _refuse(f"can't write to standard output ({error.strerror})", log_format)
    return 0


def _end(number: int, frame: object) -> None:
    os._exit(128 + number)


async def serve(config: Config, place: Place | None = None) -> int:
    """Serve until the end of a drain; return the exit code. While it loads, signals end the process at once.

    place: rank 0's, None where there are no ranks. Raises StartError, ConfigError, ModelError, LostRankError.
    """
    from deltaline_server.app import Server
    from deltaline_server.sizing.host import check_host

    check_host(config, place)
    server, loop = Server(config, place, loaded=settle), asyncio.get_running_loop()

    def take(number: int, frame: object) -> None:
        if not server.has_started:
            _end(number, frame)
        if not loop.is_closed():  # a signal behind the drain changes nothing
            loop.call_soon_threadsafe(server.interrupt)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, take)
    async with server:
        code = await server.wait()
    if place is not None:
        _end_now(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
