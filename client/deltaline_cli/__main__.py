"""Where the command `deltaline` begins. A probe's command, `health`, does not wait for the imports of the others."""

from __future__ import annotations

import os
import sys

# What a shell says of a command that SIGPIPE ended.
_NO_READER = 141


def main() -> int:
    """Run the command; return its exit code, 1 where its output can't be written."""
    try:
        try:
            return _run()
        finally:
            sys.stdout.flush()  # or the interpreter does it, and prints a traceback where nobody reads any more
    except BrokenPipeError:
        _drop_output()
        return _NO_READER
    except OSError as error:  # a full disk, for example
        _drop_output()
        print(f"deltaline: error: {error}", file=sys.stderr)
        return 1


def _drop_output() -> None:
    """What could not be written is not tried once more when the interpreter ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run() -> int:
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what it says of a failed handshake comes with the error, too
    if sys.argv[1:2] == ["health"]:
        from deltaline_cli import health

        return health.main(sys.argv[2:])
    from deltaline_cli import main

    return main.main()


if __name__ == "__main__":
    sys.exit(main())
