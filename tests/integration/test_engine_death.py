"""Ends of the engine process: nothing of vLLM is left behind, and torn weights are never served.

The weights come from disk (engine_extension.py); the rest is the real thing.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from flotilla.rollout_gateway.v1 import engine_pb2
from services.common.errors import FlotillaError
from services.common.rpc import call
from services.common.service import EXIT_BAD_INPUT
from tests.integration.engine_stack import (
    EngineClient,
    all_gone,
    client_of,
    command_of,
    descendants,
    kill_all,
    process,
    sampling,
    write_spec,
)

pytestmark = pytest.mark.stack

ENGINE = "services.rollout_gateway.engine"
GONE_S = 5.0
EXIT_S = 15.0
START_S = 120.0
SHARED_MEMORY = Path("/dev/shm")


async def kill_the_process(child: subprocess.Popen[bytes], client: EngineClient) -> int:
    child.send_signal(signal.SIGKILL)
    return -signal.SIGKILL


async def end_the_process(child: subprocess.Popen[bytes], client: EngineClient) -> int:
    child.send_signal(signal.SIGTERM)
    return 0


async def kill_the_engine_core(child: subprocess.Popen[bytes], client: EngineClient) -> int:
    (core,) = [pid for pid in descendants(child.pid) if "EngineCore" in command_of(pid)]
    os.kill(core, signal.SIGKILL)
    return 1


async def fail_to_load(child: subprocess.Popen[bytes], client: EngineClient) -> int:
    await client.start_update("/no/such/checkpoint", 1)
    await client.receive("/no/such/checkpoint")
    with pytest.raises(FlotillaError):
        await client.finish("/no/such/checkpoint")
    return 1


@pytest.mark.parametrize(
    "strike",
    [
        pytest.param(kill_the_process, marks=pytest.mark.nightly),  # the test below kills it too
        end_the_process,
        kill_the_engine_core,
        fail_to_load,
    ],
)
async def test_nothing_survives_the_engine(
    tmp_path: Path, tiny_qwen3: Path, strike: Callable[[subprocess.Popen[bytes], EngineClient], Awaitable[int]]
):
    spec = write_spec(tmp_path, tiny_qwen3)
    with process("tests.integration.engine_extension", tmp_path / "run.toml") as child:
        async with client_of(spec) as client:
            await client.update(tiny_qwen3, 0)
            running = asyncio.ensure_future(client.generate([5, 6, 7], sampling(1.0, 400), samples=8))
            await asyncio.sleep(0.5)
            family = descendants(child.pid)
            assert len(family) >= 2
            code = await strike(child, client)
            assert await asyncio.to_thread(child.wait, EXIT_S) == code
            try:
                await all_gone(family, GONE_S)
            except TimeoutError:
                kill_all(family)
                raise
            await asyncio.gather(running, return_exceptions=True)


def test_what_vllm_refuses_is_not_tried_again(tmp_path: Path, tiny_qwen3: Path):
    write_spec(tmp_path, tiny_qwen3, engine={"max_model_len": 1000})
    with process(ENGINE, tmp_path / "run.toml") as child:
        assert child.wait(START_S) == EXIT_BAD_INPUT
    log = (tmp_path / f"{ENGINE}.log").read_text()
    assert "vLLM refuses the model or a field of [engine]: " in log and "max_model_len (1000)" in log


def until_logged(log: Path, words: str) -> None:
    give_up = time.monotonic() + START_S
    while words not in log.read_text():
        assert time.monotonic() < give_up, log.read_text()
        time.sleep(0.1)


@pytest.mark.parametrize(("signum", "after_s"), [(signal.SIGTERM, 1.0), (signal.SIGINT, 5.0)])
async def test_a_stop_does_not_wait_until_vllm_has_loaded(
    tmp_path: Path, tiny_qwen3: Path, signum: signal.Signals, after_s: float
):
    write_spec(tmp_path, tiny_qwen3)
    with process(ENGINE, tmp_path / "run.toml") as child:
        await asyncio.to_thread(until_logged, tmp_path / f"{ENGINE}.log", "Started server process")
        await asyncio.sleep(after_s)
        family = descendants(child.pid)
        child.send_signal(signum)
        assert await asyncio.to_thread(child.wait, EXIT_S) == 0
        await all_gone(family, GONE_S)


async def test_a_killed_engine_takes_its_processes_and_shared_memory_along(tmp_path: Path, tiny_qwen3: Path):
    """With the command that `flotilla up` uses: a package's main module is not imported in spawned processes."""
    spec = write_spec(tmp_path, tiny_qwen3)
    request = engine_pb2.GetWeightVersionRequest(run_id=spec.run_id)
    with process(ENGINE, tmp_path / "run.toml") as child:
        async with client_of(spec) as client:
            await call(client.stub.GetWeightVersion, request, timeout_s=EXIT_S, patience_s=START_S)
            family = descendants(child.pid)
            segments = mapped_segments(family)
            assert segments
            child.kill()
            await asyncio.to_thread(child.wait, EXIT_S)
            try:
                await all_gone(family, GONE_S)
            except TimeoutError:
                kill_all(family)
                raise
    assert [path for path in segments if path.exists()] == []


def mapped_segments(pids: list[int]) -> list[Path]:
    """Shared memory of Python's that the processes have mapped."""
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in pids]
    return [path for path in SHARED_MEMORY.glob("psm_*") if any(str(path) in text for text in maps)]
