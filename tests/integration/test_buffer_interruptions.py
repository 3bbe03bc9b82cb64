"""What becomes of work that is interrupted: saved tokens, stops, ages, drains, dead letters, rewinds, full memory.

The buffer over a real Redis and real gRPC. The reward service is scripted and the test plays gateway and trainer.
"""

from __future__ import annotations

import asyncio
from typing import Any

from redis.asyncio import Redis

from flotilla.buffer.v1 import buffer_pb2 as pb
from flotilla.buffer.v1 import registry_pb2 as registry_pb
from services.buffer.connection import memory_use
from services.common.rpc import duration
from tests.buffer_harness import RUN_ID, Buffer, ScriptedReward, make_spec, running, start_redis, status_of, train
from tests.redis_server import RedisServer

LONG = "x" * 30_000


def tokens_of(lease: Any) -> dict[int, int]:
    """Tokens that come with a lease, by sample."""
    return {one.sample_index: len(one.response_token_ids) for one in lease.pending_samples}


async def fill_memory(buffer: Buffer, share: float) -> None:
    """Lower the limit of Redis until it is full to this share."""
    await asyncio.sleep(2)  # until Redis has let go of what its clients sent
    async with Redis(port=buffer.spec.redis.port) as redis:
        used, _ = await memory_use(redis)
        await redis.config_set("maxmemory", int(used / share))


async def test_saved_tokens_outlive_the_gateway(tmp_path):
    async with running(tmp_path, lease_ttl_s=1) as buffer:
        await buffer.go_live(await buffer.begin_epoch(), 0)
        lease, _ = await buffer.lease()
        assert await buffer.renew(lease, buffer.fragment(0, 0, "ab"), buffer.fragment(1, 0, "c")) == ""
        assert await buffer.renew(lease, buffer.fragment(0, 2, "de")) == ""
        assert await buffer.renew(lease, buffer.fragment(0, 2, "de")) == "", "a repeat is the same as once"
        assert (await buffer.group(lease.group_id)).partial_tokens == 5
        assert await status_of(buffer.renew(lease, buffer.fragment(0, 5, "f"))) == "FAILED_PRECONDITION", "a gap"
        assert await status_of(buffer.renew(lease, buffer.fragment(0, 3, "f"))) == "FAILED_PRECONDITION", "no boundary"
        await buffer.until(PARTIAL=1, WAITING=1)
        assert await status_of(buffer.renew(lease, buffer.fragment(1, 1, "x"))) == "ABORTED"
        again, _ = await buffer.lease()
        assert again.group_id == lease.group_id and again.attempt == 2 and tokens_of(again) == {0: 4, 1: 1}
        (span,) = again.pending_samples[0].policy_spans
        assert (span.begin, span.end) == (0, 4) and list(again.pending_samples[0].loss_mask) == [1] * 4
        await buffer.renew(again, buffer.fragment(0, 2, "x"))
        assert (await buffer.group(lease.group_id)).partial_tokens == 4, (
            "cut back to an earlier fragment, and on from there"
        )
        await buffer.submit(again, text="done")
        assert (await buffer.group(lease.group_id)).partial_tokens == 0


