"""Commands to Redis that are asked for at the same time travel together: one turn of the socket and one fsync for all.

    many calls ──► queue ──► at most IN_FLIGHT pipelines, each with what has gathered while the ones before were away

A caller that is cancelled leaves a command that is on its way alone, and its reply goes nowhere.
"""

from __future__ import annotations

import asyncio
from typing import Any

from redis import exceptions

IN_FLIGHT = 3
"""Pipelines at once: Redis works on one while others are packed and read."""
MAX_BYTES = 1 << 20
"""Commands that travel together carry no more than this, or one command: nobody waits long for what others send."""


class Pipelines:
    """Runs commands of one Redis client."""

    def __init__(self, redis: Any) -> None:
        self._redis = redis
        self._queue: list[tuple[tuple[Any, ...], asyncio.Future[Any]]] = []
        self._draining = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def call(self, *command: Any) -> Any:
        """The answer to one command. Raises what redis-py raises."""
        future = asyncio.get_running_loop().create_future()
        self._queue.append((command, future))
        if self._draining < IN_FLIGHT:
            self._draining += 1
            self._tasks.add(task := asyncio.ensure_future(self._drain()))
            task.add_done_callback(self._tasks.discard)
        return await future

    async def script(self, script: Any, keys: list[str], args: tuple[Any, ...]) -> Any:
        """The answer of a registered script, which Redis may not know yet."""
        command = ("EVALSHA", script.sha, len(keys), *keys, *args)
        try:
            return await self.call(*command)
        except exceptions.NoScriptError:
            await self.call("SCRIPT LOAD", script.script)
            return await self.call(*command)

    async def _drain(self) -> None:
        try:
            while batch := self._take():
                await self._send(batch)
        finally:
            self._draining -= 1

    async def _send(self, batch: list[tuple[tuple[Any, ...], asyncio.Future[Any]]]) -> None:
        answers: list[Any] = [exceptions.ConnectionError("the call was cut short")] * len(batch)
        try:
            async with self._redis.pipeline(transaction=False) as pipe:
                for command, _ in batch:
                    pipe.execute_command(*command)
                answers = await pipe.execute(raise_on_error=False)
        except (exceptions.RedisError, OSError) as error:
            answers = [error] * len(batch)
        finally:  # whatever happens, nobody waits for ever
            for (_, future), answer in zip(batch, answers, strict=True):
                if future.done():
                    continue
                if isinstance(answer, BaseException):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)

    def _take(self) -> list[tuple[tuple[Any, ...], asyncio.Future[Any]]]:
        """What travels next, without what nobody waits for any more."""
        self._queue = [one for one in self._queue if not one[1].done()]
        size = count = 0
        for command, _ in self._queue:
            size += sum(len(part) for part in command if isinstance(part, bytes))
            if count and size > MAX_BYTES:
                break
            count += 1
        taken, self._queue = self._queue[:count], self._queue[count:]
        return taken
