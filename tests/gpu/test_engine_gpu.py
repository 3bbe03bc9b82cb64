"""The real engine process on one GPU, in bfloat16 and in fp8, with updates by CUDA IPC from the agent's own sender.

The sender lives in the test, the engine in a process of its own, so that the GPU is shared as in a run. What an update
must give is what a fresh vLLM says that was started from the same weights as a checkpoint; each answer is computed
alone in its batch, so that even bfloat16 must agree to the token. Hugging Face in float32 tells which weights produced
a token.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file

from flotilla.common.v1 import common_pb2
from flotilla.rollout_gateway.v1 import engine_pb2
from services.common.errors import Aborted
from services.common.rpc import call
from services.common.spec import load_run
from services.weight_sync import codec
from services.weight_sync.agent.held import Held
from services.weight_sync.agent.sender import Sender, TransferOrder
from services.weight_sync.plan import make_plan
from services.weight_sync.records import ManifestParameter, Plan, PolicyVersion, ShardSlice
from services.weight_sync.transport import serve_store
from tests.gpu.fresh_engine import greedy_answers, start_greedy, write_bf16_checkpoint, write_fp8_checkpoint
from tests.integration.engine_stack import RUN_ID, EngineClient, Response, client_of, process, sampling, write_spec
from tests.tiny_models import save_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

ENGINE = "services.rollout_gateway.engine"
PROMPT = [5, 40, 77, 120, 200, 33, 18]
"""Shorter than a block of the prefix cache: every answer computes all of it."""
OTHER_PROMPTS = [[7 + i, 99, 250 - i, 31] for i in range(3)]
ANSWER_TOKENS = 48
EOS = 2
BOOT_S = 200.0
TIMEOUT_S = 30.0
BUCKET_BYTES = 200_000
LOG_PROB_TOLERANCE = 0.4
"""Nats; bfloat16 errs by about 0.1 at most, other weights by several."""
FORMS = {"bf16": "none", "fp8": "fp8_block_128"}


@dataclass
class Fleet:
    """An engine, a sender beside it, and the way between them."""

    client: EngineClient
    quantization: str
    weights: dict[str, dict[str, torch.Tensor]]
    """bfloat16 tensors by HF name, of each checkpoint."""
    manifest: list[ManifestParameter]
    sender: Sender = field(default_factory=lambda: Sender(torch.device("cuda", 0)))
    store: Any = field(default_factory=lambda: serve_store("127.0.0.1"))
    sessions: int = 0

    def plan(self, name: str) -> Plan:
        slices = [
            ShardSlice(n, tuple(x.shape), (0,) * x.dim(), tuple(x.shape), str(x.dtype).removeprefix("torch."))
            for n, x in self.weights[name].items()
        ]
        return make_plan([slices], self.manifest, self.quantization, BUCKET_BYTES)

    @property
    def rendezvous(self) -> str:
        return f"127.0.0.1:{self.store.port}"

    async def open(self, name: str, step: int) -> tuple[str, Plan]:
        """Begin a session in the engine."""
        self.sessions += 1
        session, plan = f"s{self.sessions}", self.plan(name)
        await self.client.start_update(
            session,
            step,
            rendezvous_address=self.rendezvous,
            world_size=2,
            first_rank=1,
            buckets=codec.buckets_to_proto(plan.buckets),
        )
        return session, plan

    async def bring(self, name: str, step: int = 0) -> None:
        """A whole session; the engine serves the checkpoint's weights afterwards."""
        session, plan = await self.open(name, step)
        order = TransferOrder(session, self.rendezvous, 0, 2, range(1, 2), plan.buckets, TIMEOUT_S)
        held = Held(PolicyVersion(1, step), (), dict(self.weights[name]), 0.0)
        sent, received = await asyncio.gather(self.sender.run(order, held), self.client.receive(session))
        assert list(received.digests) == [sent.digest]
        finished = await self.client.finish(session)
        print(f"{self.quantization}: load {finished.load_seconds:.3f} s, pause {finished.pause_seconds:.3f} s")

    async def answer(self, prompt: list[int], tokens: int = ANSWER_TOKENS) -> list[int]:
        """Greedy continuation up to the end of sequence, alone in its batch."""
        (response,) = await self.client.generate(prompt, sampling(max_tokens=tokens, stop=(EOS,)))
        return response.token_ids


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models, and both converted; K and V of 64 rows keep q, k and v of every layer plain."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate("ab"):
        save_model(folder / name, seed=seed)
        write_bf16_checkpoint(folder / name, folder / f"{name}-bf16")
        write_fp8_checkpoint(folder / f"{name}-bf16", folder / f"{name}-fp8")
    return {name: folder / name for name in ("a", "b", "a-fp8", "b-fp8")}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, checkpoints: dict[str, Path]) -> Iterator[dict[str, Path]]:
    """Folders of two running engines, by form."""
    folders = {}
    for form, quantization in FORMS.items():
        folders[form] = tmp_path_factory.mktemp(form)
        engine = {"dtype": "bfloat16", "gpu_memory_utilization": 0.05, "kv_cache_gib": 1.0}
        write_spec(folders[form], checkpoints["a"], weight_sync={"quantization": quantization}, engine=engine)
    with (
        process(ENGINE, folders["bf16"] / "run.toml"),
        process(ENGINE, folders["fp8"] / "run.toml"),
    ):
        yield folders