async def test_a_seal_stops_what_is_in_flight_and_partial_rollout_goes_on_with_it(tmp_path):
    async with running(tmp_path, over_sampling_batch_size=4, partial_rollout=True) as buffer:
        epoch = await buffer.begin_epoch()
        await buffer.go_live(epoch, 0)
        first, second, third, fourth = await buffer.lease()
        watch = buffer.stub.WatchWork(pb.WatchWorkRequest(run_id=RUN_ID, worker_id="w"), timeout=20)
        await buffer.submit(third, (0,))
        await buffer.submit(first)
        await buffer.submit(second)
        told: Any = await watch.read()
        stops = {stop.group_id: stop.reason for stop in told.stops}
        assert stops == dict.fromkeys((third.group_id, fourth.group_id), pb.STOP_REASON_SEALED)
        watch.cancel()
        assert await buffer.renew(third, buffer.fragment(1, 0, "ab")) == "SEALED"
        await buffer.release(third, buffer.fragment(1, 2, "c"))
        await buffer.release(fourth)
        assert await buffer.counts() == {"READY": 2, "PARTIAL": 1, "WAITING": 1}
        await train(buffer, epoch)
        assert await buffer.lease() == [], "nothing is handed out before the next live version"
        await buffer.go_live(epoch, 1)
        leases = await buffer.lease()
        assert [lease.group_id for lease in leases][:2] == [third.group_id, fourth.group_id], "interrupted before fresh"
        assert tokens_of(leases[0]) == {1: 3}, "the finished sibling is not generated again"
        assert leases[0].continue_across_versions
        assert (await buffer.group(third.group_id)).oldest_step == 0
        await buffer.submit(leases[0], version=(1, 1))
        await buffer.submit(leases[1], version=(1, 1))
        manifest = await train(buffer, epoch)
        assert manifest.stats.max_age == 1 and third.group_id in {row.group_id for row in manifest.rows}


async def test_without_partial_rollout_unfinished_tokens_of_old_weights_go_and_are_counted(tmp_path):
    async with running(tmp_path, over_sampling_batch_size=3) as buffer:
        epoch = await buffer.begin_epoch()
        await buffer.go_live(epoch, 0)
        first, second, third = await buffer.lease()
        await buffer.submit(third, (0,))
        for lease in (first, second):
            await buffer.submit(lease)
        await buffer.until(READY=2)
        await buffer.release(third, buffer.fragment(1, 0, "abc"))
        await train(buffer, epoch)
        await buffer.go_live(epoch, 1)
        again = (await buffer.lease())[0]
        assert again.group_id == third.group_id and tokens_of(again) == {1: 0}
        assert dict((await buffer.stats()).discarded_tokens) == {"RESTARTED": 3}


async def test_a_trainer_crash_costs_no_token(tmp_path):
    async with running(tmp_path) as buffer:
        epoch = await buffer.begin_epoch()
        await buffer.go_live(epoch, 0)
        await buffer.fill_batch(epoch)
        manifest = await train(buffer, epoch)
        await buffer.go_live(epoch, 1)
        lease, other = await buffer.lease()
        second = await buffer.begin_epoch()
        assert await buffer.renew(lease, buffer.fragment(0, 0, "ab", (1, 1))) == "SEALED", "weights will go back"
        await buffer.release(lease)
        await buffer.release(other)
        await buffer.go_live(second, 0)
        assert await buffer.lease() == []
        assert (await train(buffer, second)).digest == manifest.digest
        await buffer.go_live(second, 1)
        again = (await buffer.lease())[0]
        assert again.group_id == lease.group_id and tokens_of(again) == {0: 2, 1: 0}
        third = await buffer.begin_epoch(1, (manifest.digest,))
        assert await buffer.renew(again) == "", "a trainer that starts from where it was stops nothing"
        await buffer.go_live(third, 1)
        await buffer.submit(again, version=(2, 1))
        assert not (await buffer.stats()).discarded_tokens


AGES = {"over_sampling_batch_size": 4, "partial_rollout": True, "max_sample_age": 1}


async def hold_back_one_group(buffer: Buffer) -> tuple[int, Any]:
    """Interrupt a group in batch 0; finish all others of batch 1 while it is under way again. Epoch and its lease."""
    epoch = await buffer.begin_epoch()
    await buffer.go_live(epoch, 0)
    first, second, third, fourth = await buffer.lease()
    for lease in (first, second):
        await buffer.submit(lease)
    await buffer.until(READY=2)
    await buffer.release(third, buffer.fragment(0, 0, "a"))
    await buffer.release(fourth)
    await train(buffer, epoch)
    await buffer.go_live(epoch, 1)
    late, *others = await buffer.lease()
    assert late.group_id == third.group_id and len(others) >= 2, "enough for a batch without it"
    for lease in others:
        await buffer.submit(lease, version=(1, 1))
    return epoch, late


