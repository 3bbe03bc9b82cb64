"""The reward service as a process of its own, for tests and benchmarks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tomli_w

from tests.conftest import free_ports

START_S = 60.0


def slow_sums(number: int) -> tuple[str, str]:
    """An answer and a label that are equal, which sympy needs longer than any deadline here to tell.

    Both pass every filter of the rule. Each test takes a number of its own: the service remembers what ran into its
    deadline.
    """
    answer = "+".join(f"1/(x+{n})" for n in range(1, 60))
    label = "+".join(f"{n}/({n}*x+{n * n})" for n in range(1, 60))
    return f"{answer}+{number}", f"{label}+{number}"


@contextmanager
def running(folder: Path, **reward: object) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A service process and its address; `reward` is the run spec's section."""
    grpc_port, http_port = free_ports(2)
    spec = {
        "run_id": "rewards",
        "model": {"hf_checkpoint": "model"},
        "data": {"prompt_data": "prompts.jsonl", "max_prompt_tokens": 16},
        "rollout": {"num_rollout": 1, "rollout_batch_size": 1, "n_samples_per_prompt": 2, "max_response_tokens": 16},
        "reward": reward,
        "services": {"reward": {"grpc_port": grpc_port, "http_port": http_port}},
    }
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text("{}")
    (folder / "prompts.jsonl").write_text("")
    (folder / "run.toml").write_text(tomli_w.dumps(spec))
    command = [sys.executable, "-m", "services.reward", "--run", str(folder / "run.toml")]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        yield process, f"127.0.0.1:{grpc_port}"
    finally:
        process.kill()
        process.wait()
