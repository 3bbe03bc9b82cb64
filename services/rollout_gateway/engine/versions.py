"""Which weights produced which tokens, to the token, whatever is buffered on the way.

Weights change only while vLLM is paused. Its engine core then has no step in flight, and everything that it has sent
before the answer to the pause lies in one queue or has been taken from it. Once vLLM's output handler has taken all of
that in, each running response has exactly the tokens of the old weights: the next one is of the new ones.

Relied upon in vLLM 0.24 to 0.32: the queue and `get_output_async` of its core client, the request states of its output
processor, and that `AsyncLLM.generate` registers a request there before it first waits.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from services.rollout_gateway.spans import Start, Version

LOOK_AGAIN_S = 0.001
DRAIN_S = 60.0
"""What is on its way is taken in within milliseconds; a vLLM of another kind may never seem to be done."""


class VersionHistory:
    """The versions that each running response has seen."""

    def __init__(self, llm: Any, version: Version) -> None:
        """Watch from now on.

        Args:
            llm: An AsyncLLM that has not begun to generate.
            version: The weights that it has.
        """
        self._llm = llm
        self._version = version
        self._starts: dict[str, list[Start]] = {}
        self._handler_waits = False
        self._get_output = llm.engine_core.get_output_async
        llm.engine_core.get_output_async = self._watched_get_output

    def begin(self, request_id: str) -> list[Start]:
        """The history of a request that vLLM is about to get; it grows with every change until `end`."""
        starts = self._starts[request_id] = [(self._version, 0)]
        return starts

    def end(self, request_id: str) -> None:
        """Forget a request."""
        del self._starts[request_id]

    async def change(self, version: Version) -> None:
        """Say that all later tokens are of a version. Call it while paused.

        Raises:
            RuntimeError: vLLM's output handler has failed, or does not come to an end.
        """
        deadline = time.monotonic() + DRAIN_S
        while not self._drained():
            if self._llm.output_handler.done():
                raise RuntimeError("vLLM's output handler has failed")
            if time.monotonic() > deadline:
                raise RuntimeError(f"vLLM's output handler has not taken in everything within {DRAIN_S:.0f} s")
            await asyncio.sleep(LOOK_AGAIN_S)
        for state in self._llm.output_processor.request_states.values():
            if starts := self._starts.get(state.external_req_id):
                starts.append((version, state.detokenizer.num_output_tokens()))
        self._version = version

    async def _watched_get_output(self) -> Any:
        self._handler_waits = True
        outputs = await self._get_output()
        self._handler_waits = False
        return outputs

    def _drained(self) -> bool:
        return self._handler_waits and self._llm.engine_core.outputs_queue.empty()
