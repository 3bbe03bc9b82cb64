"""The buffer over a real Redis and real gRPC: life of a group, leases, batches, epochs, evaluation.

The reward service is scripted and the test plays gateway, trainer and weight_sync.
"""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import time
from typing import Any

import grpc
import pytest

from flotilla.buffer.v1 import buffer_pb2 as pb
from flotilla.buffer.v1 import registry_pb2 as registry_pb
from flotilla.common.v1 import common_pb2
from tests.buffer_harness import RUN_ID, Buffer, ScriptedReward, make_spec, start_redis, status_of


@pytest.fixture
async def redis(tmp_path):
    server = start_redis(tmp_path / "redis")
    yield server
    server.stop()


@pytest.fixture
async def buffer(tmp_path, redis):
    one = await Buffer(make_spec(tmp_path, redis.port)).start()
    yield one
    await one.stop()


async def run_evaluation(buffer: Buffer) -> None:
    """Submit the evaluation that a live version brings."""
    for lease in await buffer.lease():
        assert lease.kind == pb.WORK_KIND_EVALUATION
        await buffer.submit(lease)


async def test_nothing_is_handed_out_before_the_first_live_version(buffer):
    await buffer.begin_epoch()
    assert await buffer.lease() == []
    assert (await buffer.stats()).issued == 0


async def test_whole_life_of_a_batch(buffer):
    epoch = await buffer.begin_epoch()
    assert epoch == 1
    await buffer.go_live(epoch, 0)
    await run_evaluation(buffer)
    leases = await buffer.lease()
    assert len(leases) == 2 and all(lease.attempt == 1 for lease in leases)
    assert await buffer.counts() == {"GENERATING": 2}
    assert await buffer.lease() == [], "with staleness 0 only one batch is out"
    assert not (await buffer.submit(leases[0], (1,))).group_complete
    assert (await buffer.submit(leases[0], (0,))).group_complete
    await buffer.submit(leases[1], text="long")
    answer = await buffer.lease_batch(epoch)
    manifest = answer.manifest
    assert await buffer.counts() == {"IN_TRAINING": 2}
    assert manifest.batch == 0 and len(manifest.rows) == 4
    assert [row.reward for row in manifest.rows] == [1, 0, 1, 0]
    assert [row.response_tokens for row in manifest.rows] == [1, 1, 5, 5]
    assert [row.loss_denominator for row in manifest.rows] == [1, 1, 5, 5]
    spread = statistics.stdev([1.0, 0.0])
    for row in manifest.rows:
        assert math.isclose(row.advantage, (row.reward - 0.5) / (spread + 1e-6), rel_tol=1e-6)
    assert manifest.stats.mean_reward == 0.5 and manifest.stats.kept_groups == 2
    assert manifest.stats.mean_response_tokens == 3 and manifest.stats.generated_tokens == 12
    again = await buffer.lease_batch(epoch)
    assert again.manifest == manifest, "a batch stays leased until it is acknowledged"
    await buffer.ack(epoch, manifest)
    await buffer.ack(epoch, manifest)
    assert await buffer.counts() == {"TRAINED": 2}
    await buffer.commit(epoch, 1)
    await buffer.commit(epoch, 1)
    assert await buffer.counts() == {"COMMITTED": 2}
    batches = await buffer.stub.ListBatches(pb.ListBatchesRequest(run_id=RUN_ID), timeout=10)
    assert [(b.batch, b.state, b.commits) for b in batches.batches] == [(0, pb.BATCH_STATE_COMMITTED, 1)]


async def test_payloads_come_back_untouched_and_in_pages(buffer):
    epoch = await buffer.begin_epoch()
    await buffer.go_live(epoch, 0)
    await run_evaluation(buffer)
    await buffer.fill_batch(epoch, "abc")
    manifest = (await buffer.lease_batch(epoch)).manifest
    request = pb.FetchSamplesRequest(run_id=RUN_ID, batch=0, rows=[3, 0])
    answer = await buffer.stub.FetchSamples(request, timeout=10)
    samples = [common_pb2.Sample.FromString(payload) for payload in answer.payloads]
    assert [(s.group_id, s.sample_index) for s in samples] == [
        (manifest.rows[3].group_id, 1),
        (manifest.rows[0].group_id, 0),
    ]
    assert all(len(s.response_token_ids) == 4 and list(s.rollout_log_probs) == [-1.0] * 4 for s in samples)
    assert answer.next_page_token == ""
    bad = pb.FetchSamplesRequest(run_id=RUN_ID, batch=0, rows=[4])
    assert await status_of(buffer.stub.FetchSamples(bad, timeout=10)) == "INVALID_ARGUMENT"
    missing = pb.FetchSamplesRequest(run_id=RUN_ID, batch=7, rows=[0])
    assert await status_of(buffer.stub.FetchSamples(missing, timeout=10)) == "NOT_FOUND"


