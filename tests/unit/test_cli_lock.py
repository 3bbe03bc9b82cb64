"""The lock of a run and `flotilla down`, between real processes."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

import pytest

from services.cli.lock import lock_holder, stop_supervisor, supervisor_lock
from services.common.lock import LockHeld

HOLDER = """
import signal, sys
from pathlib import Path
from services.cli.lock import supervisor_lock
with supervisor_lock(Path(sys.argv[1])):
    if sys.argv[2] == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("held", flush=True)
    signal.pause()
    signal.pause()
"""


@pytest.fixture
def holder(tmp_path, request):
    mode = getattr(request, "param", "willing")
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path), mode], stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait(10)
    process.stdout.close()


def test_a_second_supervisor_is_refused(tmp_path, holder):
    said = f"{tmp_path} is in use by process {holder.pid} on {socket.gethostname()}; end it with `flotilla down`"
    with pytest.raises(LockHeld, match=said), supervisor_lock(tmp_path):
        pass


def test_the_holder_is_known_while_it_holds(tmp_path, holder):
    assert lock_holder(tmp_path) == holder.pid
    holder.kill()
    holder.wait(10)
    assert lock_holder(tmp_path) is None


def test_the_lock_of_a_killed_supervisor_is_free(tmp_path, holder):
    holder.kill()
    holder.wait(10)
    with supervisor_lock(tmp_path):
        pass


def test_down_ends_the_holder(tmp_path, holder):
    assert stop_supervisor(tmp_path, deadline_s=10)
    assert holder.wait(10) == -signal.SIGTERM


@pytest.mark.parametrize("holder", ["stubborn"], indirect=True)
def test_down_gives_up_at_its_deadline(tmp_path, holder):
    assert not stop_supervisor(tmp_path, deadline_s=0.3)
    assert holder.poll() is None


def test_down_without_a_supervisor(tmp_path):
    with pytest.raises(ProcessLookupError, match="nothing runs in"):
        stop_supervisor(tmp_path, deadline_s=1)


def test_down_does_not_signal_a_process_that_only_has_the_number(tmp_path):
    bystander = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    try:
        (tmp_path / "supervisor.lock").write_text(f"{bystander.pid}\n")
        with pytest.raises(ProcessLookupError):
            stop_supervisor(tmp_path, deadline_s=1)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait(10)