@pytest.fixture(scope="module")
def asked(checkpoints: dict[str, Path], folders: dict[str, Path]) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Fresh vLLMs, one for each checkpoint, that start beside the engines."""
    children = {name: start_greedy(path, [PROMPT], ANSWER_TOKENS, 0) for name, path in checkpoints.items()}
    yield children
    for child in children.values():
        child.kill()


@pytest.fixture(scope="module")
def fresh(checkpoints: dict[str, Path], asked: dict[str, subprocess.Popen[bytes]]) -> dict[str, list[int]]:
    """What a vLLM says that was started from each checkpoint."""
    answers = {name: greedy_answers(checkpoints[name], child)[0] for name, child in asked.items()}
    assert len({str(answer) for answer in answers.values()}) == 4, f"the checkpoints do not differ enough: {answers}"
    return answers


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleets(
    folders: dict[str, Path], checkpoints: dict[str, Path], asked: dict[str, subprocess.Popen[bytes]]
) -> AsyncIterator[dict[str, Fleet]]:
    """A client and a sender for each engine."""
    weights = {
        name: {n: x.to(torch.bfloat16) for n, x in load_file(checkpoints[name] / "model.safetensors").items()}
        for name in "ab"
    }
    clients = {form: client_of(load_run(folder / "run.toml"), BOOT_S) for form, folder in folders.items()}
    try:
        yield {
            form: Fleet(client := await one.__aenter__(), FORMS[form], weights, await manifest_of(client))
            for form, one in clients.items()
        }
    except BaseException:
        for folder in folders.values():
            print(*(folder / f"{ENGINE}.log").read_text().splitlines()[-60:], sep="\n")
        raise
    finally:
        for one in clients.values():
            await one.__aexit__(None, None, None)


async def manifest_of(client: EngineClient) -> list[ManifestParameter]:
    request = engine_pb2.GetParameterManifestRequest(run_id=RUN_ID)
    answer = await call(client.stub.GetParameterManifest, request, timeout_s=20)
    return [codec.parameter_from_proto(one) for one in answer.parameters]


@pytest.fixture(scope="module")
def models(checkpoints: dict[str, Path]) -> dict[str, Any]:
    """Hugging Face models in float32, with weights rounded to bfloat16."""
    from transformers import AutoModelForCausalLM

    return {
        name: AutoModelForCausalLM.from_pretrained(checkpoints[name], dtype=torch.bfloat16).float().eval()
        for name in "ab"
    }


def log_probs(model: Any, response: list[int]) -> torch.Tensor:
    """Log-probability of each response token at temperature 1, by Hugging Face."""
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + response])).logits[0, len(PROMPT) - 1 : -1]
    return torch.log_softmax(logits.double(), -1).gather(1, torch.tensor(response)[:, None])[:, 0]


async def grown(progress: list[Response], tokens: int) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not progress or len(progress[0].token_ids) < tokens:  # noqa: ASYNC110  grows in another task
            await asyncio.sleep(0.005)


async def test_the_manifest_says_what_the_engine_holds_as_fp8(fleets: dict[str, Fleet]):
    quantisable = {form: {p.name for p in fleet.manifest if p.quantisable} for form, fleet in fleets.items()}
    assert {name.split(".")[-2] for name in quantisable["fp8"]} == {"o_proj", "gate_proj", "up_proj", "down_proj"}
    assert quantisable["fp8"] < quantisable["bf16"]
    formats = {t.format for bucket in fleets["fp8"].plan("a").buckets for t in bucket.tensors}
    assert len(formats) == 2


@pytest.mark.parametrize("form", FORMS)
async def test_answers_are_those_of_fresh_engines(fleets: dict[str, Fleet], fresh: dict[str, list[int]], form: str):
    fleet, suffix = fleets[form], "-fp8" if form == "fp8" else ""
    for name in ("b", "a", "b"):
        await fleet.bring(name)
        assert await fleet.answer(PROMPT) == fresh[name + suffix], name


@pytest.mark.parametrize("form", FORMS)
async def test_there_and_back_gives_the_first_answers(fleets: dict[str, Fleet], form: str):
    fleet = fleets[form]
    answers = []
    for name in ("b", "a", "b"):
        await fleet.bring(name)
        answers.append([await fleet.answer(prompt) for prompt in OTHER_PROMPTS])
    assert answers[0] == answers[2] != answers[1]


async def test_an_fp8_engine_refuses_other_bytes(fleets: dict[str, Fleet]):
    fleet = fleets["fp8"]
    plain = Fleet(fleet.client, "none", fleet.weights, fleet.manifest)
    with pytest.raises(Aborted, match="must come as block fp8"):
        await plain.open("a", 1)


async def test_pause_freezes_and_resume_goes_on(fleets: dict[str, Fleet]):
    fleet = fleets["bf16"]
    await fleet.bring("a")
    (whole,) = await fleet.client.generate(PROMPT, sampling(max_tokens=400))
    progress: list[Response] = []
    running = asyncio.ensure_future(fleet.client.generate(PROMPT, sampling(max_tokens=400), progress=progress))
    await grown(progress, 1)
    await call(fleet.client.stub.Pause, engine_pb2.PauseRequest(run_id=RUN_ID), timeout_s=5)
    stats = engine_pb2.GetEngineStatsRequest(run_id=RUN_ID)
    before = await call(fleet.client.stub.GetEngineStats, stats, timeout_s=5)
    await asyncio.sleep(0.5)
    after = await call(fleet.client.stub.GetEngineStats, stats, timeout_s=5)
    assert before.paused and after.generated_tokens == before.generated_tokens and not running.done()
    await call(fleet.client.stub.Resume, engine_pb2.ResumeRequest(run_id=RUN_ID), timeout_s=5)
    (response,) = await running
    assert response.token_ids == whole.token_ids


async def test_abort_gives_partial_tokens_with_log_probs(fleets: dict[str, Fleet]):
    fleet = fleets["bf16"]
    await fleet.bring("a")
    (whole,) = await fleet.client.generate(PROMPT, sampling(max_tokens=400))
    progress: list[Response] = []
    running = asyncio.ensure_future(
        fleet.client.generate(PROMPT, sampling(max_tokens=400), group_id="x", progress=progress)
    )
    await grown(progress, 1)
    abort = engine_pb2.AbortRequest(run_id=RUN_ID, group_ids=["x"])
    assert (await call(fleet.client.stub.Abort, abort, timeout_s=5)).aborted_count == 1
    (response,) = await running
    count = len(response.token_ids)
    assert response.finish == common_pb2.FINISH_REASON_ABORTED and 1 <= count < 400
    assert response.token_ids == whole.token_ids[:count]
    assert response.log_probs == pytest.approx(whole.log_probs[:count], abs=LOG_PROB_TOLERANCE)


@pytest.mark.parametrize("form", FORMS)
async def test_a_session_cut_short_leaves_the_old_version(fleets: dict[str, Fleet], form: str):
    fleet = fleets[form]
    await fleet.bring("b", step=3)
    before = await fleet.answer(PROMPT)
    session, _ = await fleet.open("a", 4)
    assert await fleet.answer(PROMPT) == before, "it serves while it waits for bytes"
    abort = engine_pb2.AbortWeightUpdateRequest(run_id=RUN_ID, session_id=session)
    await call(fleet.client.stub.AbortWeightUpdate, abort, timeout_s=5)
    with pytest.raises(Aborted):
        await fleet.client.receive(session)
    (response,) = await fleet.client.generate(PROMPT, sampling(max_tokens=8), required_step=3)
    assert response.token_ids == before[:8]


async def test_spans_are_exact_across_an_update(fleets: dict[str, Fleet], models: dict[str, Any]):
    fleet = fleets["bf16"]
    await fleet.bring("a", step=0)
    progress: list[Response] = []
    running = asyncio.ensure_future(
        fleet.client.generate(PROMPT, sampling(1.0, 400), samples=32, seed=21, progress=progress)
    )
    await grown(progress, 1)
    await fleet.bring("b", step=1)
    told_apart = 0
    for response in await running:
        (first, second) = response.spans
        assert (first[0], first[2], second[1], second[2]) == (0, 0, 400, 1) and first[1] == second[0]
        cut, found = first[1], torch.tensor(response.log_probs, dtype=torch.float64)
        a, b = (log_probs(models[name], response.token_ids) for name in "ab")
        expected, other = torch.cat([a[:cut], b[cut:]]), torch.cat([b[:cut], a[cut:]])
        assert (found - expected).abs().max() < LOG_PROB_TOLERANCE
        near = slice(cut - 1, cut + 1)
        told_apart += int(((found - other)[near].abs() > LOG_PROB_TOLERANCE).sum())
    assert told_apart > 32, "the two models must be told apart at the cut"
