"""Tokens per second of gateway and engine over gRPC against the same vLLM called directly. Needs CUDA.

    python -m benchmarks.gpu_gateway --dtype fp8 --out gateway-fp8.json

Engine and gateway are the real services in processes of their own. By turns, the engine process calls its AsyncLLM
directly, in the most favourable way (only final outputs, a new request as soon as one ends), and the gateway leases the
same work, in groups of 8. All responses have the same length, so that direct requests stay in step: prompts are
admitted in a few large steps of the engine. Both rates are of the steady state, between two results. What stands in:
the buffer (leases without end, in this process), and the way of the weights (the engine keeps those that it starts
with, under the label of a version).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from benchmarks.models import QWEN3
from benchmarks.records import Row, need_gpus, table, write_record
from flotilla.buffer.v1 import buffer_pb2, buffer_pb2_grpc, registry_pb2_grpc
from flotilla.common.v1 import common_pb2
from services.common.rpc import bind_server, duration, make_server
from services.common.spec import RunSpec
from services.rollout_gateway.engine import main as engine_main
from services.rollout_gateway.engine.children import die_with_parent_if_spawned
from services.rollout_gateway.engine.vllm_engine import VllmEngine
from tests.conftest import free_ports
from tests.integration.engine_stack import RUN_ID, client_of, process, sampling
from tests.unit.gateway_peers import ScriptedBuffer

CONCURRENCY = 512
"""Samples in flight, and most that run at once in the engine."""
TURNS = 4
"""Measurements of each kind: one differs from the next by up to a tenth, as the host is busy or not."""
GROUP = 8
PROMPT_TOKENS = 64
NEW_TOKENS = 256
EDGE_SAMPLES = 512
"""The first results, left out: the engine fills."""
SAMPLES = 1536
TAIL_SAMPLES = 256
"""The last results, left out: it empties."""
TOTAL_SAMPLES = EDGE_SAMPLES + SAMPLES + TAIL_SAMPLES
START_S = 420.0
"""Boot with torch.compile."""
LEASE_S = 60.0
WORK_S = 180.0
"""A measurement that takes longer has failed."""
LOG_LINES = 60
MODULE = "benchmarks.gpu_gateway"
GATEWAY = "services.rollout_gateway"
DIRECT = "direct.json"


def prompt(measurement: int, index: int) -> list[int]:
    """Tokens of the prompt of a group; no two share a block of the prefix cache."""
    number = 10_000 * measurement + index
    return [1 + (number * 7919 + position * 31) % 150_000 for position in range(PROMPT_TOKENS)]


# -------------------------------------------------------------------------------------------------- engine process


class StandInReceiver:
    """Mixed into vLLM's worker: every session is complete at once, and leaves the weights as they are."""

    def weight_sync_start(self, request: bytes) -> None:
        """Nothing to receive."""

    def weight_sync_poll(self, session_id: str) -> dict[str, Any]:
        """Received."""
        return {"state": "received", "digest": "", "wire_seconds": 0.0, "error": ""}

    def weight_sync_finish(self, session_id: str) -> dict[str, Any]:
        """Nothing to load."""
        return {"load_seconds": 0.0}

    def weight_sync_abort(self, session_id: str) -> None:
        """Nothing to end."""


class MeasuredEngine(VllmEngine):
    """The engine of the service, which measures its vLLM at a SIGUSR1."""

    @classmethod
    async def start(cls, spec: RunSpec, worker_extension: str) -> VllmEngine:
        """As VllmEngine.start; each signal brings tokens per second into a file in the run's directory."""
        engine = await super().start(spec, worker_extension)
        spec.run_dir.mkdir(parents=True, exist_ok=True)
        numbers, tasks = itertools.count(), set[asyncio.Task[None]]()

        def measure() -> None:
            tasks.add(asyncio.create_task(_direct(engine._llm, next(numbers), spec.run_dir / DIRECT)))

        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, measure)
        return engine


