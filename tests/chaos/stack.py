"""A whole run under `flotilla up --plain` that a test may hurt: real Redis, vLLM and Megatron-core, nothing faked.

Everything is seen from outside: process ids in /proc, states through HTTP, results in the files of the run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import free_ports
from tests.tiny_models import save_model

MODULES = {
    "buffer": "services.buffer",
    "reward": "services.reward",
    "rollout_gateway": "services.rollout_gateway",
    "weight_sync": "services.weight_sync",
    "engine-0": "services.rollout_gateway.engine",
    "weight_agent-0": "services.weight_sync.agent",
    "trainer": "services.trainer",
}
"""Every process of a run but Redis, and the module that it runs."""
PROCESSES = ("redis", *MODULES)
TABLES = {
    "buffer": "[services.buffer]",
    "reward": "[services.reward]",
    "rollout_gateway": "[services.rollout_gateway]",
    "weight_sync": "[services.weight_sync]",
    "engine-0": "[[services.engines]]",
    "weight_agent-0": "[[services.weight_agents]]",
    "trainer": "[services.trainer]",
}
LOOK_EVERY_S = 0.005
"""Short beside a training step: what is watched for must be seen while it lasts."""
HTTP_TIMEOUT_S = 1.0
PROC = Path("/proc")
SHARED_MEMORY = Path("/dev/shm")

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """A run on ports of its own."""

    folder: Path
    run_id: str
    num_rollout: int
    save_interval: int
    redis_port: int
    http_ports: dict[str, int]
    grpc_ports: dict[str, int]
    optimizer_steps: int
    """Of each rollout step."""
    batch_size: int = 4
    evaluated_steps: int = 5
    """Evaluate every so many steps."""

    @property
    def run_dir(self) -> Path:
        """Where the run writes."""
        return self.folder / "run"

    @property
    def ports(self) -> list[int]:
        """Every port of the run."""
        return [self.redis_port, *self.http_ports.values(), *self.grpc_ports.values()]


def make_case(folder: Path, num_rollout: int, save_interval: int, optimizer_steps: int = 1) -> Case:
    """Write model, prompts and run spec; random weights never answer right, so that every reward is 0."""
    ports = free_ports(1 + 2 * len(MODULES))
    names = list(MODULES)
    case = Case(
        folder,
        f"chaos-{uuid.uuid4().hex[:8]}",
        num_rollout,
        save_interval,
        ports[0],
        dict(zip(names, ports[1 : 1 + len(names)], strict=True)),
        dict(zip(names, ports[1 + len(names) :], strict=True)),
        optimizer_steps,
    )
    save_model(folder / "model")
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(10) for b in range(10)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:4]))
    (folder / "run.toml").write_text(_spec(case))
    return case


def _spec(case: Case) -> str:
    endpoints = "".join(
        f"{table}\ngrpc_port = {case.grpc_ports[name]}\nhttp_port = {case.http_ports[name]}\n"
        for name, table in TABLES.items()
    )
    return f"""
run_id = "{case.run_id}"
run_dir = "{case.run_dir}"
model.hf_checkpoint = "model"
data = {{prompt_data = "prompts.jsonl", max_prompt_tokens = 64}}
optimizer.lr = 1e-3
algorithm.num_steps_per_rollout = {case.optimizer_steps}
engine = {{dtype = "float32", max_model_len = 256, kv_cache_gib = 0.25, num_threads = 1}}
redis = {{port = {case.redis_port}, maxmemory_mb = 128}}
[rollout]
num_rollout = {case.num_rollout}
rollout_batch_size = {case.batch_size}
n_samples_per_prompt = 4
max_response_tokens = 48
lease_ttl_s = 3
[trainer]
dtype = "float32"
num_threads = 1
save_interval = {case.save_interval}
[evaluation]
interval = {case.evaluated_steps}
max_response_tokens = 16
sets.held_out.prompt_data = "held_out.jsonl"
{endpoints}"""


class Stack:
    """One `flotilla up --plain` of a case."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.output = case.folder / "up.txt"
        self.shared_memory = {SHARED_MEMORY / f"flotilla-{case.run_id}-rank0"}
        """What the trainer and those that were killed had in shared memory."""
        command = [sys.executable, "-m", "services.cli.main", "up", str(case.folder / "run.toml"), "--plain"]
        with self.output.open("w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)

    def until(self, condition: Callable[[], bool], deadline_s: float, what: str) -> None:
        """Look again and again; fails with what the run said if it ends, or if the deadline passes first."""
        give_up = time.monotonic() + deadline_s
        while not condition():
            assert self.process.poll() is None, f"the run ended before {what}:\n{self.output.read_text()}"
            assert time.monotonic() < give_up, f"{what}: not within {deadline_s} s:\n{self.output.read_text()}"
            time.sleep(LOOK_EVERY_S)

    def pids(self) -> dict[str, int]:
        """The processes that live now, as the kernel has them."""
        children = (PROC / f"{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        named = {pid: _name(_command(pid)) for pid in children}
        return {name: int(pid) for pid, name in named.items() if name}

    def kill(self, *names: str) -> list[int]:
        """SIGKILL to each at once; returns their process ids."""
        pids = self.pids()
        self.shared_memory |= _shared_memory({pids[name] for name in names})
        for name in names:
            os.kill(pids[name], signal.SIGKILL)
        return [pids[name] for name in names]

    @contextmanager
    def frozen(self, name: str) -> Iterator[None]:
        """A process that does nothing while the block runs, and then goes on."""
        pid = self.pids()[name]
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def statusz(self, name: str) -> Row:
        """What a process says about itself; {} while it does not answer."""
        try:
            url = f"http://127.0.0.1:{self.case.http_ports[name]}/statusz"
            with urllib.request.urlopen(url, timeout=HTTP_TIMEOUT_S) as answer:
                return json.load(answer)
        except OSError:
            return {}

    def waits_for(self, name: str, what: str) -> bool:
        """Whether a process says that it waits for something."""
        return any(what in one["what"] for one in self.statusz(name).get("waiting_for", ()))

    def rows(self) -> list[Row]:
        """Finished rollout steps, repeated ones too, in the order in which they finished."""
        return read_rows(self.case.run_dir / "metrics.jsonl")


@contextmanager
def running(case: Case) -> Iterator[Stack]:
    """The case under `flotilla up`; whatever happens inside, nothing of it is left."""
    stack = Stack(case)
    try:
        yield stack
    finally:
        if stack.process.poll() is None:
            stack.process.terminate()
        try:
            stack.process.wait(60)
        except subprocess.TimeoutExpired:
            stack.process.kill()  # its janitor ends the rest
            stack.process.wait(10)


def read_rows(path: Path) -> list[Row]:
    """Complete rows of a JSON-lines file."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _shared_memory(groups: set[int]) -> set[Path]:
    """Files of shared memory that members of process groups have mapped."""
    found: set[str] = set()
    for entry in PROC.glob("[0-9]*"):
        try:
            if os.getpgid(int(entry.name)) in groups:
                words = (entry / "maps").read_text().split()
                found |= {word for word in words if word.startswith(f"{SHARED_MEMORY}/")}
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
    return set(map(Path, found))


def _command(pid: str) -> list[str]:
    try:
        return (PROC / pid / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
        return []


def _name(command: list[str]) -> str:
    """Of a process in its final shape; empty for a shell that is about to become one."""
    if command and Path(command[0].split(" ")[0]).name == "redis-server":
        return "redis"
    return next((name for name, module in MODULES.items() if command[1:3] == ["-m", module]), "")
