"""Results of evaluations: mean rewards from the ledger, and files for people to read."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flotilla.common.v1 import common_pb2
from services.buffer.records import Group
from services.buffer.run import RECHECK_S, Run
from services.buffer.states import State
from services.common.errors import Unavailable
from services.common.logs import get_logger

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SetResult:
    """One data set at one step."""

    name: str
    step: int
    run_epoch: int
    mean_reward: float
    """Over all scored samples; 0 if there is none."""
    issued: int
    scored: int
    failed: int
    mean_response_tokens: float
    mixed_versions: bool

    @property
    def complete(self) -> bool:
        """True if no group is still to be done."""
        return self.issued == self.scored + self.failed


def summarise(name: str, step: int, groups: list[Group]) -> SetResult:
    """The result of one data set from its groups."""
    scored = [group for group in groups if group.state is State.SCORED]
    rewards = [reward for group in scored for reward in group.rewards()]
    headers = [header for group in scored for header in group.headers().values()]
    versions = {version for header in headers for version in header.versions}
    return SetResult(
        name=name,
        step=step,
        run_epoch=max((int(v.split(":")[0]) for v in versions), default=0),
        mean_reward=statistics.fmean(rewards) if rewards else 0.0,
        issued=len(groups),
        scored=len(scored),
        failed=sum(group.state is State.FAILED for group in groups),
        mean_response_tokens=statistics.fmean(h.response_tokens for h in headers) if headers else 0.0,
        mixed_versions=len(versions) > 1,
    )


class Evaluations:
    """Reads evaluations from the ledger; writes each to the run directory when it ends."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._ended: dict[tuple[int, str], SetResult] = {}

    def due_sets(self, step: int) -> dict[str, int]:
        """Data sets, with their number of prompts, that are evaluated when this step goes live."""
        spec = self._run.spec
        due = step % spec.evaluation.interval == 0 or step == spec.rollout.num_rollout
        return {name: len(data.prompts) for name, data in self._run.evaluation.items()} if due else {}

    async def results(self, step: int) -> list[SetResult]:
        """Results of one step, or of all steps with -1."""
        wanted = [pair for pair in await self._run.ledger.evaluations() if step in (-1, pair[0])]
        return [await self._result(*pair) for pair in wanted]

    async def _result(self, step: int, name: str) -> SetResult:
        if (step, name) not in self._ended:
            ids = await self._run.ledger.evaluation_group_ids(step, name)
            result = summarise(name, step, await self._run.ledger.groups(ids))
            if not result.complete:
                return result
            self._ended[step, name] = result
        return self._ended[step, name]

    async def write_loop(self) -> None:
        """Write every evaluation that has ended, once; after a restart, those whose file is missing."""
        written: set[tuple[int, str]] = set()
        while True:
            try:
                for step, name in await self._run.ledger.evaluations():
                    if (step, name) not in written and (await self._result(step, name)).complete:
                        await self._write(step, name)
                        written.add((step, name))
            except Unavailable as error:
                log.warning("waiting", loop="evaluation", error=str(error))
            await asyncio.sleep(RECHECK_S)

    async def _write(self, step: int, name: str) -> None:
        result = self._ended[step, name]
        path = self._run.spec.run_dir / "evaluations" / f"step-{step:06d}-{name}.jsonl"
        if path.exists():
            return
        groups = await self._run.ledger.groups(await self._run.ledger.evaluation_group_ids(step, name))
        rows = [row for group in groups for row in await self._rows(group)]
        summary = {f: getattr(result, f) for f in SetResult.__slots__} | {"time": time.time()}
        await asyncio.to_thread(_write_files, path, rows, self._run.spec.run_dir / "evaluations.jsonl", summary)
        log.info("evaluated", step=step, set=name, mean_reward=round(result.mean_reward, 4), scored=result.scored)

    async def _rows(self, group: Group) -> list[dict[str, Any]]:
        indices = list(group.headers())
        payloads = await self._run.ledger.payloads((group.group_id, index) for index in indices)
        rewards, verdicts = group.rewards() or [None] * len(indices), group.verdicts() or [""] * len(indices)
        prompt, decode = self._run.prompt(group), self._run.tokenizer.decode
        return [
            {
                "group_id": group.group_id,
                "sample_index": index,
                "prompt": decode(prompt.token_ids),
                "response": decode(common_pb2.Sample.FromString(payload).response_token_ids),
                "label": prompt.label,
                "reward": rewards[at],
                "verdict": verdicts[at],
            }
            for at, (index, payload) in enumerate(zip(indices, payloads, strict=True))
            if payload is not None
        ]


def _write_files(path: Path, rows: list[dict[str, Any]], index: Path, summary: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with index.open("a") as out:
        out.write(json.dumps(summary) + "\n")
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    partial.rename(path)