async def test_a_dropped_group_frees_its_credit(tmp_path, redis):
    spec = make_spec(tmp_path, redis.port, dynamic_sampling_filter="nonzero_std")
    buffer = await Buffer(spec, ScriptedReward(lambda text: float(text == "0b"))).start()
    try:
        epoch = await buffer.begin_epoch()
        await buffer.go_live(epoch, 0)
        await run_evaluation(buffer)
        first, second = await buffer.lease()
        await buffer.submit(first, text="b")
        await buffer.submit(second, text="c")
        await buffer.until(DROPPED=1, KEPT=1)
        (third,) = await buffer.lease(wait_s=5)
        assert third.group_id == "g00000002"
        await buffer.submit(third, text="b")
        manifest = (await buffer.lease_batch(epoch)).manifest
        assert {row.group_id for row in manifest.rows} == {first.group_id, third.group_id}
        assert dict(manifest.stats.dropped_groups) == {"zero_std_0.0": 1}
        assert manifest.stats.mean_reward == pytest.approx(2 / 6), "dropped groups count in the mean reward"
        assert (await buffer.stats()).dropped == {"zero_std_0.0": 1}
    finally:
        await buffer.stop()


async def test_lost_lease_late_and_repeated_submits(tmp_path, redis):
    buffer = await Buffer(make_spec(tmp_path, redis.port, lease_ttl_s=1.0)).start()
    try:
        epoch = await buffer.begin_epoch()
        await buffer.go_live(epoch, 0)
        await run_evaluation(buffer)
        lease, _ = await buffer.lease()
        await buffer.submit(lease, (0,))
        began = time.monotonic()
        (again, *_) = await buffer.lease(wait_s=10)
        assert time.monotonic() - began < 2.5, "a lapsed lease comes back within its time to live + 1 s"
        assert again.group_id == lease.group_id and again.attempt == 2
        assert [s.sample_index for s in again.pending_samples] == [1], "the finished sample is kept"
        assert await status_of(buffer.submit(lease, (1,))) == "ABORTED"
        renew = pb.RenewLeaseRequest(
            run_id=RUN_ID, request_id="r", lease_token=lease.lease_token, group_id=lease.group_id
        )
        assert await status_of(buffer.stub.RenewLease(renew, timeout=5)) == "ABORTED"
        assert (await buffer.submit(again)).group_complete
        assert (await buffer.submit(again)).group_complete, "a repeat gets the first answer"
        assert await status_of(buffer.submit(again, text="x")) in ("ALREADY_EXISTS", "ABORTED")
        await buffer.counts()
    finally:
        await buffer.stop()


async def test_a_repeated_lease_request_gets_the_same_leases(buffer):
    epoch = await buffer.begin_epoch()
    await buffer.go_live(epoch, 0)
    first = await buffer.lease(max_groups=1, request_id="same")
    again = await buffer.lease(max_groups=1, request_id="same")
    assert [x.lease_token for x in first] == [x.lease_token for x in again]


async def test_a_group_that_keeps_failing_is_dead_lettered(tmp_path, redis):
    buffer = await Buffer(make_spec(tmp_path, redis.port, max_attempts=2)).start()
    try:
        epoch = await buffer.begin_epoch()
        await buffer.go_live(epoch, 0)
        await run_evaluation(buffer)
        for _ in range(2):
            (lease,) = await buffer.lease(max_groups=1)
            assert lease.group_id == "g00000000"
            release = pb.ReleaseLeaseRequest(
                run_id=RUN_ID,
                request_id="x",
                lease_token=lease.lease_token,
                group_id=lease.group_id,
                error="engine on fire",
            )
            await buffer.stub.ReleaseLease(release, timeout=5)
        assert (await buffer.counts())["FAILED"] == 1
        group = await buffer.stub.GetGroup(pb.GetGroupRequest(run_id=RUN_ID, group_id="g00000000"), timeout=5)
        assert group.summary.reason == "engine on fire" and group.summary.attempts == 2
        await buffer.fill_batch(epoch)
        assert (await buffer.lease_batch(epoch)).manifest.rows, "its credit is free: the batch is filled without it"
    finally:
        await buffer.stop()


