"""Kill points, in processes of their own. Nothing is faked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from services.common.kill_points import VARIABLE

PASSES_TWO_POINTS = """
from services.common.kill_points import kill_point
kill_point("first")
kill_point("second")
"""


def passes(folder: Path | None) -> int:
    """Exit status of a process that comes to both points."""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    if folder:
        environment[VARIABLE] = str(folder)
    return subprocess.run([sys.executable, "-c", PASSES_TWO_POINTS], env=environment, timeout=60).returncode


def test_armed_point_kills_once(tmp_path):
    (tmp_path / "second").touch()
    (tmp_path / "third").touch()
    assert passes(tmp_path) == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == ["third"]
    assert passes(tmp_path) == 0


def test_nothing_happens_without_the_variable_or_the_folder(tmp_path):
    assert passes(None) == 0
    assert passes(tmp_path / "missing") == 0
