"""Weights into a real vLLM over real gloo: greedy output equals that of a fresh engine on the same weights.

Engine and sender share this process; nothing is faked. What a checkpoint becomes by quantisation is computed by the
test's own oracle.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flotilla.rollout_gateway.v1 import engine_pb2
from services.common.rpc import duration
from services.weight_sync import codec
from services.weight_sync.agent.held import Held
from services.weight_sync.agent.sender import Sender, TransferOrder
from services.weight_sync.plan import make_plan
from services.weight_sync.records import ManifestParameter, Plan, PolicyVersion, ShardSlice
from services.weight_sync.transport import serve_store
from tests import weight_sync_oracles as oracle
from tests.tiny_models import save_model

pytestmark = pytest.mark.stack
CPU = torch.device("cpu")
TIMEOUT_S = 60.0
PROMPTS = [[10, 20, 30, 40, 50], [7] * 20, list(range(100, 140)), [300, 5]]
Tokens = list[list[int]]


def start_engine(path: Path) -> Any:
    from vllm import LLM

    return LLM(
        str(path),
        dtype="float32",
        max_model_len=256,
        enforce_eager=True,
        seed=0,
        kv_cache_memory_bytes=1 << 26,
        worker_extension_cls="services.weight_sync.receiver.WeightReceiver",
    )


def greedy(engine: Any) -> Tokens:
    from vllm import SamplingParams

    settings = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    outputs = engine.generate([{"prompt_token_ids": p} for p in PROMPTS], settings, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def fresh_output(path: Path) -> Tokens:
    engine = start_engine(path)
    tokens = greedy(engine)
    engine.llm_engine.engine_core.shutdown()
    return tokens


def converted(source: Path, target: Path) -> Path:
    """A copy of a checkpoint whose linear layers went through quantisation and back, by the oracle."""
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    tensors = load_file(target / "model.safetensors")
    for name in tensors:
        if name.endswith("_proj.weight"):
            tensors[name] = torch.from_numpy(oracle.dequantize(*oracle.quantize(tensors[name].numpy())))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


class Fleet:
    """An engine, a sender beside it, and the way between them."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.sender = Sender(CPU)
        self._store = serve_store("127.0.0.1")
        self._sessions = 0
        [self.manifest] = [
            [ManifestParameter(one["name"], tuple(one["shape"]), one["dtype"], one["quantisable"]) for one in worker]
            for worker in engine.collective_rpc("weight_sync_manifest")
        ]

    def plan(self, tensors: dict[str, torch.Tensor], quantization: str) -> Plan:
        slices = [
            ShardSlice(n, tuple(x.shape), (0,) * x.dim(), tuple(x.shape), str(x.dtype)[6:]) for n, x in tensors.items()
        ]
        return make_plan([slices], self.manifest, quantization, 200_000)

    def bring(self, tensors: dict[str, torch.Tensor], quantization: str) -> tuple[str, str]:
        """Digests of sender and receiver of one whole session; the engine serves the tensors afterwards."""
        return asyncio.run(self._bring(tensors, self.plan(tensors, quantization)))

    def receive(self, plan: Plan, timeout_s: float = TIMEOUT_S) -> str:
        """Begin a session in the engine; its name."""
        self._sessions += 1
        request = engine_pb2.StartWeightUpdateRequest(
            session_id=f"s{self._sessions}",
            rendezvous_address=self.rendezvous,
            world_size=2,
            first_rank=1,
            buckets=codec.buckets_to_proto(plan.buckets),
            session_timeout=duration(timeout_s),
        )
        self.engine.collective_rpc("weight_sync_start", args=(request.SerializeToString(),))
        return request.session_id

    @property
    def rendezvous(self) -> str:
        return f"127.0.0.1:{self._store.port}"

    async def _bring(self, tensors: dict[str, torch.Tensor], plan: Plan) -> tuple[str, str]:
        session = self.receive(plan)
        order = TransferOrder(session, self.rendezvous, 0, 2, range(1, 2), plan.buckets, TIMEOUT_S)
        sent = await self.sender.run(order, Held(PolicyVersion(1, 0), (), tensors, 0.0))
        received = self.settled(session)
        assert received["state"] == "received", received["error"]
        [finished] = self.engine.collective_rpc("weight_sync_finish", args=(session,))
        assert finished["load_seconds"] > 0
        self.engine.reset_prefix_cache()
        return sent.digest, received["digest"]

    def settled(self, session: str) -> dict[str, Any]:
        give_up = time.monotonic() + TIMEOUT_S
        while True:
            [poll] = self.engine.collective_rpc("weight_sync_poll", args=(session,))
            if poll["state"] != "receiving":
                return poll
            assert time.monotonic() < give_up
            time.sleep(0.01)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("checkpoints")
    save_model(base / "a", seed=0)
    save_model(base / "b", seed=1)
    return {"a": base / "a", "b": base / "b", "b8": converted(base / "b", base / "b8")}


