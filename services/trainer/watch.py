"""Whether the other ranks live and go on. Rank 0 watches all of them, and they watch rank 0."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flotilla.trainer.v1 import rank_pb2 as pb
from services.common.errors import DeadlineExceeded, FlotillaError, Unavailable
from services.common.rpc import call, seconds
from services.common.service import now_s

IDLE = "waiting to be told"
EVERY_S = 2.0
ANSWER_TIMEOUT_S = 5.0
MOST_ABSENCES = 2
"""In a row: a connection may break where the rank has not."""


class RankFailed(Unavailable):
    """A rank cannot go on; the message names it. All ranks must be started again."""


@dataclass(slots=True)
class Seen:
    """A rank as it was when it last began something."""

    doing: str = "nothing"
    progress: int = -1
    at_s: float = 0.0
    """Monotonic time."""
    answers: bool = True
    absences: int = 0

    @property
    def stands_still(self) -> bool:
        """It does not answer, or is at something that it was told to do."""
        return not self.answers or self.doing != IDLE


async def watch(run_id: str, fleet_id: str, ranks: Mapping[int, Any], hang_timeout_s: float) -> None:
    """Look at ranks again and again, for the life of the process.

    Args:
        run_id: Of the run.
        fleet_id: That all ranks belong to.
        ranks: Stubs of TrainerRankService by rank.
        hang_timeout_s: See TrainerSpec.

    Raises:
        RankFailed: A rank has ended, or is part of another fleet.
        DeadlineExceeded: A rank has begun nothing new for `hang_timeout_s`, though it is not idle.
    """
    request = pb.GetRankStatusRequest(run_id=run_id)
    seen = {rank: Seen(at_s=now_s()) for rank in ranks}

    async def look(rank: int) -> None:
        one = seen[rank]
        try:
            status = await call(ranks[rank].GetRankStatus, request, timeout_s=ANSWER_TIMEOUT_S)
        except Unavailable as error:
            one.answers, one.absences = False, one.absences + 1
            if one.absences >= MOST_ABSENCES:
                raise RankFailed(f"rank {rank} of the trainer has ended ({error})") from None
            return
        except FlotillaError:
            one.answers = False
            return
        if status.fleet_id != fleet_id:
            raise RankFailed(f"rank {rank} of the trainer was started again without the others")
        one.answers, one.absences, one.doing = True, 0, status.doing
        if status.progress != one.progress:
            one.progress, one.at_s = status.progress, now_s() - seconds(status.since)

    while True:
        await asyncio.sleep(EVERY_S)
        await asyncio.gather(*map(look, ranks))
        still = {rank: one for rank, one in seen.items() if one.stands_still}
        if still and now_s() - min(one.at_s for one in still.values()) > hang_timeout_s:
            raise DeadlineExceeded(describe_hang(still))


def describe_hang(still: Mapping[int, Seen]) -> str:
    """Which ranks hold up the others: those that do not answer, else those that have begun the least."""
    least = min(one.progress for one in still.values())
    silent = [rank for rank, one in still.items() if not one.answers]
    parts = [
        f"rank {rank} {'is' if still[rank].answers else 'does not answer, and was'} at {still[rank].doing!r} "
        f"for {now_s() - still[rank].at_s:.0f} s"
        for rank in silent or [rank for rank, one in still.items() if one.progress == least]
    ]
    return "the trainer stands still: " + "; ".join(parts)
