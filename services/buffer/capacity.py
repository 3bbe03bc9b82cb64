"""Whether what must be kept until it is committed fits into the memory of Redis: arithmetic on the run spec.

Kept at once are the batches since the last commit, those generated ahead, and what is over-sampled for the last of
them. Tombstones, manifests and evaluations are small beside it.
"""

from __future__ import annotations

from services.common.spec import RunSpec, SpecError

TOKEN_ID_BYTES = 3
"""A varint below 2^21, more than any vocabulary has."""
LOG_PROB_BYTES = 4
MASK_BYTES = 1
SAMPLE_BYTES = 1024
"""Beside the tokens: its header, hash and policy spans, and Redis's own records of its keys."""
MEMORY_SHARE = 0.8
"""From here on nothing fresh is issued. The allocator takes the rest: its sizes are up to a quarter apart."""


def sample_bytes(spec: RunSpec) -> int:
    """Memory of the longest sample: every one carries its prompt."""
    response = spec.rollout.max_response_tokens * (TOKEN_ID_BYTES + LOG_PROB_BYTES + MASK_BYTES)
    return response + spec.data.max_prompt_tokens * TOKEN_ID_BYTES + SAMPLE_BYTES


def batch_bytes(spec: RunSpec) -> int:
    """Memory of a batch of the longest samples."""
    return spec.rollout.rollout_batch_size * spec.rollout.n_samples_per_prompt * sample_bytes(spec)


def batches_at_once(spec: RunSpec) -> int:
    """Batches that are generated and not committed, at most."""
    return min(spec.trainer.save_interval + spec.rollout.max_staleness + 1, spec.rollout.num_rollout)


def check_capacity(spec: RunSpec, limit_bytes: int) -> None:
    """Raise SpecError if the worst case does not fit into MEMORY_SHARE of the limit; 0 is no limit."""
    batches, surplus = batches_at_once(spec), spec.rollout.surplus_groups
    needed = batches * batch_bytes(spec) + surplus * spec.rollout.n_samples_per_prompt * sample_bytes(spec)
    if not limit_bytes or needed <= MEMORY_SHARE * limit_bytes:
        return
    enough_mb = -(-needed // int(MEMORY_SHARE * (1 << 20)))
    raise SpecError(
        f"trainer.save_interval = {spec.trainer.save_interval}: up to {batches} batches of {_mb(batch_bytes(spec))} "
        f"and {surplus} groups of surplus wait for a commit, {_mb(needed)} if all responses have "
        f"{spec.rollout.max_response_tokens} tokens; of its {_mb(limit_bytes)} Redis can give them {MEMORY_SHARE:.0%}. "
        f"Save more often, or raise redis.maxmemory_mb (maxmemory of a Redis of your own) to {enough_mb}"
    )


def _mb(count: int) -> str:
    return f"{count / (1 << 20):.1f} MB"
