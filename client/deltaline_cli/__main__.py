"""The command `deltaline`. Knows nothing but where it begins: a probe's command is not to wait for what others need."""

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
