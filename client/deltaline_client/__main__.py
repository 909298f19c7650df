"""The command `deltaline`. Knows nothing but where it begins: a probe's command is not to wait for what others need."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command; return its exit code."""
    if sys.argv[1:2] == ["health"]:
        from deltaline_client import _cli_health

        return _cli_health.main(sys.argv[2:])
    from deltaline_client import _cli

    return _cli.main()


if __name__ == "__main__":
    sys.exit(main())
