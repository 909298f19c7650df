"""How rank 0's process ends when another rank is gone, whatever it waits for."""

from __future__ import annotations

import os
import subprocess
import sys
import time

# The time that is told is 3.5 s; a busy host has more to do.
MOST_S = 20.0
# As an event loop that waits for ever, and a thread that no process outlives, wait.
WAITS = """
import threading
import time
from deltaline_server import computing
threading.Thread(target=time.sleep, args=(60,)).start()
computing._end_in_time()
print("begins", flush=True)
time.sleep(60)
"""


def test_a_process_that_waits_for_a_rank_that_is_gone_ends_by_itself() -> None:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", WAITS], env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "begins\n"
        begin_s = time.monotonic()
        try:
            assert process.wait(MOST_S) == 1
        finally:
            process.kill()
    assert time.monotonic() - begin_s > 2.5  # callers have been told by then
