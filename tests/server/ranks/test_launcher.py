"""Starting and ending processes together, whatever they are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rigs.server_process import is_alive

from deltaline_server.ranks.launcher import launch

# What every process of a group does: says who it is in a file, then what is asked, by its rank.
SAYS = "import os, signal, socket, sys, time; r = int(os.environ['RANK']); p = sys.argv[1] + '/' + str(r)\n"
WROTE = "open(p + '.new', 'w').write(str(os.getpid())); os.rename(p + '.new', p)\n"
WAITS_S = 20.0


def started(folder: Path, *does: str, waits: str = "pass") -> subprocess.Popen[str]:
    """A launcher in a process of its own, and its processes, which have begun. waits: sets its times otherwise."""
    code = SAYS + "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n" + WROTE
    # Who ends does so once all have begun: a slower one would be killed before.
    code += f"while not all(os.path.exists(sys.argv[1] + f'/{{n}}') for n in range({len(does)})): time.sleep(0.01)\n"
    code += "".join(f"if r == {rank}: {what}\n" for rank, what in enumerate(does))
    launcher = (
        f"import os, sys; from deltaline_server.ranks import launcher; {waits}; "
        f"sys.exit(launcher.launch({len(does)}, [sys.executable, '-c', {code!r}, sys.argv[1]], os.environ))"
    )
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", launcher, str(folder)], env=environ, text=True)
    wait_for(lambda: all((folder / str(rank)).exists() for rank in range(len(does))))
    return process


def wait_for(condition: object) -> None:
    end_s = time.monotonic() + WAITS_S
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end_s
        time.sleep(0.01)


def pids(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in sorted(folder.iterdir())]


def test_when_a_rank_is_killed_rank_0_has_time_and_the_others_are_killed(tmp_path: Path) -> None:
    told = tmp_path.with_suffix(".told")
    tells = f"time.sleep(2.5); open({str(told)!r}, 'w'); sys.exit(3)"
    with started(tmp_path, tells, "time.sleep(60)", "time.sleep(60)", waits="launcher.FAILED_S = 15.0") as launcher:
        _, one, _ = pids(tmp_path)
        os.kill(one, signal.SIGKILL)
        assert launcher.wait(WAITS_S) == 128 + signal.SIGKILL
        assert told.exists()
    assert not any(map(is_alive, pids(tmp_path)))


def test_when_a_rank_is_killed_a_rank_0_that_hangs_is_killed_sooner_than_for_a_clean_end(tmp_path: Path) -> None:
    with started(tmp_path, *["time.sleep(60)"] * 3, waits="launcher.END_S = 60.0") as launcher:
        _, one, _ = pids(tmp_path)
        os.kill(one, signal.SIGKILL)
        assert launcher.wait(WAITS_S) == 128 + signal.SIGKILL
    assert not any(map(is_alive, pids(tmp_path)))


def test_signals_are_rank_0_s_and_its_code_is_the_launcher_s(tmp_path: Path) -> None:
    with started(tmp_path, "time.sleep(60)", "time.sleep(60)") as launcher:
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(WAITS_S) == 7
    assert not any(map(is_alive, pids(tmp_path)))


def test_the_code_is_rank_0_s_also_where_another_ends_before_it(tmp_path: Path) -> None:
    """As it does when rank 0 has lost its GPU, and lets the others end."""
    with started(tmp_path, "time.sleep(0.5); sys.exit(3)", "sys.exit(0)") as launcher:
        assert launcher.wait(WAITS_S) == 3
    assert not any(map(is_alive, pids(tmp_path)))


def test_a_launcher_that_inherits_what_has_ended_sleeps_on(tmp_path: Path) -> None:
    """As the first process of a container does, whose child everybody becomes that has no parent any more."""
    orphan = "(sleep 0.2 &) ; sleep 1.5"
    code = (
        "import ctypes, os, sys, time; ctypes.CDLL(None).prctl(36, 1)\n"  # PR_SET_CHILD_SUBREAPER
        "from deltaline_server.ranks.launcher import launch\n"
        f"assert launch(1, ['sh', '-c', {orphan!r}], os.environ) == 0\n"
        "try: os.waitpid(-1, os.WNOHANG)\n"
        "except ChildProcessError: print(time.process_time())"
    )
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE, text=True, check=True)
    assert float(done.stdout) < 1.0


def test_rank_0_gets_a_socket_that_listens_on_loopback_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # those of this process stay
    code = (
        "import os, socket, time; e = os.environ; fd = e.get('STORE_FD')\n"
        "at = socket.socket(fileno=int(fd)).getsockname() if fd else None\n"
        "is_there = at == (e['MASTER_ADDR'], int(e['MASTER_PORT']))\n"
        "print(e['RANK'], e['LOCAL_RANK'], e['WORLD_SIZE'], is_there, at and at[0], flush=True)\n"
        "os.mkdir(e['RANK'])\n"
        "while not (os.path.exists('0') and os.path.exists('1')): time.sleep(0.01)"  # or the slower one is killed
    )
    monkeypatch.chdir(tmp_path)
    assert launch(2, [sys.executable, "-c", code], os.environ) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["0 0 2 True 127.0.0.1", "1 1 2 False None"]
