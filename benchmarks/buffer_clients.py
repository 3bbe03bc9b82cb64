"""Gateways without an engine, and a trainer's reads: each public function runs in a process of its own.

Token ids, log-probs and masks of the messages are filled once; a submit changes only names and prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from benchmarks.buffer_stack import CALL_S, GROUP, POLL_S, RUN_ID
from flotilla.buffer.v1 import buffer_pb2 as pb
from flotilla.buffer.v1 import buffer_pb2_grpc
from flotilla.common.v1 import common_pb2
from services.common.rpc import CHANNEL_OPTIONS, duration, new_request_id

VOCABULARY = 150_000


@dataclass(slots=True)
class Record:
    """What the clients of one process saw."""

    lease_s: list[float] = field(default_factory=list)
    submit_s: list[float] = field(default_factory=list)
    without_work: int = 0
    """Calls of LeaseWork that found nothing at once."""
    wall_s: float = 0.0
    """Time that was measured."""
    cpu_s: dict[str, float] = field(default_factory=dict)
    """CPU time in it, by process; `clients` is that of the record."""
    payload_bytes: int = 0
    """Serialized samples that were submitted, or fetched."""
    total_bytes: int = 0
    """With those that were submitted outside the measured time."""


def make_samples(response_tokens: list[int], epoch: int, seed: int = 0) -> list[common_pb2.Sample]:
    """Finished samples of one group; ids over a vocabulary as large as Qwen's."""
    draw = random.Random(seed)
    version = common_pb2.PolicyVersion(run_epoch=epoch, step=0)
    return [
        common_pb2.Sample(
            sample_index=index,
            response_token_ids=[draw.randrange(VOCABULARY) for _ in range(tokens)],
            rollout_log_probs=[-draw.random() for _ in range(tokens)],
            loss_mask=[1] * tokens,
            policy_spans=[common_pb2.PolicySpan(begin=0, end=tokens, version=version)],
            finish_reason=common_pb2.FINISH_REASON_STOP,
        )
        for index, tokens in enumerate(response_tokens)
    ]


@contextlib.contextmanager
def measured(record: Record, pids: dict[str, int]) -> Iterator[None]:
    """Note how long the block takes, and the CPU time of these processes and this one."""

    def spent() -> dict[str, float]:
        return {name: cpu_seconds(pid) for name, pid in pids.items()} | {"clients": time.process_time()}

    wall, cpu = time.monotonic(), spent()
    yield
    record.wall_s = time.monotonic() - wall
    record.cpu_s = {name: after - cpu[name] for name, after in spent().items()}


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


