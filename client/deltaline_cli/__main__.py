"""Where the command `deltaline` begins. A probe's command, `health`, does not wait for the imports of the others."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command; return its exit code."""
    if sys.argv[1:2] == ["health"]:
        from deltaline_cli import health

        return health.main(sys.argv[2:])
    from deltaline_cli import main

    return main.main()


if __name__ == "__main__":
    sys.exit(main())
