"""The engine process around the real vLLM on a tiny model, against Hugging Face in float32.

Only the way of the weights is not the real one: they come from a checkpoint on disk (engine_extension.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from flotilla.common.v1 import common_pb2
from flotilla.rollout_gateway.v1 import engine_pb2
from services.common.errors import Aborted, FailedPrecondition, InvalidArgument, NotFound
from services.common.rpc import call
from services.common.spec import RunSpec
from tests.integration.engine_stack import RUN_ID, EngineClient, Response, client_of, process, sampling, write_spec
from tests.tiny_models import save_model

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

PROMPT = [5, 40, 77, 120, 200, 33, 18]
LOG_PROB_TOLERANCE = 1e-4
ROPE = {"rope_theta": 500.0}
"""In place of the checkpoint's, 10,000: the run's model is not quite the checkpoint's (`model.overrides`)."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    for seed in (0, 1):
        save_model(folder / f"seed{seed}", seed=seed)
    return [folder / "seed0", folder / "seed1"]


@pytest.fixture(scope="module")
def models(checkpoints: list[Path]) -> list[Any]:
    from transformers import AutoModelForCausalLM

    rope = {"rope_type": "default", **ROPE}
    return [AutoModelForCausalLM.from_pretrained(path, rope_parameters=rope).float().eval() for path in checkpoints]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory, checkpoints: list[Path]) -> Iterator[RunSpec]:
    folder = tmp_path_factory.mktemp("engine")
    model = {"hf_checkpoint": str(checkpoints[0]), "overrides": {"rope_parameters": ROPE}}
    spec = write_spec(folder, checkpoints[0], model=model)
    with process("tests.integration.engine_extension", folder / "run.toml"):
        yield spec


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(spec: RunSpec, checkpoints: list[Path]) -> AsyncIterator[EngineClient]:
    """An engine that serves checkpoint 0 as step 0."""
    async with client_of(spec) as client:
        with pytest.raises(FailedPrecondition, match="no weights"):
            await client.generate(PROMPT, sampling())
        stats = await call(client.stub.GetWeightVersion, engine_pb2.GetWeightVersionRequest(run_id=RUN_ID), timeout_s=5)
        assert not stats.HasField("version")
        await client.update(checkpoints[0], 0)
        yield client