class Client:
    """One gateway, with a connection of its own."""

    def __init__(self, target: str, name: str, samples: list[common_pb2.Sample]) -> None:
        options = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
        self.channel = grpc.aio.insecure_channel(target, options=options)
        self._stub: Any = buffer_pb2_grpc.BufferServiceStub(self.channel)
        self._name = name
        self._submit = pb.SubmitSamplesRequest(run_id=RUN_ID, samples=samples)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the samples that it submitted last."""
        return sum(sample.ByteSize() for sample in self._submit.samples)

    async def lease(self, wait_s: float = POLL_S, groups: int = 1) -> list[pb.WorkLease]:
        """Take groups."""
        request = pb.LeaseWorkRequest(
            run_id=RUN_ID,
            request_id=new_request_id(),
            worker_id=self._name,
            max_groups=groups,
            wait_timeout=duration(wait_s),
        )
        return list((await self._stub.LeaseWork(request, timeout=CALL_S)).leases)

    async def submit(self, lease: pb.WorkLease) -> None:
        """Hand in the samples of a group."""
        request = self._submit
        request.request_id, request.lease_token, request.group_id = new_request_id(), lease.lease_token, lease.group_id
        for sample in request.samples:
            sample.group_id, sample.prompt_token_ids[:] = lease.group_id, lease.prompt_token_ids
        await self._stub.SubmitSamples(request, timeout=CALL_S)

    async def fetch(self, batch: int, rows: range) -> int:
        """Read samples; returns their bytes."""
        request, size = pb.FetchSamplesRequest(run_id=RUN_ID, batch=batch, rows=rows), 0
        while True:
            page = await self._stub.FetchSamples(request, timeout=CALL_S)
            size += sum(map(len, page.payloads))
            if not page.next_page_token:
                return size
            request.page_token = page.next_page_token


def closed_loop(
    target: str, epoch: int, pids: dict[str, int], clients: int, response_tokens: int, seconds: float
) -> Record:
    """Each client leases a group and submits it, over and over."""

    async def work(record: Record) -> None:
        samples = make_samples([response_tokens] * GROUP, epoch)
        own = [Client(target, f"w{index}", samples) for index in range(clients)]
        with measured(record, pids):
            await asyncio.gather(*(_repeat(one, record, time.monotonic() + seconds) for one in own))
        await asyncio.gather(*(one.channel.close() for one in own))

    return _recorded(work)


async def _repeat(client: Client, record: Record, until: float) -> None:
    while time.monotonic() < until:
        begun = time.monotonic()
        leases = await client.lease()
        leased = time.monotonic()
        if not leases:
            record.without_work += 1
            continue
        await client.submit(leases[0])
        record.lease_s.append(leased - begun)
        record.submit_s.append(time.monotonic() - leased)


def open_loop(
    target: str, epoch: int, clients: int, response_tokens: int, seconds: float, groups_per_s: float
) -> Record:
    """Groups are leased at random moments, at a mean rate, whether or not earlier calls are done.

    A latency counts from the moment at which the call was due.
    """

    async def work(record: Record) -> None:
        samples, draw = make_samples([response_tokens] * GROUP, epoch), random.Random(1)
        free: asyncio.Queue[Client] = asyncio.Queue()
        own = [Client(target, f"w{index}", samples) for index in range(clients)]
        await asyncio.gather(*(one.channel.channel_ready() for one in own))
        for one in own:
            free.put_nowait(one)
        async with asyncio.TaskGroup() as calls:
            due = begun = time.monotonic()
            while (due := due + draw.expovariate(groups_per_s)) < begun + seconds:
                await asyncio.sleep(due - time.monotonic())
                calls.create_task(_once(free, record, due))
        await asyncio.gather(*(one.channel.close() for one in own))

    return _recorded(work)


async def _once(free: asyncio.Queue[Client], record: Record, due: float) -> None:
    client = await free.get()
    if leases := await client.lease(wait_s=0):
        leased = time.monotonic()
        await client.submit(leases[0])
        record.lease_s.append(leased - due)
        record.submit_s.append(time.monotonic() - leased)
    else:
        record.without_work += 1
    free.put_nowait(client)


def lease_loop(targets: list[str], groups: int) -> list[Record]:
    """Lease so many groups of each buffer, one after the other and by turns, and keep them."""
    records = [Record() for _ in targets]

    async def work() -> None:
        own = [Client(target, "w", []) for target in targets]
        await asyncio.gather(*(one.channel.channel_ready() for one in own))
        for _ in range(groups):
            for client, record in zip(own, records, strict=True):
                begun = time.monotonic()
                assert await client.lease(wait_s=0), "there is work"
                record.lease_s.append(time.monotonic() - begun)
        await asyncio.gather(*(one.channel.close() for one in own))

    asyncio.run(work())
    return records


def submit_all(
    target: str, epoch: int, pids: dict[str, int], clients: int, response_tokens: int, groups: int
) -> Record:
    """So many groups are leased, then all their samples but one submitted, which is measured, then the last ones."""

    async def work(record: Record) -> None:
        samples = [make_samples(spread(response_tokens, at / clients), epoch) for at in range(clients)]
        most, last = ([Client(target, "w", one[part]) for one in samples] for part in (slice(-1), slice(-1, None)))
        leases = await most[0].lease(groups=groups)
        assert len(leases) == groups, "there is work"
        with measured(record, pids):
            record.payload_bytes = await _share(most, leases)
        record.total_bytes = record.payload_bytes + await _share(last, leases)
        await asyncio.gather(*(one.channel.close() for one in (*most, *last)))

    return _recorded(work)


def spread(tokens: int, shift: float) -> list[int]:
    """Lengths of the samples of a group, from 3/4 to 5/4 of a mean; a shift from 0 to 1 falls between others.

    So they fit the sizes of Redis's allocator now well, now badly.
    """
    return [int(tokens * (0.75 + 0.5 * (at + shift) / GROUP)) for at in range(GROUP)]


async def _share(clients: list[Client], leases: list[pb.WorkLease]) -> int:
    """Submit the groups; returns the bytes of their samples."""

    async def some(client: Client, part: list[pb.WorkLease]) -> int:
        for lease in part:
            await client.submit(lease)
        return client.payload_bytes * len(part)

    return sum(await asyncio.gather(*(some(one, leases[at :: len(clients)]) for at, one in enumerate(clients))))


def fetch(target: str, pids: dict[str, int], batch: int, rows: int, clients: int, seconds: float) -> Record:
    """Each client reads its rows of a batch, page by page, over and over."""

    async def work(record: Record) -> None:
        own, until = [Client(target, "", []) for _ in range(clients)], time.monotonic() + seconds

        async def read(client: Client, part: range) -> None:
            while time.monotonic() < until:
                size = await client.fetch(batch, part)
                record.payload_bytes += size

        with measured(record, pids):
            await asyncio.gather(*(read(one, range(at, rows, clients)) for at, one in enumerate(own)))
        await asyncio.gather(*(one.channel.close() for one in own))

    return _recorded(work)


def _recorded(work: Callable[[Record], Coroutine[Any, Any, None]]) -> Record:
    record = Record()
    asyncio.run(work(record))
    return record