async def test_the_seal_waits_for_what_would_be_too_old(tmp_path):
    async with running(tmp_path, **AGES, age_wait_s=60) as buffer:
        epoch, late = await hold_back_one_group(buffer)
        await asyncio.sleep(1.5)
        counts = await buffer.counts()
        assert counts["KEPT"] >= 2 and "READY" not in counts, "no seal without it"
        await buffer.submit(late, version=(1, 1))
        manifest = await train(buffer, epoch)
        assert late.group_id in {row.group_id for row in manifest.rows} and not (await buffer.stats()).stale


async def test_after_the_deadline_it_is_stale_and_counted(tmp_path):
    async with running(tmp_path, **AGES, age_wait_s=0.5) as buffer:
        epoch, late = await hold_back_one_group(buffer)
        await train(buffer, epoch)
        await buffer.release(late)
        await buffer.until(STALE=1)
        assert (await buffer.group(late.group_id)).reason == "AGE"
        assert dict((await buffer.stats()).stale) == {"AGE": 1}


async def test_with_staleness_one_the_next_batch_is_generated_meanwhile_and_a_seal_stops_nothing(tmp_path):
    async with running(tmp_path, max_staleness=1) as buffer:
        epoch = await buffer.begin_epoch()
        await buffer.go_live(epoch, 0)
        leases = await buffer.lease()
        assert len(leases) == 4, "two batches"
        for lease in leases[:2]:
            await buffer.submit(lease)
        await buffer.until(READY=2, GENERATING=2)
        assert await buffer.renew(leases[2]) == ""
        assert await buffer.lease() == []
        for lease in leases[2:]:
            await buffer.submit(lease)
        await train(buffer, epoch)
        await buffer.go_live(epoch, 1)
        assert len(await buffer.lease()) == 2, "the third and last batch"
        assert (await train(buffer, epoch)).stats.max_age == 1


async def test_a_dead_letter_keeps_its_last_error_and_gives_its_credit_back(tmp_path):
    async with running(tmp_path, max_attempts=2) as buffer:
        epoch = await buffer.begin_epoch()
        await buffer.go_live(epoch, 0)
        bad, good = await buffer.lease()
        await buffer.release(bad, error="boom")
        (bad,) = await buffer.lease()
        await buffer.release(bad, error="boom again")
        (fresh,) = await buffer.lease()
        for lease in (good, fresh):
            await buffer.submit(lease)
        await buffer.until(READY=2, FAILED=1)
        dead = await buffer.group(bad.group_id)
        assert (dead.reason, dead.attempts) == ("boom again", 2)


async def test_a_drained_gateway_gives_its_work_back_and_gets_no_more(tmp_path):
    async with running(tmp_path) as buffer:
        await buffer.go_live(await buffer.begin_epoch(), 0)
        lease, other = await buffer.lease()
        request = pb.DrainWorkRequest(run_id=RUN_ID, request_id="d", worker_id="w", wait_timeout=duration(10))
        drain = asyncio.ensure_future(buffer.stub.DrainWork(request, timeout=20))
        watch = buffer.stub.WatchWork(pb.WatchWorkRequest(run_id=RUN_ID, worker_id="w"), timeout=20)
        told: Any = await watch.read()
        assert {stop.reason for stop in told.stops} == {pb.STOP_REASON_DRAINING}
        watch.cancel()
        listed = (await buffer.stub.ListLeases(pb.ListLeasesRequest(run_id=RUN_ID), timeout=10)).leases
        assert {one.stop_reason for one in listed} == {pb.STOP_REASON_DRAINING} and listed[0].worker_id == "w"
        await buffer.release(lease, buffer.fragment(0, 0, "ab"))
        await buffer.release(other)
        assert (await drain).remaining_leases == 0
        assert await buffer.lease() == []
        assert await buffer.counts() == {"PARTIAL": 1, "WAITING": 1}


