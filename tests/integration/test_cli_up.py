"""`flotilla up`, `status`, `down` and `report` on a tiny model: real Redis, vLLM and Megatron-core, nothing faked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import free_ports

pytestmark = [pytest.mark.stack, pytest.mark.timeout(400)]
FLOTILLA = (sys.executable, "-m", "services.cli.main")
SERVICES = ("buffer", "reward", "rollout_gateway", "trainer", "weight_sync")


def flotilla(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*FLOTILLA, *words], capture_output=True, text=True, timeout=120)


def until(condition: Callable[[], bool], deadline_s: float, what: str) -> None:
    give_up = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < give_up, f"{what} did not happen within {deadline_s} s"
        time.sleep(0.1)


def processes_of(run_dir: Path) -> list[str]:
    """Command lines of the processes that name the run's spec."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if str(run_dir / "run.toml") in command:
            found.append(command)
    return found


class Up:
    """One `flotilla up --plain`, with its output in a file."""

    def __init__(self, run: Path, out: Path) -> None:
        self._out = out
        with out.open("w") as file:
            command = [*FLOTILLA, "up", str(run), "--plain"]
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)

    def said(self, words: str) -> bool:
        assert self.process.poll() is None or words in self._out.read_text(), self._out.read_text()
        return words in self._out.read_text()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3: Path) -> Path:
    """A run of two steps with two ranks of the trainer, on ports of its own."""
    folder = tmp_path_factory.mktemp("up")
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(4) for b in range(4)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    ports = iter(free_ports(20))
    lists = ("trainer_ranks", "weight_agents", "weight_agents", "engines")
    tables = [f"[services.{name}]" for name in SERVICES] + [f"[[services.{name}]]" for name in lists]
    endpoints = "".join(f"{table}\ngrpc_port = {next(ports)}\nhttp_port = {next(ports)}\n" for table in tables)
    path = folder / "tiny.toml"
    path.write_text(f"""
run_id = "tiny"
run_dir = "{folder}/run"
model.hf_checkpoint = "{tiny_qwen3}"
data = {{prompt_data = "prompts.jsonl", max_prompt_tokens = 64}}
rollout = {{num_rollout = 2, rollout_batch_size = 2, n_samples_per_prompt = 2, max_response_tokens = 12}}
trainer = {{dtype = "float32", num_threads = 1}}
parallel.tensor = 2
services.trainer_meeting_port = {next(ports)}
engine = {{dtype = "float32", max_model_len = 128, kv_cache_gib = 0.25}}
redis = {{port = {next(ports)}, maxmemory_mb = 128}}
[evaluation]
interval = 2
max_response_tokens = 12
sets.held_out.prompt_data = "held_out.jsonl"
{endpoints}""")
    return path


def test_life_of_a_run(run: Path):
    run_dir = run.parent / "run"
    silent = flotilla("status", str(run))
    assert silent.returncode == 1 and "nothing of run tiny answers" in silent.stderr

    first = Up(run, run.parent / "first.txt")
    try:
        until(lambda: first.said("reward is ready"), 60, "the reward service's start")
        shown = flotilla("status", str(run))
        assert shown.returncode == 0 and "run tiny" in shown.stdout and "rollout_gateway" in shown.stdout
        refused = flotilla("up", str(run))
        assert refused.returncode == 2 and f"by process {first.process.pid}" in refused.stderr
        record = json.loads((run_dir / "supervisor.json").read_text())
        os.kill(record["processes"]["reward"]["pid"], signal.SIGKILL)
        until(lambda: first.said("reward ended by signal 9; starting it again"), 20, "the notice of the kill")
        ended = flotilla("down", str(run))
        assert ended.returncode == 0 and "run tiny is down" in ended.stdout
        assert first.process.wait(10) == 0
    finally:
        first.process.kill()
        first.process.wait(10)
    assert processes_of(run_dir) == []
    record = json.loads((run_dir / "supervisor.json").read_text())
    assert record["outcome"] == "stopped" and record["restarts"]["reward"] >= 1

    second = Up(run, run.parent / "second.txt")
    try:
        until(lambda: second.said("trainer is ready") and second.said("trainer-1 is ready"), 60, "the trainer's start")
        record = json.loads((run_dir / "supervisor.json").read_text())
        os.kill(record["processes"]["trainer-1"]["pid"], signal.SIGKILL)
        assert second.process.wait(200) == 0, (run.parent / "second.txt").read_text()
    finally:
        second.process.kill()
        second.process.wait(10)
    assert "the run is complete" in (run.parent / "second.txt").read_text()
    assert "step 2/2  reward" in (run.parent / "second.txt").read_text()
    assert processes_of(run_dir) == []
    record = json.loads((run_dir / "supervisor.json").read_text())
    assert record["restarts"]["trainer"] == record["restarts"]["trainer-1"] >= 1, "they live and die together"
    assert record["outcome"] == "complete" and record["peak_memory_bytes"] > 1 << 28

    written = flotilla("report", str(run))
    assert written.returncode == 0 and "weight transfers with equal digests" in written.stdout
    report = json.loads((run_dir / "report" / "report.json").read_text())
    assert report["steps"] == 2
    assert report["weight_sync"]["digests_equal"] == report["weight_sync"]["transfers"] >= 2
    assert report["evaluations"]["held_out"]["before"]["step"] == 0
    assert report["evaluations"]["held_out"]["after"]["step"] == 2