def log_softmax(model: Any, prompt: list[int], response: list[int], temperature: float) -> list[float]:
    """Log-probability of each response token by Hugging Face."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].double()
    table = torch.log_softmax(logits / temperature, dim=-1)
    return table.gather(1, torch.tensor(response)[:, None])[:, 0].tolist()


def greedy(model: Any, prompt: list[int], length: int) -> list[int]:
    """Greedy continuation by Hugging Face, without its generate()."""
    import torch

    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(length):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


async def grown(progress: list[Response], tokens: int) -> None:
    async with asyncio.timeout(20):
        while not progress or len(progress[0].token_ids) < tokens:  # noqa: ASYNC110  grows in another task
            await asyncio.sleep(0.02)


async def test_greedy_equals_hugging_face(engine: EngineClient, models: list[Any]):
    (response,) = await engine.generate(PROMPT, sampling(max_tokens=40))
    assert response.token_ids == greedy(models[0], PROMPT, 40)
    assert response.finish == common_pb2.FINISH_REASON_LENGTH
    assert response.spans == [(0, 40, 0)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_log_probs_are_those_of_the_sampling_distribution(
    engine: EngineClient, models: list[Any], temperature: float
):
    responses = await engine.generate(PROMPT, sampling(temperature, 40), samples=4)
    assert len({tuple(response.token_ids) for response in responses}) == 4
    for response in responses:
        expected = log_softmax(models[0], PROMPT, response.token_ids, temperature)
        assert response.log_probs == pytest.approx(expected, abs=LOG_PROB_TOLERANCE)


async def test_seed_decides(engine: EngineClient):
    first = await engine.generate(PROMPT, sampling(1.0, 20), samples=3, seed=11)
    again = await engine.generate(PROMPT, sampling(1.0, 20), samples=3, seed=11)
    other = await engine.generate(PROMPT, sampling(1.0, 20), samples=3, seed=99)
    assert [one.token_ids for one in first] == [one.token_ids for one in again]
    assert not {tuple(one.token_ids) for one in first} & {tuple(one.token_ids) for one in other}


async def test_stop_token_stays_and_nothing_else_stops(engine: EngineClient, models: list[Any]):
    expected = greedy(models[0], PROMPT, 40)
    stop = expected[25]
    (response,) = await engine.generate(PROMPT, sampling(max_tokens=40, stop=(stop,)))
    assert response.token_ids == expected[: expected.index(stop) + 1]
    assert response.finish == common_pb2.FINISH_REASON_STOP
    eos = models[0].config.eos_token_id
    biased = await engine.generate(PROMPT, sampling(1.0, 400), samples=8, seed=3)
    assert any(eos in one.token_ids for one in biased)
    assert {len(one.token_ids) for one in biased} == {400}


async def test_continuation_equals_the_uninterrupted_response(engine: EngineClient):
    (whole,) = await engine.generate(PROMPT, sampling(max_tokens=40))
    (rest,) = await engine.generate(PROMPT, sampling(max_tokens=40), done=tuple(whole.token_ids[:17]))
    assert rest.token_ids == whole.token_ids[17:]
    assert rest.spans == [(0, 23, 0)]
    assert rest.log_probs == pytest.approx(whole.log_probs[17:], abs=LOG_PROB_TOLERANCE)


async def test_nothing_left_to_generate_ends_at_once(engine: EngineClient):
    (response,) = await engine.generate(PROMPT, sampling(max_tokens=3), done=(4, 5, 6))
    assert (response.token_ids, response.finish) == ([], common_pb2.FINISH_REASON_LENGTH)


async def test_context_length_bounds_the_response(engine: EngineClient):
    prompt = [9] * 490
    (response,) = await engine.generate(prompt, sampling(max_tokens=400))
    assert (len(response.token_ids), response.finish) == (10, common_pb2.FINISH_REASON_LENGTH)


async def test_many_long_prompts_with_seeds_in_one_step(engine: EngineClient):
    groups = [engine.generate([7 + i] * 450, sampling(1.0, 4), samples=8, group_id=f"long{i}") for i in range(16)]
    assert all(len(one.token_ids) == 4 for group in await asyncio.gather(*groups) for one in group)


async def test_abort_ends_streams_with_all_tokens_so_far(engine: EngineClient, models: list[Any]):
    progress: list[Response] = []
    running = asyncio.ensure_future(engine.generate(PROMPT, sampling(max_tokens=400), group_id="x", progress=progress))
    await grown(progress, 20)
    abort = engine_pb2.AbortRequest(run_id=RUN_ID, group_ids=["x", "unknown"])
    assert (await call(engine.stub.Abort, abort, timeout_s=5)).aborted_count == 1
    (response,) = await asyncio.wait_for(running, 5)
    assert response.finish == common_pb2.FINISH_REASON_ABORTED
    assert 20 <= len(response.token_ids) < 400
    assert response.token_ids == greedy(models[0], PROMPT, len(response.token_ids))
    assert (await call(engine.stub.Abort, abort, timeout_s=5)).aborted_count == 0


async def test_dropped_stream_aborts(engine: EngineClient):
    progress: list[Response] = []
    running = asyncio.ensure_future(engine.generate(PROMPT, sampling(max_tokens=400), samples=4, progress=progress))
    await grown(progress, 1)
    running.cancel()
    stats = engine_pb2.GetEngineStatsRequest(run_id=RUN_ID)
    async with asyncio.timeout(2):
        while (await call(engine.stub.GetEngineStats, stats, timeout_s=5)).running_samples:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_pause_freezes_and_resume_goes_on(engine: EngineClient, models: list[Any]):
    progress: list[Response] = []
    running = asyncio.ensure_future(engine.generate(PROMPT, sampling(max_tokens=200), progress=progress))
    await grown(progress, 16)
    for _ in range(2):
        await call(engine.stub.Pause, engine_pb2.PauseRequest(run_id=RUN_ID), timeout_s=5)
    before = await call(engine.stub.GetEngineStats, engine_pb2.GetEngineStatsRequest(run_id=RUN_ID), timeout_s=5)
    late = asyncio.ensure_future(engine.generate(PROMPT, sampling(max_tokens=2), group_id="late"))
    await asyncio.sleep(0.5)
    after = await call(engine.stub.GetEngineStats, engine_pb2.GetEngineStatsRequest(run_id=RUN_ID), timeout_s=5)
    assert before.paused
    assert after.generated_tokens == before.generated_tokens
    assert not running.done()
    assert not late.done()
    await call(engine.stub.Resume, engine_pb2.ResumeRequest(run_id=RUN_ID), timeout_s=5)
    (response,) = await running
    assert response.token_ids == greedy(models[0], PROMPT, 200)
    assert len((await late)[0].token_ids) == 2


async def test_update_under_running_samples_is_exact_to_the_token(
    engine: EngineClient, models: list[Any], checkpoints: list[Path]
):
    progress: list[Response] = []
    running = asyncio.ensure_future(engine.generate(PROMPT, sampling(1.0, 300), samples=4, seed=21, progress=progress))
    await grown(progress, 30)
    finished = await engine.update(checkpoints[1], 1)
    assert finished.pause_seconds > 0
    for response in await running:
        (first, second) = response.spans
        assert (first[0], first[2], second[1], second[2]) == (0, 0, 300, 1)
        cut = first[1]
        assert first[1] == second[0] >= 30
        old = log_softmax(models[0], PROMPT, response.token_ids, 1.0)
        new = log_softmax(models[1], PROMPT, response.token_ids, 1.0)
        assert response.log_probs[:cut] == pytest.approx(old[:cut], abs=LOG_PROB_TOLERANCE)
        assert response.log_probs[cut:] == pytest.approx(new[cut:], abs=LOG_PROB_TOLERANCE)
    (fresh,) = await engine.generate(PROMPT, sampling(max_tokens=40), required_step=1)
    assert fresh.token_ids == greedy(models[1], PROMPT, 40)
    await engine.update(checkpoints[0], 0)


async def test_other_version_is_refused(engine: EngineClient):
    with pytest.raises(FailedPrecondition, match="serves version 1:0"):
        await engine.generate(PROMPT, sampling(), required_step=5)


async def test_update_phases_are_repeatable(engine: EngineClient, checkpoints: list[Path]):
    session_id = f"{checkpoints[0]}@repeat"
    for _ in range(2):
        await engine.start_update(session_id, 0)
    with pytest.raises(FailedPrecondition, match="not complete"):
        await engine.finish(session_id)
    received = await asyncio.gather(engine.receive(session_id), engine.receive(session_id))
    assert [list(one.digests) for one in received] == [["00ff"]] * 2
    first, second = await asyncio.gather(engine.finish(session_id), engine.finish(session_id))
    assert first == second == await engine.finish(session_id)
    assert first.load_seconds == 0.5
    answer = await call(engine.stub.GetWeightVersion, engine_pb2.GetWeightVersionRequest(run_id=RUN_ID), timeout_s=5)
    assert (answer.version.step, answer.digest) == (0, "00ff")


async def test_session_that_fails_or_is_aborted_leaves_the_old_version(engine: EngineClient, models: list[Any]):
    await engine.start_update("fail-1", 7)
    with pytest.raises(Aborted, match="the sender is gone"):
        await engine.receive("fail-1")
    await engine.start_update("aborted", 7)
    abort = engine_pb2.AbortWeightUpdateRequest(run_id=RUN_ID, session_id="aborted")
    for _ in range(2):
        await call(engine.stub.AbortWeightUpdate, abort, timeout_s=5)
    for phase in (engine.receive, engine.finish):
        with pytest.raises(Aborted, match="not open"):
            await phase("aborted")
    await engine.start_update("first", 7)
    await engine.start_update("second", 7)
    with pytest.raises(Aborted, match="not open"):
        await engine.receive("first")
    (response,) = await engine.generate(PROMPT, sampling(max_tokens=8), required_step=0)
    assert response.token_ids == greedy(models[0], PROMPT, 8)


async def test_manifest(engine: EngineClient):
    request = engine_pb2.GetParameterManifestRequest(run_id=RUN_ID)
    (parameter,) = (await call(engine.stub.GetParameterManifest, request, timeout_s=5)).parameters
    assert (parameter.name, list(parameter.shape), parameter.quantisable) == ("model.norm.weight", [128], False)


async def test_malformed_requests_are_refused(engine: EngineClient):
    with pytest.raises(InvalidArgument, match="prompt is empty"):
        await engine.generate([], sampling())
    with pytest.raises(InvalidArgument, match="no sample"):
        await engine.generate(PROMPT, sampling(), samples=0)
    with pytest.raises(InvalidArgument):
        await call(engine.stub.StartWeightUpdate, engine_pb2.StartWeightUpdateRequest(run_id=RUN_ID), timeout_s=5)
    with pytest.raises(NotFound):
        await call(engine.stub.GetEngineStats, engine_pb2.GetEngineStatsRequest(run_id="other"), timeout_s=5)
