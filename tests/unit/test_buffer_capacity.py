"""Whether a run's worst case fits into Redis: arithmetic, and the words of the refusal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from demo.spec import Inputs, arithmetic_spec, own_model_spec
from flotilla.common.v1 import common_pb2
from services.buffer.capacity import batch_bytes, batches_at_once, check_capacity, sample_bytes
from services.common.spec import RunSpec, SpecError


def spec_of(rollout: dict | None = None, **sections) -> RunSpec:
    settings = {"num_rollout": 100, "rollout_batch_size": 32, "n_samples_per_prompt": 8, "max_response_tokens": 32768}
    table = {
        "run_id": "r",
        "model": {"hf_checkpoint": "model"},
        "data": {"prompt_data": "data.jsonl"},
        "engine": {"max_model_len": 65536},
        "rollout": settings | (rollout or {}),
    }
    return RunSpec.model_validate(table | sections)


def test_longest_sample_is_not_larger_than_assumed():
    spec, highest_token_id = spec_of(), (1 << 21) - 1
    tokens = spec.rollout.max_response_tokens
    sample = common_pb2.Sample(
        group_id="g00000000",
        sample_index=1023,
        prompt_token_ids=[highest_token_id] * spec.data.max_prompt_tokens,
        response_token_ids=[highest_token_id] * tokens,
        rollout_log_probs=[-1.0] * tokens,
        loss_mask=[1] * tokens,
        policy_spans=[common_pb2.PolicySpan(begin=i, end=i + 1) for i in range(8)],
        finish_reason=common_pb2.FINISH_REASON_LENGTH,
    )
    assert 0.99 * sample_bytes(spec) < sample.ByteSize() < sample_bytes(spec)


def test_batches_between_two_commits_and_those_ahead():
    trainer = {"save_interval": 5}
    assert batches_at_once(spec_of(trainer=trainer)) == 6
    assert batches_at_once(spec_of({"max_staleness": 3}, trainer=trainer)) == 9
    assert batches_at_once(spec_of({"num_rollout": 2}, trainer=trainer)) == 2


def test_surplus_of_both_refill_policies():
    sampling = {"over_sampling_batch_size": 48}
    assert spec_of().rollout.surplus_groups == 0
    assert spec_of(sampling).rollout.surplus_groups == 16
    assert spec_of(sampling | {"refill": "batch"}).rollout.surplus_groups == 47


def test_what_does_not_fit_is_refused_with_numbers_that_help():
    spec = spec_of({"over_sampling_batch_size": 40}, trainer={"save_interval": 20})
    with pytest.raises(SpecError) as caught:
        check_capacity(spec, 1 << 30)
    message = str(caught.value)
    assert message.startswith("trainer.save_interval = 20: up to 21 batches of 65.8 MB and 8 groups of surplus")
    assert "32768 tokens" in message and "of its 1024.0 MB" in message
    enough_mb = int(re.findall(r"redis\.maxmemory_mb .* to (\d+)", message)[0])
    check_capacity(spec, enough_mb << 20)
    with pytest.raises(SpecError):
        check_capacity(spec, (enough_mb - 2) << 20)


def test_saving_more_often_helps_and_no_limit_is_enough():
    limit_bytes = 4 * batch_bytes(spec_of())
    with pytest.raises(SpecError):
        check_capacity(spec_of(trainer={"save_interval": 3}), limit_bytes)
    check_capacity(spec_of(trainer={"save_interval": 2}), limit_bytes)
    check_capacity(spec_of(trainer={"save_interval": 50}), 0)


@pytest.mark.parametrize("own_model", [False, True])
def test_the_demo_fits_into_the_redis_it_starts(own_model):
    inputs = Inputs(
        "demo", Path("run"), Path("model"), Path("prompts.jsonl"), None, seed=1, steps=60, shuffle_rewards=False
    )
    table = own_model_spec(inputs, max_position_embeddings=32768) if own_model else arithmetic_spec(inputs)
    spec = RunSpec.model_validate(table)
    check_capacity(spec, spec.redis.maxmemory_mb << 20)
