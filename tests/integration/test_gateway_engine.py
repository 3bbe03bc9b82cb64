"""The gateway process with the real engine process, which is killed under it.

The buffer is scripted (tests/unit/gateway_peers.py) and lives in the test; the engine's weights come from disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from flotilla.buffer.v1 import buffer_pb2, buffer_pb2_grpc, registry_pb2_grpc
from flotilla.common.v1 import common_pb2
from flotilla.rollout_gateway.v1 import gateway_pb2, gateway_pb2_grpc
from services.common.rpc import bind_server, call, duration, make_server, open_channel
from services.common.spec import RunSpec
from tests.integration.engine_stack import RUN_ID, client_of, process, sampling, write_spec
from tests.unit.gateway_peers import ScriptedBuffer

pytestmark = pytest.mark.stack

ENGINE = "tests.integration.engine_extension"
GATEWAY = "services.rollout_gateway"
GROUPS, SAMPLES, TOKENS = 6, 4, 400
GATEWAY_STOP_S = 6.0


@contextlib.asynccontextmanager
async def scripted_buffer(spec: RunSpec) -> AsyncIterator[ScriptedBuffer]:
    buffer = ScriptedBuffer()
    buffer.ttl_s = 3.0
    server = make_server()
    buffer_pb2_grpc.add_BufferServiceServicer_to_server(buffer, server)
    registry_pb2_grpc.add_RunRegistryServiceServicer_to_server(buffer, server)
    bind_server(server, "127.0.0.1", spec.services.buffer.grpc_port)
    await server.start()
    try:
        yield buffer
    finally:
        await server.stop(None)


def lease(index: int) -> buffer_pb2.WorkLease:
    return buffer_pb2.WorkLease(
        lease_token=b"t",
        group_id=f"g{index}",
        attempt=1,
        ttl=duration(3),
        prompt_token_ids=[5, 40, 77, 30 + index],
        sampling_params=sampling(1.0, TOKENS),
        pending_samples=[common_pb2.Sample(sample_index=one) for one in range(SAMPLES)],
        seed=100 * index,
    )


async def until_serving(stub: gateway_pb2_grpc.RolloutGatewayServiceAsyncStub, step: int) -> None:
    """Wait until the gateway lists an engine that serves a step."""
    revision = 0
    async with asyncio.timeout(20):
        while True:
            request = gateway_pb2.ListEnginesRequest(
                run_id=RUN_ID, known_revision=revision, wait_timeout=duration(10 if revision else 0)
            )
            listed = await call(stub.ListEngines, request, timeout_s=15, patience_s=20)
            if any(e.state == gateway_pb2.ENGINE_STATE_SERVING and e.version.step == step for e in listed.engines):
                return
            revision = listed.revision


async def generated(stub: gateway_pb2_grpc.RolloutGatewayServiceAsyncStub, tokens: int) -> None:
    """Wait until the gateway has received so many tokens."""
    async with asyncio.timeout(30):
        request = gateway_pb2.GetGatewayStatsRequest(run_id=RUN_ID)
        while (await call(stub.GetGatewayStats, request, timeout_s=5)).generated_tokens < tokens:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def check(sample: common_pb2.Sample) -> None:
    """What every finished sample must be, however it came about."""
    assert len(sample.response_token_ids) == TOKENS
    assert len(sample.rollout_log_probs) == len(sample.loss_mask) == TOKENS
    ends = [0, *(span.end for span in sample.policy_spans)]
    assert [span.begin for span in sample.policy_spans] == ends[:-1]
    assert ends[-1] == TOKENS


async def test_engine_killed_under_load_loses_no_group(tmp_path: Path, tiny_qwen3: Path):
    spec = write_spec(tmp_path, tiny_qwen3)
    spec_file = tmp_path / "run.toml"
    async with contextlib.AsyncExitStack() as stack:
        buffer = await stack.enter_async_context(scripted_buffer(spec))
        gateway = stack.enter_context(process(GATEWAY, spec_file))
        channel = await stack.enter_async_context(open_channel(spec.services.rollout_gateway.grpc))
        stub = gateway_pb2_grpc.RolloutGatewayServiceStub(channel)
        for index in range(GROUPS):
            buffer.add(lease(index))
        with process(ENGINE, spec_file) as first:
            async with client_of(spec) as client:
                assert not buffer.lease_requests
                await client.update(tiny_qwen3, 0)
                await until_serving(stub, 0)
                await generated(stub, GROUPS * SAMPLES * 20)
                first.send_signal(signal.SIGKILL)
        before = buffer.renewals
        with process(ENGINE, spec_file):
            async with client_of(spec) as client:
                await client.update(tiny_qwen3, 0)
                async with asyncio.timeout(60):
                    while sum(len(one.samples) for one in buffer.submits) < GROUPS * SAMPLES:  # noqa: ASYNC110
                        await asyncio.sleep(0.1)
                assert buffer.renewals > before
                for submit in buffer.submits:
                    for sample in submit.samples:
                        check(sample)
                assert len(buffer.submits) <= GROUPS * 2
                assert not buffer.releases
                for index in range(GROUPS):
                    buffer.add(lease(10 + index))
                await generated(stub, GROUPS * SAMPLES * (TOKENS + 30))
                begin = time.monotonic()
                gateway.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(gateway.wait, 20) == 0
                assert time.monotonic() - begin < GATEWAY_STOP_S
                assert {release.error for release in buffer.releases} == {""}
                assert len(buffer.releases) == GROUPS
