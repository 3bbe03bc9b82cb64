"""Updates from a trainer to an engine that share one GPU, through the real agent and coordinator, by CUDA IPC.

Trainer and engine are stand-ins (tests/weight_sync_fleet.py), each a process, as agent and coordinator are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch

from services.weight_sync.records import PolicyVersion
from tests.weight_sync_fleet import AGENT, Fleet

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(60),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

WAIT_S = 55.0
SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (1000, 512),
    **{f"model.layers.{i}.up_proj.weight": (1537, 640) for i in range(4)},
    **{f"model.layers.{i}.input_layernorm.weight": (513,) for i in range(4)},
    "model.norm.weight": (515,),
}


def run(folder: Path, scenario: Callable[[Fleet], Awaitable[None]], **settings: object) -> None:
    """Run a scenario with everything on GPU 0."""

    async def whole() -> None:
        settings.setdefault("bucket_bytes", 1_000_000)
        async with asyncio.timeout(WAIT_S):
            async with Fleet(folder, SHAPES, trainer_gpus="0", engine_gpus="0", weight_sync=settings) as fleet:
                await scenario(fleet)

    asyncio.run(whole())


@pytest.mark.parametrize(
    ("quantization", "options"),
    [("fp8_block_128", ["--keep-fp8"]), ("fp8_block_128", []), ("none", [])],
    ids=["fp8", "dequantised", "plain"],
)
def test_updates_arrive(tmp_path: Path, quantization: str, options: list[str]) -> None:
    async def scenario(fleet: Fleet) -> None:
        trainer, engine = await asyncio.gather(fleet.trainer(), fleet.engine("1", *options))
        for step in range(4):
            assert (await trainer.ask(step))["published"] == step
            loaded = await engine.hear("loaded")
            assert loaded["loaded"] == step and not loaded["wrong"] and not loaded["left_over"]
            await fleet.until_live(PolicyVersion(1, step))

    run(tmp_path, scenario, quantization=quantization)


def test_an_agent_that_was_killed_reads_the_version_again(tmp_path: Path) -> None:
    async def scenario(fleet: Fleet) -> None:
        trainer, engine = await asyncio.gather(fleet.trainer(), fleet.engine("1", "--keep-fp8"))
        await trainer.ask(0)
        await fleet.until_live(PolicyVersion(1, 0))
        await fleet.services[AGENT].kill()
        await fleet.start_service(AGENT)
        await engine.kill()
        engine = await fleet.engine("2", "--keep-fp8")
        loaded = await engine.hear("loaded")
        assert loaded["loaded"] == 0 and not loaded["wrong"]

    run(tmp_path, scenario)


def test_a_trainer_that_was_killed_leaves_the_agent_to_the_next(tmp_path: Path) -> None:
    async def scenario(fleet: Fleet) -> None:
        trainer, engine = await asyncio.gather(fleet.trainer(), fleet.engine("1", "--keep-fp8"))
        for step in range(2):
            await trainer.ask(step)
            await fleet.until_live(PolicyVersion(1, step))
        await trainer.kill()
        trainer = await fleet.trainer(epoch=2)
        for step in range(1, 3):
            await trainer.ask(step)
            await fleet.until_live(PolicyVersion(2, step))
        for step in (0, 1, 1, 2):
            loaded = await engine.hear("loaded")
            assert loaded["loaded"] == step and not loaded["wrong"]

    run(tmp_path, scenario)
