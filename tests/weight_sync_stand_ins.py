"""Stand-ins for trainer and engine that are processes, for tests and benchmarks of weight_sync on GPUs.

    python -m tests.weight_sync_stand_ins trainer ...   random weights on its device, through the real Publisher
    python -m tests.weight_sync_stand_ins engine ...    the real Reception; checks what it is given to load
    python -m tests.weight_sync_stand_ins rank ...      a rank of session "s", which connects and does nothing

They talk JSON lines on their standard output; the trainer takes a step to publish from each line of its standard input.
"""

# ruff: noqa: ASYNC110
# pyright: reportAbstractUsage=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from flotilla.common.v1 import common_pb2
from flotilla.rollout_gateway.v1 import engine_pb2, engine_pb2_grpc
from services.common.board import StatusBoard
from services.common.errors import Aborted
from services.common.rpc import bind_server, make_server, open_channel
from services.common.spec import RunSpec, load_run
from services.weight_sync import reception
from services.weight_sync.meeting import Seat
from services.weight_sync.quantize import dequantize, quantize
from services.weight_sync.reception import Reception
from services.weight_sync.transport import Transport, serve_store

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
POLL_S = 0.005
HANG_S = 55.0
Shapes = dict[str, tuple[int, ...]]


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def weights_of(shapes: Shapes, step: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The random weights of a step, the same on every GPU of a kind."""
    for number, (name, shape) in enumerate(shapes.items()):
        generator = torch.Generator(DEVICE).manual_seed(1000 * step + number)
        yield name, torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.bfloat16)


def quantised(name: str) -> bool:
    return ".layers." in name and not name.endswith("norm.weight")


class Trainer:
    """Holds the weights of a step, as bfloat16."""

    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes
        self._tensors = dict(weights_of(shapes, 0))

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._tensors.items()

    def train(self, step: int) -> None:
        for name, x in weights_of(self._shapes, step):
            self._tensors[name].copy_(x)


async def serve_trainer(spec: RunSpec, shapes: Shapes, epoch: int) -> None:
    from services.trainer.export import CudaWeights  # brings Megatron, which the others do without
    from services.trainer.exporter import Exporter
    from services.trainer.publisher import Publisher

    trainer = Trainer(shapes)
    weights = CudaWeights(trainer.tensors, DEVICE)
    agent, coordinator = (open_channel(one.grpc) for one in (spec.services.weight_agents[0], spec.services.weight_sync))
    write_s = 0.0

    async def write() -> None:
        nonlocal write_s
        begun = time.monotonic()
        await asyncio.to_thread(weights.write)
        write_s = time.monotonic() - begun

    board = StatusBoard("trainer")
    exporter = Exporter(spec.run_id, 0, board, agent, weights, write)
    publisher = Publisher(spec.run_id, board, coordinator)
    beating = asyncio.gather(exporter.beat(), publisher.beat())
    say(ready=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        await asyncio.to_thread(trainer.train, int(line))
        begun = time.monotonic()
        version = common_pb2.PolicyVersion(run_epoch=epoch, step=int(line))
        await exporter.export(version)
        await publisher.publish(version)
        say(published=int(line), write_seconds=write_s, seconds=time.monotonic() - begun)
    beating.cancel()


class Hanging(Transport):
    """Joins and connects, and takes nothing."""

    def receive(self, buffers: Any, sources: Any) -> None:
        say(connected=True)
        time.sleep(HANG_S)


class ReceivingEngine(engine_pb2_grpc.EngineServiceServicer):
    """An engine without generation."""

    def __init__(self, shapes: Shapes, quantises: bool, keep_fp8: bool) -> None:
        self._shapes, self._quantises, self._keep_fp8 = shapes, quantises, keep_fp8
        self._reception: Reception | None = None
        self._step = -1

    async def GetParameterManifest(self, request, context):
        parameters = [
            engine_pb2.ManifestParameter(name=n, shape=s, dtype="bfloat16", quantisable=quantised(n))
            for n, s in self._shapes.items()
        ]
        return engine_pb2.GetParameterManifestResponse(parameters=parameters)

    async def StartWeightUpdate(self, request, context):
        if self._reception is not None:
            self._reception.abort()
        self._step = request.version.step
        self._reception = Reception(request, 0, DEVICE)
        return engine_pb2.StartWeightUpdateResponse()

    async def ReceiveWeights(self, request, context):
        current = self._reception
        assert current is not None
        while (poll := current.poll())["state"] == "receiving":
            await asyncio.sleep(POLL_S)
        say(**poll)
        if poll["state"] == "failed":
            raise Aborted(poll["error"])
        return engine_pb2.ReceiveWeightsResponse(digests=[poll["digest"]], wire_seconds=poll["wire_seconds"])

    async def FinishWeightUpdate(self, request, context):
        assert self._reception is not None
        seconds = await asyncio.to_thread(self._reception.load, self._check, torch.bfloat16, self._keep_fp8)
        return engine_pb2.FinishWeightUpdateResponse(load_seconds=seconds, pause_seconds=seconds)

    async def AbortWeightUpdate(self, request, context):
        if self._reception is not None:
            self._reception.abort()
        return engine_pb2.AbortWeightUpdateResponse()

    def _check(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """In the place of vLLM's loading: compare with what the trainer's weights of the step must become."""
        wrong, count = [], 0
        for name, x in weights_of(self._shapes, self._step):
            for expected_name, expected in self._expected(name, x):
                found_name, found = next(tensors)
                count += 1
                if found_name != expected_name or not _same(found, expected):
                    wrong.append(f"{found_name}, where {expected_name} was expected")
        say(loaded=self._step, tensors=count, wrong=wrong, left_over=[name for name, _ in tensors])

    def _expected(self, name: str, x: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        if not (quantised(name) and self._quantises):
            return [(name, x)]
        values, scales = quantize(x)
        if self._keep_fp8:
            return [(name, values), (f"{name}_scale_inv", scales)]
        return [(name, dequantize(values, scales, torch.bfloat16))]


def _same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.dtype == expected.dtype and found.shape == expected.shape and _bytes(found).equal(_bytes(expected))


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def hang(rendezvous: str, rank: int) -> None:
    """Be rank 0, which sends and keeps the store, or rank 1 of two."""
    store = serve_store("127.0.0.1")
    rendezvous = rendezvous or f"127.0.0.1:{store.port}"
    say(rendezvous=rendezvous)
    seat = Seat(rendezvous, "s", rank, 2, rank == 0, DEVICE, time.monotonic() + HANG_S, threading.Event())
    transport = Transport(seat)
    say(connected=True)
    time.sleep(HANG_S)
    transport.close()


async def serve_engine(engine: ReceivingEngine, port: int) -> None:
    torch.empty(1, device=DEVICE)
    server = make_server()
    engine_pb2_grpc.add_EngineServiceServicer_to_server(engine, server)
    bind_server(server, "127.0.0.1", port)
    await server.start()
    say(ready=True)
    await server.wait_for_termination()


def main() -> None:
    """Be a stand-in, until the parent is gone."""
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["trainer", "engine", "rank"])
    parser.add_argument("--run", type=Path)
    parser.add_argument("--shapes", type=Path)
    parser.add_argument("--rendezvous", default="")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--epoch", type=int, default=1)
    parser.add_argument("--keep-fp8", action="store_true")
    parser.add_argument("--hang", action="store_true")
    args = parser.parse_args()
    if args.role != "trainer":
        threading.Thread(target=_end_with_parent, daemon=True).start()
    if args.role == "rank":
        hang(args.rendezvous, args.rank)
        return
    shapes = {name: tuple(shape) for name, shape in json.loads(args.shapes.read_text()).items()}
    spec = load_run(args.run)
    if args.role == "trainer":
        asyncio.run(serve_trainer(spec, shapes, args.epoch))
    else:
        if args.hang:
            reception.Transport = Hanging
        engine = ReceivingEngine(shapes, spec.weight_sync.quantization != "none", args.keep_fp8)
        asyncio.run(serve_engine(engine, args.port))


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