async def test_trainer_crash_replays_the_same_batches_in_order(buffer):
    epoch = await buffer.begin_epoch()
    digests = []
    for step in range(2):
        await buffer.go_live(epoch, step)
        if step == 0:
            await run_evaluation(buffer)
        await buffer.fill_batch(epoch)
        manifest = (await buffer.lease_batch(epoch)).manifest
        digests.append(manifest.digest)
        await buffer.ack(epoch, manifest)
    await buffer.commit(epoch, 1)
    assert await buffer.counts() == {"COMMITTED": 2, "TRAINED": 2}
    second = await buffer.begin_epoch(1, tuple(digests[:1]), request_id="again")
    assert second == 2
    assert await buffer.begin_epoch(1, tuple(digests[:1]), request_id="again") == 2, "a repeat opens no third epoch"
    assert await buffer.counts() == {"COMMITTED": 2, "READY": 2}
    assert await status_of(buffer.lease_batch(epoch)) == "ABORTED", "the old trainer is fenced off"
    assert await status_of(buffer.go_live(epoch, 2)) == "ABORTED"
    manifest = (await buffer.lease_batch(second)).manifest
    assert manifest.digest == digests[1] and manifest.batch == 1
    assert await status_of(buffer.begin_epoch(0)) == "FAILED_PRECONDITION", "older than the committed step"
    assert await status_of(buffer.begin_epoch(1, ("0" * 64,))) == "FAILED_PRECONDITION", "of another lineage"


async def test_checkpoint_without_commit_is_committed_at_the_next_epoch(buffer):
    epoch = await buffer.begin_epoch()
    await buffer.go_live(epoch, 0)
    await run_evaluation(buffer)
    await buffer.fill_batch(epoch)
    manifest = (await buffer.lease_batch(epoch)).manifest
    await buffer.ack(epoch, manifest)
    assert await status_of(buffer.begin_epoch(1, ("0" * 64,))) == "FAILED_PRECONDITION"
    assert await buffer.begin_epoch(1, (manifest.digest,)) == 2
    assert await buffer.counts() == {"COMMITTED": 2}


async def test_run_complete_and_stop(buffer):
    epoch = await buffer.begin_epoch()
    for step in range(3):
        await buffer.go_live(epoch, step)
        await buffer.fill_batch(epoch)
        await buffer.ack(epoch, (await buffer.lease_batch(epoch)).manifest)
    await buffer.go_live(epoch, 3)
    answer = await buffer.lease_batch(epoch)
    assert answer.no_batch_reason == pb.NO_BATCH_REASON_RUN_COMPLETE
    assert all(x.kind == pb.WORK_KIND_EVALUATION for x in await buffer.lease()), "no work beyond the run"
    for state, code in ((registry_pb.DESIRED_STATE_STOPPED, "OK"), (registry_pb.DESIRED_STATE_RUNNING, None)):
        request = registry_pb.SetDesiredStateRequest(run_id=RUN_ID, request_id="x", desired_state=state)
        assert await status_of(buffer.registry.SetDesiredState(request, timeout=5)) == (code or "FAILED_PRECONDITION")


