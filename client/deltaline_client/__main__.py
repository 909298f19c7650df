"""The command `deltaline`. Knows nothing but where it begins."""

from __future__ import annotations

import sys

from deltaline_client._cli import main

if __name__ == "__main__":
    sys.exit(main())
