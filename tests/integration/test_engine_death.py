"""Ends of the engine process: nothing of vLLM is left behind, and torn weights are never served.

The weights come from disk (engine_extension.py); the rest is the real thing.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from services.common.errors import FlotillaError
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

GONE_S = 5.0
EXIT_S = 15.0


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


@pytest.mark.parametrize("strike", [kill_the_process, end_the_process, kill_the_engine_core, fail_to_load])
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