async def test_evaluation_goes_first_and_is_written(buffer):
    epoch = await buffer.begin_epoch()
    await buffer.go_live(epoch, 0)
    leases = await buffer.lease()
    assert [lease.kind for lease in leases] == [pb.WORK_KIND_EVALUATION] * 2
    assert all(lease.required_version.step == 0 and lease.sampling_params.temperature == 0 for lease in leases)
    assert await buffer.lease() == [], "training work waits for the evaluation"
    for lease in leases:
        await buffer.submit(lease, version=(epoch, 0))
    request = pb.GetEvaluationRequest(run_id=RUN_ID, step=0)
    request.wait_timeout.FromSeconds(10)
    answer = await buffer.stub.GetEvaluation(request, timeout=15)
    assert answer.complete
    (result,) = answer.results
    assert (result.name, result.issued, result.scored, result.mean_reward) == ("held-out", 2, 2, 1.0)
    assert not result.mixed_versions and result.version.run_epoch == epoch
    path = buffer.spec.run_dir / "evaluations" / "step-000000-held-out.jsonl"
    for _ in range(100):
        if path.exists():
            break
        await asyncio.sleep(0.05)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["response"] for row in rows] == ["0", "0"] and "eval 0" in rows[0]["prompt"]
    assert len(await buffer.lease()) == 2, "then training work flows"


async def test_an_evaluation_whose_version_is_gone_fails_and_releases_training(buffer):
    epoch = await buffer.begin_epoch()
    await buffer.go_live(epoch, 0)
    (lease, _) = await buffer.lease()
    await buffer.go_live(epoch, 1)
    await buffer.until()
    renew = pb.RenewLeaseRequest(run_id=RUN_ID, request_id="r", lease_token=lease.lease_token, group_id=lease.group_id)
    status = await status_of(buffer.stub.RenewLease(renew, timeout=5))
    assert status in ("OK", "ABORTED")
    leases = await buffer.lease(wait_s=5)
    assert leases and leases[0].kind == pb.WORK_KIND_TRAINING
    answer = await buffer.stub.GetEvaluation(pb.GetEvaluationRequest(run_id=RUN_ID, step=0), timeout=5)
    assert answer.complete and answer.results[0].failed == 2


async def test_paused_run_hands_out_nothing(buffer):
    epoch = await buffer.begin_epoch()
    await buffer.go_live(epoch, 0)
    request = registry_pb.SetDesiredStateRequest(
        run_id=RUN_ID, request_id="x", desired_state=registry_pb.DESIRED_STATE_PAUSED
    )
    await buffer.registry.SetDesiredState(request, timeout=5)
    assert await buffer.lease() == []


async def test_lists_are_paged(buffer):
    epoch = await buffer.begin_epoch()
    await buffer.go_live(epoch, 0)
    await run_evaluation(buffer)
    await buffer.lease()
    seen, token = [], ""
    while True:
        request = pb.ListGroupsRequest(run_id=RUN_ID, page_size=1, page_token=token)
        page = await buffer.stub.ListGroups(request, timeout=5)
        seen += [group.group_id for group in page.groups]
        if not (token := page.next_page_token):
            break
    assert seen == ["g00000000", "g00000001"]
    bad = pb.ListGroupsRequest(run_id=RUN_ID, page_token="?")
    assert await status_of(buffer.stub.ListGroups(bad, timeout=5)) == "INVALID_ARGUMENT"


async def test_rewards_shuffled_inside_each_group_keep_their_sum(tmp_path, redis):
    buffer = await Buffer(make_spec(tmp_path, redis.port, shuffle_rewards=True, n_samples_per_prompt=8)).start()
    try:
        epoch = await buffer.begin_epoch()
        await buffer.go_live(epoch, 0)
        await run_evaluation(buffer)
        await buffer.fill_batch(epoch)
        rows = (await buffer.lease_batch(epoch)).manifest.rows
        rewards = [row.reward for row in rows]
        assert sum(rewards[:8]) == sum(rewards[8:]) == 1
        assert rewards[0] != 1 or rewards[8] != 1, "sample 0 is right, but not all rewards are where they were"
    finally:
        await buffer.stop()


async def test_every_method_answers_bad_input_with_a_clear_code(buffer):
    """Empty requests, another run, and unknown ids: never UNKNOWN, never INTERNAL."""
    for service, stub in (("BufferService", buffer.stub), ("RunRegistryService", buffer.registry)):
        module = pb if service == "BufferService" else registry_pb
        for method in module.DESCRIPTOR.services_by_name[service].methods:
            kind = getattr(module, method.input_type.name)
            call = getattr(stub, method.name)
            assert await status_of(call(kind(), timeout=5)) == "INVALID_ARGUMENT", method.name
            assert await status_of(call(kind(run_id="other"), timeout=5)) == "NOT_FOUND", method.name
            code = await status_of(call(kind(run_id=RUN_ID), timeout=70))
            assert code not in ("UNKNOWN", "INTERNAL"), method.name
    unknown = pb.GetGroupRequest(run_id=RUN_ID, group_id="g99999999")
    assert await status_of(buffer.stub.GetGroup(unknown, timeout=5)) == "NOT_FOUND"