async def _direct(llm: Any, measurement: int, result: Path) -> None:
    places, done_s = asyncio.Semaphore(CONCURRENCY), list[float]()
    requests = (_one(llm, places, done_s, prompt(measurement, i // GROUP), seed=i) for i in range(TOTAL_SAMPLES))
    await asyncio.gather(*requests)
    unfinished = result.with_suffix(".tmp")
    unfinished.write_text(json.dumps(rate(done_s)))
    unfinished.replace(result)


async def _one(llm: Any, places: asyncio.Semaphore, done_s: list[float], token_ids: list[int], seed: int) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=1.0,
        max_tokens=NEW_TOKENS,
        seed=seed,
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )
    tokens = {"type": "token", "prompt_token_ids": token_ids}
    async with places:
        async for output in llm.generate(tokens, params, f"direct-{uuid.uuid4().hex}"):
            assert len(output.outputs[0].token_ids) == NEW_TOKENS
    done_s.append(time.monotonic())


def rate(done_s: list[float]) -> float:
    """Tokens per second of the steady state, from the times at which samples were done."""
    done_s.sort()
    return SAMPLES * NEW_TOKENS / (done_s[EDGE_SAMPLES + SAMPLES - 1] - done_s[EDGE_SAMPLES - 1])


def run_engine() -> None:
    """The engine's own main, around the measured engine."""
    engine_main.VllmEngine = MeasuredEngine
    engine_main.main(f"{MODULE}.StandInReceiver")


# --------------------------------------------------------------------------------------------------------- client


def save_checkpoint(path: Path) -> None:
    """Random bf16 weights of the Qwen3-0.6B shape, with a tokenizer."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.tiny_models import save_tokenizer

    save_tokenizer(path)
    (path / "config.json").write_text(json.dumps(QWEN3["0.6b"]))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    tensors = {}
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, device="cuda")
        tensors[name] = (1 + 0.1 * noise if "norm" in name else 0.02 * noise).to(torch.bfloat16).cpu()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def make_spec(folder: Path, dtype: str) -> RunSpec:
    """The run, also as run.toml in the folder."""
    ports = free_ports(6)
    endpoints = [{"grpc_port": ports[i], "http_port": ports[i + 1]} for i in (0, 2, 4)]
    (folder / "prompts.jsonl").touch()
    spec = RunSpec.model_validate(
        {
            "run_id": RUN_ID,
            "run_dir": str(folder / "run"),
            "model": {"hf_checkpoint": str(folder / "model")},
            "data": {"prompt_data": str(folder / "prompts.jsonl"), "max_prompt_tokens": PROMPT_TOKENS},
            "rollout": {
                "num_rollout": 1,
                "rollout_batch_size": 1,
                "n_samples_per_prompt": GROUP,
                "max_response_tokens": NEW_TOKENS,
            },
            "weight_sync": {"quantization": "fp8_block_128" if dtype == "fp8" else "none"},
            "engine": {
                "max_model_len": 1024,
                "max_num_seqs": CONCURRENCY,
                "server_concurrency": CONCURRENCY,
                "gpu_memory_utilization": 0.8,
                "enforce_eager": False,
            },
            "services": {"engines": [endpoints[0]], "rollout_gateway": endpoints[1], "buffer": endpoints[2]},
        }
    )
    (folder / "run.toml").write_text(spec.to_toml())
    return spec


class Buffer(ScriptedBuffer):
    """The stand-in for the buffer; notes when results come in."""

    def __init__(self) -> None:
        super().__init__()
        self.ttl_s = LEASE_S
        self.done_s: list[float] = []
        self.measurements = TURNS  # numbers of prompts that the engine does not use for its own

    async def SubmitSamples(self, request: Any, context: Any) -> Any:
        for sample in request.samples:
            assert len(sample.response_token_ids) == len(sample.rollout_log_probs) == NEW_TOKENS
        self.done_s += [time.monotonic()] * len(request.samples)
        return buffer_pb2.SubmitSamplesResponse()

    async def asked(self) -> None:
        """Wait until a gateway asks for work."""
        self.lease_requests.clear()
        async with asyncio.timeout(WORK_S):
            while not self.lease_requests:  # noqa: ASYNC110  grows in calls of the gateway
                await asyncio.sleep(0.01)

    async def tokens_per_s(self) -> float:
        """Hand out the samples of a measurement and wait for all."""
        self.done_s.clear()
        self.measurements += 1
        for index in range(TOTAL_SAMPLES // GROUP):
            self.add(_lease(self.measurements, index))
        async with asyncio.timeout(WORK_S):
            while len(self.done_s) < TOTAL_SAMPLES:  # noqa: ASYNC110  grows in calls of the gateway
                await asyncio.sleep(0.01)
        return rate(self.done_s)


def _lease(measurement: int, index: int) -> buffer_pb2.WorkLease:
    return buffer_pb2.WorkLease(
        lease_token=b"t",
        group_id=f"g{measurement}-{index}",
        attempt=1,
        ttl=duration(LEASE_S),
        prompt_token_ids=prompt(measurement, index),
        sampling_params=sampling(1.0, NEW_TOKENS),
        pending_samples=[common_pb2.Sample(sample_index=one) for one in range(GROUP)],
        seed=GROUP * index,
    )


@contextlib.asynccontextmanager
async def served(buffer: Buffer, port: int) -> AsyncIterator[None]:
    """The stand-in buffer behind gRPC."""
    server = make_server()
    buffer_pb2_grpc.add_BufferServiceServicer_to_server(buffer, server)
    registry_pb2_grpc.add_RunRegistryServiceServicer_to_server(buffer, server)
    bind_server(server, "127.0.0.1", port)
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


async def measure(folder: Path, dtype: str) -> list[Row]:
    """A row for each turn, and one of medians."""
    spec, buffer = make_spec(folder, dtype), Buffer()
    async with served(buffer, spec.services.buffer.grpc_port):
        with process(MODULE, folder / "run.toml") as engine, process(GATEWAY, folder / "run.toml") as gateway:
            async with client_of(spec, START_S) as client:
                await client.update(Path("stand-in"), 0)
                await buffer.asked()
                rows = []
                for turn in range(TURNS):
                    direct = await measure_direct(engine.pid, spec.run_dir / DIRECT)
                    found = await measure_gateway(buffer, engine.pid, gateway.pid)
                    percent = 100 * found["gateway tok/s"] / direct
                    rows.append(
                        {
                            "engine": dtype,
                            "turn": str(turn),
                            "direct tok/s": direct,
                            **found,
                            "gateway percent": percent,
                        }
                    )
                    print(rows[-1], flush=True)
    numbers = {key: statistics.median(row[key] for row in rows) for key in rows[0] if key not in ("engine", "turn")}
    return [*rows, {"engine": dtype, "turn": "median", **numbers}]


async def measure_direct(engine: int, result: Path) -> float:
    """Tokens per second of the engine called inside its own process."""
    result.unlink(missing_ok=True)  # noqa: ASYNC240
    os.kill(engine, signal.SIGUSR1)
    async with asyncio.timeout(WORK_S):
        while not result.exists():  # noqa: ASYNC110, ASYNC240  written by another process
            await asyncio.sleep(0.1)
    return json.loads(result.read_text())  # noqa: ASYNC240


async def measure_gateway(buffer: Buffer, *processes: int) -> Row:
    """The rate through the gateway, and CPU time of engine and gateway."""
    before = list(map(cpu_seconds, processes))
    tokens_per_s = await buffer.tokens_per_s()
    spent = [cpu_seconds(pid) - b for pid, b in zip(processes, before, strict=True)]
    engine_us, gateway_us = (one / TOTAL_SAMPLES / NEW_TOKENS * 1e6 for one in spent)
    return {"gateway tok/s": tokens_per_s, "engine CPU us/token": engine_us, "gateway CPU us/token": gateway_us}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["bf16", "fp8"], default="bf16")
    parser.add_argument("--out", type=Path, required=True, help="figures as JSON")
    args = parser.parse_args()
    need_gpus(parser)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model").mkdir()
        save_checkpoint(folder / "model")
        try:
            rows = asyncio.run(measure(folder, args.dtype))
        except Exception:
            for log in sorted(folder.glob("*.log")):
                print(f"---- {log.name}", *log.read_text().splitlines()[-LOG_LINES:], sep="\n")
            raise
    print(table(rows))
    write_record(args.out, f"gateway_{args.dtype}", rows)


die_with_parent_if_spawned(__name__)
if __name__ == "__main__":
    run_engine() if "--run" in sys.argv else main()
