"""The gateway process, killed at its kill points. Buffer and engine are scripted servers (gateway_peers.py)."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from flotilla.rollout_gateway.v1 import gateway_pb2, gateway_pb2_grpc
from services.common.kill_points import VARIABLE
from services.common.rpc import call, open_channel
from services.common.spec import RunSpec
from services.rollout_gateway.codec import engine_to
from services.rollout_gateway.registry import Engine, EngineState
from tests.conftest import free_ports
from tests.integration.engine_stack import process, write_spec
from tests.unit.gateway_peers import V1, ScriptedBuffer, ScriptedEngine, make_lease, served, until

GATEWAY = "services.rollout_gateway"
START_S = 20.0


async def register(spec: RunSpec, engine_port: int) -> None:
    """Make the engine known to a gateway that starts."""
    engine = Engine("engine-0", "a", f"127.0.0.1:{engine_port}", EngineState.SERVING, V1, 1)
    request = gateway_pb2.RegisterEngineRequest(run_id=spec.run_id, engine=engine_to(engine))
    async with open_channel(spec.services.rollout_gateway.grpc) as channel:
        stub = gateway_pb2_grpc.RolloutGatewayServiceStub(channel)
        await call(stub.RegisterEngine, request, timeout_s=5, patience_s=START_S)


@pytest.mark.parametrize(
    ("point", "submitted_before"),
    [("gateway_before_submit", []), ("gateway_after_submit", [0]), ("gateway_before_release", [0])],
)
async def test_what_the_buffer_has_outlives_the_gateway(tmp_path: Path, monkeypatch, point, submitted_before):
    (tmp_path / "config.json").touch()
    spec, spec_file = write_spec(tmp_path, tmp_path), tmp_path / "run.toml"
    armed = tmp_path / "kill"
    armed.mkdir()
    (armed / point).touch()
    monkeypatch.setenv(VARIABLE, str(armed))
    (engine_port,) = free_ports(1)
    buffer, engine, lease = ScriptedBuffer(), ScriptedEngine(length=4, stops_early={0: 2}), make_lease(ttl_s=0.3)
    engine.hold_at = 3
    async with served(spec.services.buffer.grpc_port, buffer), served(engine_port, engine):
        with process(GATEWAY, spec_file) as first:
            await register(spec, engine_port)
            buffer.add(lease)
            if point == "gateway_before_release":
                await until(lambda: 0 in buffer.submitted and len(buffer.saved()[1]) == 3)
                buffer.stop("g0")
            await until(lambda: first.poll() is not None)
            assert first.returncode == -signal.SIGKILL
        assert list(buffer.submitted) == submitted_before
        assert not buffer.releases
        buffer.stops.clear()
        engine.go.set()
        with process(GATEWAY, spec_file):
            await register(spec, engine_port)
            buffer.add_again(lease)
            await until(lambda: len(buffer.submitted) == 2)
        assert list(buffer.submitted[1].response_token_ids) == [100, 101, 102, 103]
