"""Graders by row, and graders of the user's own, through the real service; nothing is faked.

The user's module lies in a folder on PYTHONPATH, as a user's would; the remote service is one of ours.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from flotilla.reward.v1 import reward_pb2 as pb
from flotilla.reward.v1 import reward_pb2_grpc as pb_grpc
from services.common.errors import InvalidArgument
from services.common.rpc import call, open_channel
from services.common.spec import BUILT_IN_GRADERS
from tests.reward_service import START_S, running

DEADLINE_S = 1.0
VALUES = {"timeout": -0.5, "error": -0.25}
REWARDS = """
import asyncio

async def judge(item):
    if item.response == "hang":
        while True:
            pass
    if item.response == "wait":
        await asyncio.sleep(3600)
    if item.response == "fail":
        raise RuntimeError("no judge")
    return {"reward": item.metadata["worth"] + len(item.prompt)}

def rank(items):
    if any(one.response == "fail" for one in items):
        return [1.0]
    longest = max(len(one.response) for one in items)
    return [len(one.response) / longest for one in items]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("rewards")


@pytest.fixture(scope="module")
def address(folder):
    (folder / "my_rewards.py").write_text(REWARDS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        own = {"grader": "my_rewards:judge", "custom_workers": 4, "custom_timeout_s": DEADLINE_S, "values": VALUES}
        with running(folder, **own) as (_, address):
            yield address


@pytest.fixture
async def stub(address):
    async with open_channel(address) as channel:
        client = pb_grpc.RewardServiceStub(channel)
        await call(client.ListGraders, pb.ListGradersRequest(), timeout_s=5, patience_s=START_S)
        yield client


async def grade(stub, *items: pb.GradeItem, grader: str = "my_rewards:judge") -> list[pb.GradedItem]:
    answer = await call(stub.Grade, pb.GradeRequest(grader=grader, items=items), timeout_s=30)
    return list(answer.items)


@asynccontextmanager
async def serving(folder: Path, **reward: object) -> AsyncIterator[pb_grpc.RewardServiceAsyncStub]:
    """The stub of a service of its own that is ready."""
    with running(folder, **reward) as (_, address):
        async with open_channel(address) as channel:
            client = pb_grpc.RewardServiceStub(channel)
            await call(client.ListGraders, pb.ListGradersRequest(), timeout_s=5, patience_s=START_S)
            yield client


def own(response: str) -> pb.GradeItem:
    return pb.GradeItem(response=response, prompt="ab", metadata=json.dumps({"worth": 0.5}))


async def test_a_function_of_the_users_own_cannot_hang_the_service(stub, folder):
    began = time.monotonic()
    graded = await grade(stub, own("hang"), own("wait"), own("fail"), own("good"))
    assert time.monotonic() - began < DEADLINE_S + 2
    assert [pb.Verdict.Name(one.verdict) for one in graded] == [
        *("VERDICT_TIMEOUT", "VERDICT_TIMEOUT", "VERDICT_ERROR", "VERDICT_SCORED")
    ]
    assert [one.value for one in graded] == [-0.5, -0.5, -0.25, 2.5]
    log = (folder / "log").read_text()
    assert "my_rewards:judge: RuntimeError: no judge (my_rewards.py:11)" in log
    assert "my_rewards:judge: no answer within 1 s" in log


async def test_each_item_can_name_its_grader(stub):
    graded = await grade(
        stub,
        pb.GradeItem(response=r"\boxed{x y}", label="y z", grader="boxed_f1"),
        own("good"),
        pb.GradeItem(response=r"\boxed{x+x}", label="2x", grader="math"),
    )
    assert [one.grader for one in graded] == ["boxed_f1", "my_rewards:judge", "math"]
    assert all(one.grader_version for one in graded)
    assert [one.value for one in graded] == [0.5, 2.5, 1.0]


BULLETS = {"instruction_id_list": ["detectable_format:number_bullet_lists"], "kwargs": [{"num_bullets": 1}]}
NASTY = {
    "hashes": ("deepscaler_plus", "</think>" + "#" * 2040 + " " * 2040 + "}", "5", {}),
    "dots": ("gpqa", "." * 4000, "A", {}),
    "a label of dots": ("gpqa", "A", "." * 8000, {}),
    "lines": ("ifbench", "a" + "\n" * 9900 + "a", "", BULLETS),
    "a title": ("ifbench", "<<" + " " * 9900, "", {"instruction_id_list": ["detectable_format:title"]}),
    "a fence": ("ifbench", "1" + " " * 9900 + "x", "", {"instruction_id_list": ["detectable_format:json_format"]}),
    "a label of boxes": ("deepscaler", "</think>\\boxed{1}", "\\boxed{" + "{}" * 500_000 + "}", {}),
}


@pytest.mark.parametrize("name", NASTY)
async def test_nothing_that_is_graded_at_once_takes_long(stub, name):
    grader, response, label, metadata = NASTY[name]
    item = pb.GradeItem(response=response, label=label, grader=grader, metadata=json.dumps(metadata))
    began = time.monotonic()
    await grade(stub, *[item] * 8)
    assert time.monotonic() - began < 1


ODD = [
    ("ifbench", {"instruction_id_list": 5}),
    ("ifbench", {"instruction_id_list": ["length_constraints:number_words"], "kwargs": [{"num_words": float("inf")}]}),
    ("gpqa", {"choices": 5}),
    ("gpqa", {"choices": ["x"] * 30}),
]


@pytest.mark.parametrize(("grader", "metadata"), ODD)
async def test_metadata_that_make_no_sense_cost_only_their_item(stub, grader, metadata):
    odd = pb.GradeItem(response="r", label="l", grader=grader, metadata=json.dumps(metadata))
    graded = await grade(stub, odd, own("good"))
    assert (graded[0].verdict, graded[1].value) == (pb.VERDICT_UNGRADABLE, 2.5)


async def test_metadata_too_deep_for_a_group_cost_only_that_group(folder, tmp_path, monkeypatch, address):
    monkeypatch.setenv("PYTHONPATH", str(folder))
    deep = '{"a":' + "[" * 960 + "]" * 960 + "}"
    async with serving(tmp_path, grader="my_rewards:rank", custom_per_group=True, values=VALUES) as stub:
        items = [pb.GradeItem(response="x", group_id="a", metadata=deep), pb.GradeItem(response="x", group_id="b")]
        graded = await grade(stub, *items, grader="my_rewards:rank")
    assert graded[1].value == 1.0


async def test_a_call_with_several_graders_may_fill_an_empty_queue(tmp_path):
    async with serving(tmp_path, max_queue=2) as stub:
        items = [
            pb.GradeItem(response=f"</think>\\boxed{{x+{n}}}", label=f"{n}+x+0", grader=grader)
            for grader in ("math", "deepscaler")
            for n in range(2)
        ]
        assert [one.value for one in await grade(stub, *items, grader="math")] == [1.0] * 4


@pytest.mark.parametrize(
    "broken", [{"grader": "guess"}, {"grader": "os:getcwd"}, {"metadata": "[1]"}, {"metadata": "{"}]
)
async def test_an_item_that_cannot_be_graded_is_refused(stub, broken):
    with pytest.raises(InvalidArgument):
        await grade(stub, pb.GradeItem(response="r", label="l", **broken))


async def test_the_list_names_the_graders_with_their_versions(stub):
    listed = (await call(stub.ListGraders, pb.ListGradersRequest(), timeout_s=5)).graders
    assert {*BUILT_IN_GRADERS, "my_rewards:judge"} == {one.name for one in listed}
    assert all(one.version for one in listed) and all(len(one.digest) == 64 for one in listed if ":" not in one.name)


async def test_a_slow_grader_does_not_hold_up_the_others_of_its_batch(stub):
    answering = asyncio.create_task(grade(stub, own("wait"), pb.GradeItem(response="x", label="x", grader="f1")))
    began = time.monotonic()
    await grade(stub, pb.GradeItem(response=r"\boxed{x+x}", label="2x", grader="math"))
    assert time.monotonic() - began < DEADLINE_S / 2
    assert [one.value for one in await answering] == [-0.5, 1.0]


async def test_a_function_for_groups_sees_each_group_whole(folder, tmp_path, monkeypatch, address):
    monkeypatch.setenv("PYTHONPATH", str(folder))
    async with serving(tmp_path, grader="my_rewards:rank", custom_per_group=True, values=VALUES) as stub:
        said = [("a", "xxxx"), ("b", "x"), ("a", "x"), ("b", "xx"), ("c", "fail"), ("c", "x")]
        items = [pb.GradeItem(response=response, group_id=group) for group, response in said]
        graded = await grade(stub, *items, grader="my_rewards:rank")
    assert [one.value for one in graded] == [1.0, 0.5, 0.25, 1.0, -0.25, -0.25]
    assert [one.verdict for one in graded] == [pb.VERDICT_SCORED] * 4 + [pb.VERDICT_ERROR] * 2


async def test_a_remote_service_is_asked_over_grpc(address, tmp_path):
    remote = {"grader": "remote", "remote_url": f"grpc://{address}/math", "values": VALUES}
    async with serving(tmp_path, **remote) as stub:
        items = [pb.GradeItem(response=rf"\boxed{{{answer}}}", label="2x") for answer in ("x+x", "3x")]
        graded = await grade(stub, *items, pb.GradeItem(response="no box", label=""), grader="remote")
    assert [(one.value, one.reason) for one in graded[:2]] == [
        (1.0, pb.VERDICT_REASON_CORRECT),
        (0.0, pb.VERDICT_REASON_WRONG),
    ]
    assert graded[2].verdict == pb.VERDICT_UNGRADABLE


def test_a_function_that_cannot_be_loaded_stops_the_service(folder, tmp_path, monkeypatch, address):
    monkeypatch.setenv("PYTHONPATH", str(folder))
    with running(tmp_path, grader="my_rewards:typo") as (process, _):
        assert process.wait(START_S) != 0
    assert "module 'my_rewards' has no attribute 'typo'" in (tmp_path / "log").read_text()


async def test_a_remote_service_that_does_not_answer_is_an_error(tmp_path):
    remote = {"grader": "remote", "remote_url": "grpc://127.0.0.1:9/math", "values": VALUES}
    async with serving(tmp_path, **remote) as stub:
        (graded,) = await grade(stub, own("x"), grader="remote")
    assert (graded.verdict, graded.value) == (pb.VERDICT_ERROR, -0.25)
