"""The audit of a ledger in a real Redis: silent about what the real buffer wrote, and a word for every breakage.

The reward service is scripted and the test plays gateway, trainer and weight_sync. Each breakage is one raw command on
a copy of the same ledger, which has groups in nearly every state.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio

from flotilla.buffer.v1 import buffer_pb2 as pb
from flotilla.common.v1 import common_pb2
from services.buffer.audit import audit
from services.buffer.ledger import Ledger
from tests.buffer_harness import RUN_ID, Buffer, ScriptedReward, make_spec, start_redis

PREFIX = f"flotilla:{{{RUN_ID}}}:"
SAME = "s"
"""A response with it is right, so that both samples of its group are."""


def reward(response: str) -> float:
    return float(response.startswith("0") or SAME in response)


def progress(index: int, begin: int, tokens: int, step: int = 0) -> pb.SampleFragment:
    version = common_pb2.PolicyVersion(run_epoch=1, step=step)
    return pb.SampleFragment(
        sample_index=index,
        begin=begin,
        response_token_ids=[5] * tokens,
        rollout_log_probs=[-1.0] * tokens,
        policy_spans=[common_pb2.PolicySpan(begin=begin, end=begin + tokens, version=version)],
    )


async def renew(buffer: Buffer, lease: Any, *fragments: pb.SampleFragment) -> None:
    request = pb.RenewLeaseRequest(
        run_id=RUN_ID,
        request_id=uuid.uuid4().hex,
        lease_token=lease.lease_token,
        group_id=lease.group_id,
        progress=fragments,
    )
    await buffer.stub.RenewLease(request, timeout=10)


async def release(buffer: Buffer, lease: Any, error: str = "") -> None:
    request = pb.ReleaseLeaseRequest(
        run_id=RUN_ID,
        request_id=uuid.uuid4().hex,
        lease_token=lease.lease_token,
        group_id=lease.group_id,
        error=error,
    )
    await buffer.stub.ReleaseLease(request, timeout=10)


async def train(buffer: Buffer, epoch: int) -> None:
    await buffer.ack(epoch, (await buffer.lease_batch(epoch)).manifest)


async def write_ledger(buffer: Buffer) -> None:
    """g0, g1 COMMITTED, g2, g3 TRAINED, g4 DROPPED, g5 PARTIAL, g6 GENERATING, g7 FAILED, g8 KEPT; and 2 evaluated."""
    epoch = await buffer.begin_epoch()
    await buffer.go_live(epoch, 0)
    evaluations, groups = [], []
    for lease in await buffer.lease():
        (evaluations if lease.kind == pb.WORK_KIND_EVALUATION else groups).append(lease)
    assert len(evaluations) == 2 and [one.group_id for one in groups] == [f"g{n:08d}" for n in range(6)]
    for lease in evaluations + groups[:4]:
        await buffer.submit(lease)
    await buffer.submit(groups[4], text=SAME)
    await renew(buffer, groups[5], progress(0, 0, 3), progress(1, 0, 2))
    await renew(buffer, groups[5], progress(0, 3, 4))
    await release(buffer, groups[5])
    await train(buffer, epoch)
    await buffer.commit(epoch, 1)
    await train(buffer, epoch)
    await buffer.go_live(epoch, 1)
    partial, generating, failing, kept = (await buffer.lease())[:4]
    await renew(buffer, partial, progress(0, 7, 1, step=1))
    await release(buffer, partial)
    await buffer.submit(generating, (0,))
    await release(buffer, failing, "out of memory")
    await buffer.submit(kept)
    await buffer.until(KEPT=1, COMMITTED=2, TRAINED=2, DROPPED=1, PARTIAL=1, FAILED=1)


def wide_spec(directory: Path, port: int) -> Any:
    """Two batches ahead, and as many groups again."""
    return make_spec(
        directory, port, num_rollout=4, max_staleness=1, partial_rollout=True, over_sampling_batch_size=4,
        dynamic_sampling_filter="nonzero_std", max_attempts=1, lease_ttl_s=600, seal_window=2,
    )  # fmt: skip


class Written:
    """A ledger at rest, and a copy of all its keys."""

    def __init__(self, directory: Path) -> None:
        self.server = start_redis(directory / "redis")
        self.spec = wide_spec(directory, self.server.port)
        asyncio.run(self._write())
        with redis.Redis(port=self.server.port) as client:
            keys: Any = client.keys(f"{PREFIX}*")
            self.copy: dict[bytes, Any] = {key: client.dump(key) for key in keys if b":request:" not in key}

    async def _write(self) -> None:
        buffer = await Buffer(self.spec, ScriptedReward(reward)).start()
        await write_ledger(buffer)
        found = await buffer.stub.AuditLedger(pb.AuditLedgerRequest(run_id=RUN_ID), timeout=30)
        assert not found.discrepancies
        await buffer.stop()

    def restore(self) -> None:
        with redis.Redis(port=self.server.port) as client, client.pipeline() as pipe:
            pipe.flushall()
            for key, content in self.copy.items():
                pipe.restore(key, 0, content)
            pipe.execute()


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Iterator[Written]:
    one = Written(tmp_path_factory.mktemp("audit"))
    yield one
    one.server.stop()


@pytest.fixture
async def raw(written):
    """A client of a fresh copy of the ledger; keys without the prefix."""
    written.restore()
    client = Raw(written.server.port)
    yield client
    await client.redis.aclose()


class Raw:
    """Raw commands on the keys of the run."""

    def __init__(self, port: int) -> None:
        self.redis: Any = redis.asyncio.Redis(port=port)

    async def __call__(self, command: str, key: str, *args: Any) -> Any:
        return await self.redis.execute_command(command, PREFIX + key, *args)

    async def audit(self) -> dict[str, str]:
        """Problems by subject, joined."""
        problems: dict[str, list[str]] = {}
        for one in (await audit(self.redis, PREFIX)).discrepancies:
            problems.setdefault(one.subject, []).append(one.problem)
        return {subject: "; ".join(found) for subject, found in problems.items()}


async def test_a_ledger_that_adds_up(raw):
    found = await audit(raw.redis, PREFIX)
    assert found.discrepancies == ()
    assert (found.groups, found.evaluation_groups, found.batches, found.committed_groups) == (found.groups, 2, 2, 2)
    assert found.groups >= 9 and found.samples == 2 + 6 * 2 + 1


def flip(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


async def flip_payload(raw: Raw) -> None:
    await raw("SET", "payload:g00000002:1", flip(await raw("GET", "payload:g00000002:1")))


async def change_row(raw: Raw) -> None:
    manifest = pb.BatchManifest.FromString(await raw("HGET", "batch:1", "manifest"))
    manifest.rows[0].advantage += 1
    await raw("HSET", "batch:1", "manifest", manifest.SerializeToString())


async def lose_a_fragment(raw: Raw) -> None:
    first, _, last = await raw("LRANGE", "partial:g00000005:0", 0, -1)
    await raw("DEL", "partial:g00000005:0")
    await raw("RPUSH", "partial:g00000005:0", first, last)


def commands(*lines: str) -> Callable[[Raw], Awaitable[None]]:
    async def run(raw: Raw) -> None:
        for line in lines:
            command, key, *args = line.split(" ")
            assert await raw(command, key, *args) is not None, line

    return run


BREAKAGES: dict[str, tuple[Callable[[Raw], Awaitable[None]], dict[str, str]]] = {
    "lost from its set": (
        commands("ZREM train:KEPT g00000008"),
        {
            "g00000008": "was issued but is in no state",
            "train:*": "1 fewer than issued",
            "run": "kept_total counts 1 more",
        },
    ),
    "in two sets": (
        commands("ZADD train:PARTIAL 8 g00000008"),
        {"g00000008": "is in PARTIAL and in KEPT", "train:*": "1 more than issued"},
    ),
    "a stranger": (
        commands("ZADD train:DROPPED 99 g00000099"),
        {"g00000099": "was never issued", "train:dropped_reasons": "1 fewer"},
    ),
    "another state": (commands("HSET group:g00000008 state SCORED"), {"g00000008": "is in KEPT, its hash says SCORED"}),
    "no hash": (
        commands("DEL group:g00000004"),
        {"g00000004": "hash does not exist", "prompt 4": "no group has it"},
    ),
    "an unknown group": (commands("HSET group:g00000077 state KEPT"), {"group:g00000077": "is in no state"}),
    "another place": (commands("ZADD train:PARTIAL 7 g00000005"), {"g00000005": "stands at 7 in train:PARTIAL"}),
    "another issue number": (commands("HSET group:g00000008 issue 3"), {"g00000008": "issue number 3"}),
    "a prompt twice": (
        commands("HSET group:g00000008 prompt 3"),
        {"g00000008": "has prompt 3, as g00000003 has", "prompt 8": "no group has it"},
    ),
    "issued too high": (
        commands("HINCRBY run issued 200"),
        {"train:*": "200 fewer than", "g00000207": "in no state"},
    ),
    "kept_total": (commands("HINCRBY run kept_total 2"), {"run": "kept_total counts 2 more"}),
    "acked": (commands("HSET run acked 3"), {"run": "acked is 3, sealed only 2"}),
    "a reason too many": (
        commands("HINCRBY train:failed_reasons MAX_ATTEMPTS 1"),
        {"train:failed_reasons": "counts 1 more than train:FAILED"},
    ),
    "no reason": (commands("HDEL group:g00000007 reason"), {"g00000007": "is FAILED without a reason"}),
    "a lease without token": (commands("HDEL group:g00000006 token"), {"g00000006": "is GENERATING without a token"}),
    "no lease": (commands("ZREM leases g00000006"), {"g00000006": "is GENERATING without a lease"}),
    "a lease of nothing": (commands("ZADD leases 1 g00000008"), {"g00000008": "has a lease but is not GENERATING"}),
    "a token of nothing": (commands("HSET group:g00000008 token t"), {"g00000008": "has a token, though it is KEPT"}),
    "a sample gone": (commands("DEL payload:g00000002:1"), {"g00000002": "sample 1 is gone"}),
    "a sample changed": (flip_payload, {"g00000002": "sample 1 does not have the content of its hash"}),
    "a sample of nobody": (commands("SET payload:g00000006:1 x"), {"payload:g00000006:1": "belongs to no sample"}),
    "a header gone": (commands("HDEL group:g00000008 h:0"), {"g00000008": "headers of samples [1], hashes of [0, 1]"}),
    "an evaluated sample gone": (
        commands("DEL payload:e000000-held-out-00001:0"),
        {"e000000-held-out-00001": "is gone"},
    ),
    "finished": (commands("HINCRBY group:g00000008 finished -1"), {"g00000008": "is KEPT with 1 samples of 2"}),
    "no rewards": (commands("HDEL group:g00000008 rewards"), {"g00000008": "is KEPT with 0 rewards of 2"}),
    "not a number": (commands("HSET group:g00000008 finished x"), {"g00000008": "cannot be read"}),
    "a batch gone": (
        commands("DEL batch:1"),
        {"batch:1": "does not exist", "g00000002": "is TRAINED but in no batch", "g00000003": "in no batch"},
    ),
    "a batch too many": (commands("HSET batch:7 state READY"), {"batch:7": "was never sealed"}),
    "a batch of another state": (
        commands("HSET batch:1 state IN_TRAINING"),
        {"batch:1": "is IN_TRAINING, but 2 batches are acknowledged", "g00000002": "its batch 1 is IN_TRAINING"},
    ),
    "committed twice": (commands("HINCRBY batch:0 commits 1"), {"batch:0": "was committed 2 times"}),
    "never committed": (commands("HSET run committed_step 2"), {"batch:1": "is TRAINED, but committed_step is 2"}),
    "trained twice": (
        commands("HSET batch:1 groups g00000001"),
        {"g00000001": "is in batch 0 and in batch 1", "g00000002": "in no batch", "batch:1": "other groups"},
    ),
    "another batch": (commands("HSET group:g00000002 batch 0"), {"g00000002": "is in batch 1, its hash says 0"}),
    "a digest": (commands("HSET batch:1 digest 00"), {"batch:1": "does not have the content of its digest"}),
    "a row": (change_row, {"batch:1": "does not have the content of its digest"}),
    "a manifest": (commands("HDEL batch:0 manifest"), {"batch:0": "has a manifest of batch 0 with digest none"}),
    "a fragment gone": (
        lose_a_fragment,
        {"g00000005": "fragment of sample 0 at token 7, not at 3"},
    ),
    "the last fragment gone": (
        commands("RPOP partial:g00000005:0"),
        {"g00000005": "7 saved tokens in 2 fragments"},
    ),
    "all fragments gone": (
        commands("DEL partial:g00000005:1"),
        {"g00000005": "sample 1 has 0 saved tokens"},
    ),
    "fragments of nobody": (commands("RPUSH partial:g00000008:0 x"), {"partial:g00000008:0": "belongs to no sample"}),
    "a broken fragment": (commands("LSET partial:g00000005:1 0 x"), {"g00000005": "a fragment that cannot be read"}),
    "saved tokens of nothing": (
        commands("HSET group:g00000008 p:0 4"),
        {"g00000008": "has saved tokens, though it is KEPT"},
    ),
    "newer than the group knows": (
        commands("HSET group:g00000005 newest 0"),
        {"g00000005": "has tokens of steps 0 to 1, its group says 0 to 0"},
    ),
    "no age": (
        commands("ZREM aging g00000005"),
        {"g00000005": "step 0 in its hash, of step -1 in aging"},
    ),
    "an age of nothing": (commands("ZADD aging 0 g00000004"), {"g00000004": "is in aging but not in play"}),
    "released too soon": (commands("ZADD retained 5 g00000008"), {"g00000008": "is in retained, though it is KEPT"}),
    "never released": (commands("ZREM retained g00000004"), {"g00000004": "is DROPPED and released, but its samples"}),
    "an evaluation group lost": (
        commands("ZREM eval:SCORED e000000-held-out-00000"),
        {"e000000-held-out-00000": "was issued but is in no state", "eval:*": "1 fewer than eval_issued"},
    ),
    "an evaluation too short": (
        commands("RPOP evaluation:0:held-out"),
        {"e000000-held-out-00001": "was never issued", "evaluation:*": "1 fewer than eval_issued"},
    ),
}


@pytest.mark.parametrize("name", BREAKAGES)
async def test_every_breakage_is_named(raw, name):
    break_it, expected = BREAKAGES[name]
    await break_it(raw)
    found = await raw.audit()
    for subject, problem in expected.items():
        assert problem in found.get(subject, ""), (subject, problem, found)


async def test_one_breakage_is_not_reported_all_over_the_ledger(raw):
    await flip_payload(raw)
    assert list(await raw.audit()) == ["g00000002"]


async def test_released_content_is_not_missed(raw, written):
    ledger = Ledger(written.spec)
    assert await ledger.expire(let_go_now=True) == (0, 6)
    assert await raw("EXISTS", "payload:g00000000:0") == 0 and await raw("EXISTS", "payload:g00000002:0") == 1
    assert await raw.audit() == {}
    await ledger.close()


async def test_a_rewound_run_adds_up(raw, written):
    ledger = Ledger(written.spec)
    assert await ledger.rewind("r", 0) == (1, 2)
    await ledger.close()
    found = await audit(raw.redis, PREFIX)
    assert found.discrepancies == () and (found.batches, found.committed_groups) == (1, 0)
    await raw("DEL", "batch:0@1")
    assert "is COMMITTED but in no batch" in (await raw.audit())["g00000000"]


async def test_an_empty_ledger_adds_up(raw):
    await raw.redis.flushall()
    found = await audit(raw.redis, PREFIX)
    assert (found.groups, found.batches, found.samples, found.discrepancies) == (0, 0, 0, ())


async def test_a_ledger_in_motion_is_not_accused(tmp_path):
    server = start_redis(tmp_path / "redis")
    buffer = await Buffer(wide_spec(tmp_path, server.port), ScriptedReward(reward)).start()
    epoch = await buffer.begin_epoch()

    async def run() -> None:
        for step in range(4):
            await buffer.go_live(epoch, step)
            for lease in await buffer.lease():
                if lease.kind == pb.WORK_KIND_TRAINING:
                    await renew(buffer, lease, progress(1, 0, 5, step))
                await buffer.submit(lease, version=(epoch, step))
            await train(buffer, epoch)
            await buffer.commit(epoch, step + 1)

    running, audits = asyncio.ensure_future(run()), 0
    while not running.done():
        found = await buffer.stub.AuditLedger(pb.AuditLedgerRequest(run_id=RUN_ID), timeout=30)
        assert not found.discrepancies, found
        audits += 1
    await running
    assert audits > 1
    await buffer.stop()
    server.stop()
