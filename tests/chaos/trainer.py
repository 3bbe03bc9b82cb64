"""`python -m tests.chaos.trainer --run RUN.toml`: a trainer without a model, for tests.

It keeps the trainer's side of every contract, in the order of the real step clock and with its kill points, but its
weights are a list of what it was trained on, and its checkpoint is that list in a JSON file. It also publishes: a
version is LIVE when every engine that the gateway knows serves it. Neither Megatron nor weight_sync is in this fleet,
so that a restart takes half a second instead of fifteen; `test_kills` hurts the real ones.

It ends with an error if a batch is not what it must be: wrong order, missing samples, tokens that the engine did not
give, spans with gaps. Each optimizer step, those that a kill takes back too, leaves a line in `trained.jsonl`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

from flotilla.buffer.v1 import buffer_pb2, buffer_pb2_grpc, registry_pb2, registry_pb2_grpc
from flotilla.common.v1 import common_pb2
from services.common.board import StatusBoard
from services.common.kill_points import kill_point
from services.common.logs import setup_logging
from services.common.rpc import duration, new_request_id, open_channel
from services.common.service import die_with_parent
from services.common.spec import RunSpec, load_run
from services.trainer.insist import insist
from tests.chaos.responses import check_sample
from tests.chaos.versions import Versions
from tests.chaos.weights import Trained, Weights, load_newest, save

STEP_S = 0.05
POLL_S = 5.0
EVALUATED_S = 120.0


class Trainer:
    """One life of it."""

    def __init__(self, spec: RunSpec, buffer_channel: Any, gateway_channel: Any) -> None:
        self._spec, self._board = spec, StatusBoard("trainer")
        self._buffer = buffer_pb2_grpc.BufferServiceStub(buffer_channel)
        self._registry = registry_pb2_grpc.RunRegistryServiceStub(buffer_channel)
        self._versions = Versions(spec.run_id, self._board, buffer_channel, gateway_channel)
        self._weights = Weights()
        self._saved_step = self._epoch = 0

    async def run(self) -> None:
        """Train to the end of the run."""
        await self._ask(
            self._registry.RegisterRun, registry_pb2.RegisterRunRequest(**self._ids(), spec_digest=self._spec.digest())
        )
        if await self._is_stopped():
            return
        await self._start()
        await self._publish()
        while (manifest := await self._next_batch()) is not None:
            await self._do_step(manifest)
        if self._saved_step != self._weights.step:
            await self._save()
        await self._until_evaluated()
        stop = registry_pb2.SetDesiredStateRequest(**self._ids(), desired_state=registry_pb2.DESIRED_STATE_STOPPED)
        await self._ask(self._registry.SetDesiredState, stop)

    async def _start(self) -> None:
        self._weights, path = load_newest(self._spec.run_dir)
        self._saved_step = self._weights.step
        request = registry_pb2.BeginEpochRequest(
            **self._ids(),
            checkpoint_step=self._weights.step,
            checkpoint=path,
            batch_digests=[one.digest for one in self._weights.batches],
        )
        self._epoch = (await self._ask(self._registry.BeginEpoch, request)).run_epoch

    async def _publish(self) -> None:
        await self._versions.publish(common_pb2.PolicyVersion(run_epoch=self._epoch, step=self._weights.step))

    async def _next_batch(self) -> buffer_pb2.BatchManifest | None:
        while True:
            request = buffer_pb2.LeaseBatchRequest(
                **self._ids(),
                run_epoch=self._epoch,
                data_parallel_size=1,
                max_tokens_per_micro_batch=self._spec.trainer.max_tokens_per_micro_batch,
                wait_timeout=duration(POLL_S),
            )
            answer = await self._ask(self._buffer.LeaseBatch, request, poll_s=POLL_S)
            if answer.commit_requested and self._saved_step != self._weights.step:
                await self._save()
            if answer.HasField("manifest"):
                return answer.manifest
            if answer.no_batch_reason == buffer_pb2.NO_BATCH_REASON_RUN_COMPLETE or await self._is_stopped():
                return None

    async def _do_step(self, manifest: buffer_pb2.BatchManifest) -> None:
        assert manifest.batch == self._weights.step, f"batch {manifest.batch} came at step {self._weights.step}"
        samples = await self._fetch(manifest)
        for row, sample in zip(manifest.rows, samples, strict=True):
            check_sample(row, sample, self._spec.rollout.max_response_tokens)
        await asyncio.sleep(STEP_S)
        self._weights.batches.append(Trained.of(manifest.digest, samples))
        self._log(self._weights.batches[-1])
        kill_point("trainer_after_optimizer_step")
        await self._ask(
            self._buffer.AckBatch,
            buffer_pb2.AckBatchRequest(
                **self._ids(), run_epoch=self._epoch, batch=manifest.batch, digest=manifest.digest
            ),
        )
        kill_point("trainer_after_ack")
        await self._publish()
        if self._weights.step % self._spec.trainer.save_interval == 0:
            await self._save()

    async def _fetch(self, manifest: buffer_pb2.BatchManifest) -> list[common_pb2.Sample]:
        request = buffer_pb2.FetchSamplesRequest(
            run_id=self._spec.run_id, batch=manifest.batch, rows=range(len(manifest.rows))
        )
        payloads: list[bytes] = []
        while True:
            page = await self._ask(self._buffer.FetchSamples, request)
            payloads += page.payloads
            if not page.next_page_token:
                break
            request.page_token = page.next_page_token
        assert len(payloads) == len(manifest.rows), f"{len(payloads)} payloads of {len(manifest.rows)} rows"
        return [common_pb2.Sample.FromString(payload) for payload in payloads]

    def _log(self, trained: Trained) -> None:
        line = {"run_epoch": self._epoch, "batch": self._weights.step - 1, **trained.to_json()}
        with (self._spec.run_dir / "trained.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    async def _save(self) -> None:
        path = save(self._spec.run_dir, self._weights)
        kill_point("trainer_after_checkpoint")
        request = buffer_pb2.CommitRequest(
            **self._ids(), run_epoch=self._epoch, step=self._weights.step, checkpoint=path
        )
        await self._ask(self._buffer.Commit, request)
        self._saved_step = self._weights.step
        kill_point("trainer_after_commit")

    async def _until_evaluated(self) -> None:
        give_up = time.monotonic() + EVALUATED_S
        request = buffer_pb2.GetEvaluationRequest(
            run_id=self._spec.run_id, step=self._weights.step, wait_timeout=duration(POLL_S)
        )
        while not (await self._ask(self._buffer.GetEvaluation, request, poll_s=POLL_S)).complete:
            assert time.monotonic() < give_up, "the last evaluation did not end in time"

    async def _is_stopped(self) -> bool:
        run = (await self._ask(self._registry.GetRun, registry_pb2.GetRunRequest(run_id=self._spec.run_id))).run
        return run.desired_state == registry_pb2.DESIRED_STATE_STOPPED

    def _ids(self) -> dict[str, Any]:
        return {"run_id": self._spec.run_id, "request_id": new_request_id()}

    async def _ask(self, method: Any, request: Any, poll_s: float = 0.0) -> Any:
        return await insist(self._board, "a peer", method, request, poll_s=poll_s)


async def train(spec: RunSpec) -> None:
    """Until the run is complete."""
    at = spec.services
    async with open_channel(at.buffer.grpc) as buffer, open_channel(at.rollout_gateway.grpc) as gateway:
        await Trainer(spec, buffer, gateway).run()


def main() -> None:
    """Exit code 0 completes the run."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.trainer")
    parser.add_argument("--run", type=Path, required=True, help="run spec (TOML)")
    spec = load_run(parser.parse_args().run)
    die_with_parent()
    setup_logging("trainer", spec.run_id)
    asyncio.run(train(spec))


if __name__ == "__main__":
    main()