@pytest.fixture(scope="module")
def fresh(checkpoints: dict[str, Path]) -> dict[str, Tokens]:
    """What fresh engines say, by checkpoint; before the fleet's starts, since vLLM's process groups are global."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    return {name: fresh_output(checkpoints[name]) for name in ("b", "b8")}


@pytest.fixture(scope="module")
def fleet(checkpoints: dict[str, Path], fresh: dict[str, Tokens]) -> Iterator[Fleet]:
    engine = start_engine(checkpoints["a"])
    fresh["a"] = greedy(engine)
    assert len({str(tokens) for tokens in fresh.values()}) == 3, "the checkpoints do not differ enough"
    yield Fleet(engine)
    engine.llm_engine.engine_core.shutdown()


def weights(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


def test_the_manifest_is_the_checkpoint_with_its_linear_layers(fleet, checkpoints):
    shapes = {name: tuple(x.shape) for name, x in weights(checkpoints["a"]).items()}
    assert {p.name: p.shape for p in fleet.manifest} == shapes
    assert {p.name for p in fleet.manifest if p.quantisable} == {n for n in shapes if n.endswith("_proj.weight")}
    assert {p.dtype for p in fleet.manifest} == {"float32"}
    assert [p.name for p in fleet.manifest] == sorted(shapes)


def test_plain_there_and_back(fleet, checkpoints, fresh):
    for name in ("b", "a", "b"):
        sent, received = fleet.bring(weights(checkpoints[name]), "none")
        assert sent == received
        assert greedy(fleet.engine) == fresh[name]


def test_fp8_equals_a_converted_checkpoint(fleet, checkpoints, fresh):
    fleet.bring(weights(checkpoints["a"]), "none")
    tensors = weights(checkpoints["b"])
    sent, received = fleet.bring(tensors, "fp8_block_128")
    assert sent == received
    assert greedy(fleet.engine) == fresh["b8"]
    plan = fleet.plan(tensors, "fp8_block_128")
    assert plan.wire_bytes < 0.5 * plan.plain_bytes
    fleet.bring(weights(checkpoints["a"]), "none")
    assert greedy(fleet.engine) == fresh["a"]


def test_an_aborted_session_changes_nothing(fleet, checkpoints, fresh):
    fleet.bring(weights(checkpoints["a"]), "none")
    plan = fleet.plan(weights(checkpoints["b"]), "none")
    session = fleet.receive(plan)
    assert greedy(fleet.engine) == fresh["a"], "it serves while it waits for bytes"
    fleet.engine.collective_rpc("weight_sync_abort", args=(session,))
    assert "aborted" in fleet.settled(session)["error"]
    with pytest.raises(RuntimeError, match="nothing to load"):
        fleet.engine.collective_rpc("weight_sync_finish", args=(session,))
    with pytest.raises(RuntimeError, match="no session unknown"):
        fleet.engine.collective_rpc("weight_sync_finish", args=("unknown",))
    assert greedy(fleet.engine) == fresh["a"]
    late = fleet.receive(plan, timeout_s=0.3)
    assert fleet.settled(late)["state"] == "failed", "nobody sends: the deadline ends it"
    sent, received = fleet.bring(weights(checkpoints["b"]), "none")
    assert sent == received and greedy(fleet.engine) == fresh["b"]