async def test_malformed_samples_are_refused_by_field(buffer):
    epoch = await buffer.begin_epoch()
    await buffer.go_live(epoch, 0)
    await run_evaluation(buffer)
    (lease,) = await buffer.lease(max_groups=1)
    from tests.buffer_harness import make_sample

    breakages = {
        "rollout_log_probs": lambda s: s.rollout_log_probs.append(0.0),
        "loss_mask": lambda s: s.loss_mask.append(1),
        "policy_spans": lambda s: s.policy_spans[0].__setattr__("end", 5),
        "finish_reason": lambda s: s.__setattr__("finish_reason", 0),
        "sample_index": lambda s: s.__setattr__("sample_index", 9),
        "prompt_token_ids": lambda s: s.prompt_token_ids.append(1),
    }
    for field, breakage in breakages.items():
        sample = make_sample(lease, 0, "", (1, 0))
        breakage(sample)
        request = pb.SubmitSamplesRequest(
            run_id=RUN_ID, request_id="x", lease_token=lease.lease_token, group_id=lease.group_id, samples=[sample]
        )
        with pytest.raises(grpc.aio.AioRpcError, match=field) as caught:
            await buffer.stub.SubmitSamples(request, timeout=5)
        assert caught.value.code().name == "INVALID_ARGUMENT"
    assert await buffer.counts() == {"GENERATING": 1}


async def test_another_spec_under_the_same_run_id_is_refused(buffer):
    request = registry_pb.RegisterRunRequest(run_id=RUN_ID, request_id="x", spec_digest="other")
    assert await status_of(buffer.registry.RegisterRun(request, timeout=5)) == "FAILED_PRECONDITION"


async def test_a_sample_index_twice_in_one_submit_is_refused(buffer):
    epoch = await buffer.begin_epoch()
    await buffer.go_live(epoch, 0)
    await run_evaluation(buffer)
    (lease,) = await buffer.lease(max_groups=1)
    from tests.buffer_harness import make_sample

    samples = [make_sample(lease, 0, "", (1, 0)), make_sample(lease, 0, "b", (1, 0))]
    request = pb.SubmitSamplesRequest(
        run_id=RUN_ID, request_id="x", lease_token=lease.lease_token, group_id=lease.group_id, samples=samples
    )
    assert await status_of(buffer.stub.SubmitSamples(request, timeout=5)) == "INVALID_ARGUMENT"
    assert await buffer.counts() == {"GENERATING": 1}


async def test_a_data_file_that_changed_under_a_run_is_refused(tmp_path, redis):
    from services.common.errors import FailedPrecondition

    spec = make_spec(tmp_path, redis.port)
    await (await Buffer(spec).start()).stop()
    spec.data.prompt_data.write_text('{"prompt": "other", "label": "1"}\n')
    with pytest.raises(FailedPrecondition, match="data file"):
        await Buffer(make_spec(tmp_path, redis.port)).start()


async def test_unknown_enum_values_and_tokens_are_invalid_arguments(buffer):
    unknown: Any = 99
    requests = [
        buffer.stub.ListGroups(pb.ListGroupsRequest(run_id=RUN_ID, state=unknown), timeout=5),
        buffer.stub.ListBatches(pb.ListBatchesRequest(run_id=RUN_ID, page_token="LTU="), timeout=5),
        buffer.registry.SetDesiredState(
            registry_pb.SetDesiredStateRequest(run_id=RUN_ID, request_id="x", desired_state=unknown), timeout=5
        ),
    ]
    assert [await status_of(request) for request in requests] == ["INVALID_ARGUMENT"] * 3
    renew = pb.RenewLeaseRequest(run_id=RUN_ID, request_id="r", lease_token=b"\xff\xfe", group_id="g00000000")
    assert await status_of(buffer.stub.RenewLease(renew, timeout=5)) == "ABORTED"
