"""The command `deltaline-server`: options in, exit code out."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from deltaline_server import log
from deltaline_server.app import Server, StartError
from deltaline_server.config import Config, ConfigError
from deltaline_server.model import check_model
from deltaline_server.model_config import ModelError
from deltaline_server.runtime import model_options


def main() -> int:
    """Run the server until a signal or the loss of its device; 0 after a drain, 1 for anything else."""
    try:
        config = Config.parse(sys.argv[1:], os.environ)
        log.configure(config.log_level, config.log_format)
        if config.check:
            check_model(model_options(config))
            print("deltaline-server: the options and the model's files are sound")
            return 0
        return asyncio.run(serve(config))
    except (ConfigError, ModelError, StartError) as error:
        print(f"deltaline-server: error: {error}", file=sys.stderr)
        return 1


async def serve(config: Config) -> int:
    """Serve until the end of a drain; return the exit code. While it loads, signals end the process at once."""
    for number in (signal.SIGTERM, signal.SIGINT):
        # Not the default action: a container's first process does not have one.
        signal.signal(number, lambda number, frame: os._exit(128 + number))
    async with Server(config) as server:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.interrupt)
        return await server.wait()


if __name__ == "__main__":
    sys.exit(main())
