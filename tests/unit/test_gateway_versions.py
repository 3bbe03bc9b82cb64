"""Policy spans across updates, and which layers an engine serves in fp8. vLLM's front end is played by the test."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from services.rollout_gateway.engine import versions
from services.rollout_gateway.engine.arguments import graph_sizes
from services.rollout_gateway.engine.versions import VersionHistory
from services.rollout_gateway.spans import Span, Version, spans_between

OLD, NEW, NEWER = Version(1, 0), Version(1, 1), Version(1, 2)


class FrontEnd:
    """As much of AsyncLLM as a history sees: outputs in a queue, counted for their request after a while."""

    def __init__(self) -> None:
        self.outputs_queue: asyncio.Queue[str] = asyncio.Queue()
        self.engine_core: Any = self
        self.output_processor = SimpleNamespace(request_states={})
        self.slow_s = 0.0
        self.output_handler: asyncio.Task[None] | None = None

    async def get_output_async(self) -> str:
        return await self.outputs_queue.get()

    def start(self) -> None:
        self.output_handler = asyncio.create_task(self._handle())

    def add(self, request_id: str) -> None:
        counter = SimpleNamespace(tokens=0)
        detokenizer = SimpleNamespace(num_output_tokens=lambda: counter.tokens)
        state = SimpleNamespace(external_req_id=request_id, detokenizer=detokenizer, counter=counter)
        self.output_processor.request_states[request_id] = state

    async def _handle(self) -> None:
        while True:
            request_id = await self.engine_core.get_output_async()
            if request_id == "fail":
                raise RuntimeError
            await asyncio.sleep(self.slow_s)
            self.output_processor.request_states[request_id].counter.tokens += 1


async def front_end() -> tuple[FrontEnd, VersionHistory]:
    llm = FrontEnd()
    history = VersionHistory(llm, OLD)
    llm.start()
    await asyncio.sleep(0)
    return llm, history


async def test_tokens_on_their_way_belong_to_the_old_version():
    llm, history = await front_end()
    llm.slow_s = 0.01
    starts = history.begin("r")
    llm.add("r")
    for _ in range(5):
        llm.outputs_queue.put_nowait("r")
    await history.change(NEW)
    assert spans_between(starts, 0, 8) == [Span(0, 5, OLD), Span(5, 8, NEW)]


async def test_updates_without_a_token_between_them_leave_no_span():
    llm, history = await front_end()
    starts = history.begin("waiting")
    llm.add("waiting")
    await history.change(NEW)
    await history.change(NEWER)
    assert spans_between(starts, 0, 3) == [Span(0, 3, NEWER)]
    assert spans_between(history.begin("late"), 0, 3) == [Span(0, 3, NEWER)]


async def test_what_has_finished_stays_with_the_old_version():
    llm, history = await front_end()
    starts = history.begin("done")
    llm.add("done")
    llm.outputs_queue.put_nowait("done")
    llm.outputs_queue.put_nowait("done")
    await asyncio.sleep(0.05)
    del llm.output_processor.request_states["done"]
    await history.change(NEW)
    assert spans_between(starts, 0, 2) == [Span(0, 2, OLD)]
    history.end("done")
    llm.add("done")
    await history.change(NEWER)


async def test_a_handler_that_failed_ends_the_wait():
    llm, history = await front_end()
    llm.outputs_queue.put_nowait("fail")
    with pytest.raises(RuntimeError, match="output handler"):
        await history.change(NEW)
    # Else asyncio logs it whenever it is collected; in the middle of a parse that breaks Python 3.11.
    assert llm.output_handler and llm.output_handler.exception()


async def test_a_handler_that_hangs_ends_the_wait(monkeypatch):
    monkeypatch.setattr(versions, "DRAIN_S", 0.05)
    llm, history = await front_end()
    llm.slow_s = 60.0
    llm.add("r")
    llm.outputs_queue.put_nowait("r")
    with pytest.raises(RuntimeError, match="has not taken in everything"):
        await history.change(NEW)


@pytest.mark.parametrize(
    ("max_num_seqs", "count", "most"), [(1, 3, 4), (64, 35, 256), (512, 67, 2048), (1024, 83, 4096), (4096, 115, 8192)]
)
def test_cuda_graphs_reach_beyond_a_full_batch(max_num_seqs: int, count: int, most: int) -> None:
    sizes = graph_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes)) and len(sizes) == count and sizes[-1] == most
