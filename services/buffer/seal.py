"""What a sealed batch is: rows, advantages, denominators, step membership and digest, computed once."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Mapping, Sequence

from flotilla.buffer.v1 import buffer_pb2 as pb
from flotilla.common.v1 import common_pb2
from services.buffer.records import Group, SampleHeader
from services.buffer.rewards import group_advantages


def make_manifest(
    batch: int, groups: Sequence[Group], num_steps: int, interval: Mapping[str, str], live_epoch: int
) -> pb.BatchManifest:
    """The manifest of a batch without its schedule.

    Args:
        batch: Number of the batch.
        groups: KEPT groups, sorted by group id.
        num_steps: Optimizer steps; they take consecutive rows, equally many.
        interval: What the ledger counted since the last seal.
        live_epoch: Epoch of the weights that serve; older ones are dead.
    """
    rows = [row for group in groups for row in _rows(group)]
    per_step = len(rows) // num_steps
    for index, row in enumerate(rows):
        row.optimizer_step = index // per_step
    return pb.BatchManifest(
        batch=batch,
        digest=batch_digest(batch, rows, groups),
        rows=rows,
        optimizer_steps=num_steps,
        rollouts_per_step=[per_step] * num_steps,
        stats=_stats(batch, groups, interval, live_epoch),
    )


def _rows(group: Group) -> list[pb.BatchRow]:
    rewards = group.rewards()
    return [
        pb.BatchRow(
            group_id=group.group_id,
            sample_index=index,
            prompt_tokens=header.prompt_tokens,
            response_tokens=header.response_tokens,
            reward=rewards[index],
            advantage=advantage,
            loss_denominator=max(header.loss_tokens, 1),
        )
        for (index, header), advantage in zip(group.headers().items(), group_advantages(rewards), strict=True)
    ]


def batch_digest(batch: int, rows: Sequence[pb.BatchRow], groups: Sequence[Group]) -> str:
    """SHA-256, in hexadecimal, over what the trainer gets: rows and the hashes of their payloads."""
    hashes = {group.group_id: group for group in groups}
    content = [
        (r.group_id, r.sample_index, r.advantage, r.loss_denominator, r.optimizer_step,
         hashes[r.group_id].content_hash(r.sample_index))
        for r in rows
    ]  # fmt: skip
    return hashlib.sha256(json.dumps([batch, content]).encode()).hexdigest()


def _stats(batch: int, groups: Sequence[Group], interval: Mapping[str, str], live_epoch: int) -> pb.RolloutStats:
    headers: list[SampleHeader] = [header for group in groups for header in group.headers().values()]
    started = int(interval.get("started_ms", interval["now_ms"]))
    return pb.RolloutStats(
        mean_reward=float(interval.get("reward_sum", 0)) / max(int(interval.get("reward_count", 0)), 1),
        kept_groups=int(interval.get("kept", 0)),
        dropped_groups={k.removeprefix("dropped:"): int(v) for k, v in interval.items() if k.startswith("dropped:")},
        mean_response_tokens=statistics.fmean(h.response_tokens for h in headers),
        truncated_ratio=statistics.fmean(h.finish_reason == common_pb2.FINISH_REASON_LENGTH for h in headers),
        rollout_seconds=(int(interval["now_ms"]) - started) / 1000,
        generated_tokens=int(interval.get("tokens", 0)),
        max_age=batch - min(h.oldest_step for h in headers),
        mixed_version_samples=sum(len(h.versions) > 1 for h in headers),
        dead_epoch_samples=sum(any(int(v.split(":")[0]) < live_epoch for v in h.versions) for h in headers),
    )