async def test_a_rewind_issues_the_prompts_of_committed_batches_anew(tmp_path):
    async with running(tmp_path) as buffer:
        epoch = await buffer.begin_epoch()
        manifests = []
        for step in range(2):
            await buffer.go_live(epoch, step)
            await buffer.fill_batch(epoch)
            manifests.append(await train(buffer, epoch))
        await buffer.commit(epoch, 2)
        await buffer.go_live(epoch, 2)
        lease, _ = await buffer.lease()
        await buffer.renew(lease, buffer.fragment(0, 0, "ab", (1, 2)))
        digests = tuple(one.digest for one in manifests)
        assert await status_of(buffer.begin_epoch(1, digests[:1])) == "FAILED_PRECONDITION", "not by accident"
        request = registry_pb.RewindRunRequest(run_id=RUN_ID, request_id="back", step=1)
        for _ in range(2):
            answer = await buffer.registry.RewindRun(request, timeout=10)
            assert (answer.lineage, answer.reissued_groups) == (1, 2), "a repeat rewinds no further"
        assert await status_of(buffer.lease_batch(epoch)) == "ABORTED", "the trainer is fenced off"
        assert await buffer.renew(lease) == "SEALED", "the weights of step 1 come first"
        await buffer.release(lease)
        assert await buffer.lease() == []
        second = await buffer.begin_epoch(1, digests[:1])
        await buffer.go_live(second, 1)
        old = [await buffer.group(group_id) for group_id in ("g00000002", "g00000003")]
        new = [await buffer.group(group_id) for group_id in ("g00000006", "g00000007")]
        assert [one.prompt_index for one in new] == [one.prompt_index for one in old]
        assert {one.state for one in old} == {pb.GROUP_STATE_COMMITTED}
        assert await buffer.counts() == {"COMMITTED": 4, "GENERATING": 1, "PARTIAL": 1, "WAITING": 2}
        assert [one.group_id for one in await buffer.lease()] == [lease.group_id], "only as many as the bound allows"
        assert dict((await buffer.stats()).discarded_tokens) == {"RESTARTED": 2}, "tokens of weights that are gone"
        assert (await buffer.stats()).lineage == 1


async def test_a_full_redis_asks_for_a_commit_and_goes_on(tmp_path):
    directory = tmp_path / "redis"
    directory.mkdir()
    server = RedisServer(directory, maxmemory="24mb")
    async with running(tmp_path, server, num_rollout=40, max_response_tokens=32_768) as buffer:
        epoch = await buffer.begin_epoch()
        requests = step = 0
        await buffer.go_live(epoch, 0)
        while step < 40:
            await buffer.fill_batch(epoch, text=LONG)
            answer = await buffer.lease_batch(epoch, wait_s=1)
            if answer.commit_requested:
                requests += 1
                await buffer.commit(epoch, step)
            if answer.HasField("manifest"):
                await buffer.ack(epoch, answer.manifest)
                step += 1
                await buffer.go_live(epoch, step)
        stats = await buffer.stats()
        assert 1 <= requests <= 12 and stats.sealed_batches == 40
        assert stats.memory_bytes < stats.memory_limit_bytes == 24 << 20


async def test_a_full_redis_issues_nothing_fresh_until_a_commit(tmp_path):
    async with running(tmp_path, max_staleness=2, max_response_tokens=32_768) as buffer:
        epoch = await buffer.begin_epoch()
        await buffer.go_live(epoch, 0)
        for lease in await buffer.lease(max_groups=2):
            await buffer.submit(lease, text=LONG)
        await buffer.until(READY=2)
        await fill_memory(buffer, 0.9)
        for _ in range(50):
            if (await buffer.stats()).back_pressure:
                break
            await asyncio.sleep(0.1)
        assert await buffer.lease() == []
        manifest = (await buffer.lease_batch(epoch)).manifest
        await buffer.ack(epoch, manifest)
        assert (await buffer.lease_batch(epoch, wait_s=0)).commit_requested
        await buffer.commit(epoch, 1)
        await buffer.until(COMMITTED=2)
        assert len(await buffer.lease(max_groups=1)) == 1, "a commit can free nothing more: on with it"


async def test_a_filter_that_fails_costs_its_group_and_not_the_run(tmp_path):
    async with running(tmp_path, dynamic_sampling_filter=f"{__name__}:filter_that_fails_once") as buffer:
        epoch = await buffer.begin_epoch()
        await buffer.go_live(epoch, 0)
        await buffer.fill_batch(epoch)
        found = await buffer.until(FAILED=1)
        while found.get("READY", 0) < 2:
            await buffer.fill_batch(epoch)
            found = await buffer.counts()
        failed = await buffer.group("g00000000")
        assert "no luck" in failed.reason and dict((await buffer.stats()).failed) == {"FILTER": 1}


def filter_that_fails_once(group: Any) -> tuple[bool, str]:
    """A hook."""
    if group.group_id == "g00000000":
        raise ValueError("no luck")
    return True, ""


async def test_a_buffer_filter_chooses_what_goes_on(tmp_path):
    options = {"over_sampling_batch_size": 5, "partial_rollout": True, "buffer_filter": f"{__name__}:youngest_first"}
    async with running(tmp_path, **options) as buffer:
        epoch = await buffer.begin_epoch()
        await buffer.go_live(epoch, 0)
        leases = await buffer.lease()
        for lease in leases[:2]:
            await buffer.submit(lease)
        await buffer.until(READY=2)
        for lease in leases[2:]:
            await buffer.release(lease, buffer.fragment(0, 0, "a"))
        await train(buffer, epoch)
        await buffer.go_live(epoch, 1)
        (chosen,) = await buffer.lease(max_groups=1)
        assert chosen.group_id == leases[-1].group_id
        assert SEEN[-1] == 1, "it sees the true step"


SEEN: list[int] = []


def youngest_first(step: int, groups: Any, wanted: int) -> list[str]:
    """A hook."""
    SEEN.append(step)
    return [group.group_id for group in reversed(groups)]


async def test_an_evaluation_outlives_a_trainer_that_goes_back(tmp_path):
    server = start_redis(tmp_path / "redis")
    buffer = await Buffer(make_spec(tmp_path, server.port), ScriptedReward(lambda text: 1.0)).start()
    try:
        epoch = await buffer.begin_epoch()
        await buffer.go_live(epoch, 0)
        for step in range(2):
            while leases := await buffer.lease():
                for lease in leases:
                    await buffer.submit(lease, version=(epoch, step))
            await train(buffer, epoch)
            await buffer.go_live(epoch, step + 1)
        (lease, _) = await buffer.lease()
        assert lease.kind == pb.WORK_KIND_EVALUATION and lease.required_version.step == 2
        second = await buffer.begin_epoch()
        await buffer.go_live(second, 0)
        assert await buffer.renew(lease) == "VERSION_GONE"
        await buffer.release(lease)
        for step in range(2):
            await train(buffer, second)
            await buffer.go_live(second, step + 1)
        again = await buffer.lease()
        assert lease.group_id in {one.group_id for one in again}
        assert {(one.required_version.run_epoch, one.required_version.step) for one in again} == {(second, 2)}
    finally:
        await buffer.stop()
        server.stop()


def test_what_cannot_work_is_refused(tmp_path):
    for options, words in {
        (("over_sampling_batch_size", 1),): "over_sampling_batch_size",
        (("partial_rollout", True), ("max_sample_age", 0)): "max_sample_age",
        (("over_sampling_batch_size", 4), ("max_sample_age", 0)): "max_sample_age",
        (("max_staleness", 2), ("max_sample_age", 1)): "max_sample_age",
        (("mask_offpolicy_in_partial_rollout", True),): "partial_rollout",
        (("dynamic_sampling_filter", "no such"),): "dynamic_sampling_filter",
    }.items():
        try:
            make_spec(tmp_path, 1, **dict(options))
        except ValueError as error:
            assert words in str(error)
        else:
            raise AssertionError(options)
