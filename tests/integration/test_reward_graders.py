"""Graders by row, and graders of the user's own, through the real service; nothing is faked.

The user's module lies in a folder on PYTHONPATH, as a user's would.
"""

from __future__ import annotations

import json
import time

import pytest

from flotilla.reward.v1 import reward_pb2 as pb
from flotilla.reward.v1 import reward_pb2_grpc as pb_grpc
from services.common.errors import InvalidArgument
from services.common.rpc import call, open_channel
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


async def grade(stub, *items: pb.GradeItem) -> list[pb.GradedItem]:
    answer = await call(stub.Grade, pb.GradeRequest(grader="my_rewards:judge", items=items), timeout_s=30)
    return list(answer.items)


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
    assert "my_rewards:judge: RuntimeError: no judge" in (folder / "log").read_text()


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


@pytest.mark.parametrize(
    "broken", [{"grader": "guess"}, {"grader": "os:getcwd"}, {"metadata": "[1]"}, {"metadata": "{"}]
)
async def test_an_item_that_cannot_be_graded_is_refused(stub, broken):
    with pytest.raises(InvalidArgument):
        await grade(stub, pb.GradeItem(response="r", label="l", **broken))


async def test_the_list_names_the_graders_with_their_versions(stub):
    listed = (await call(stub.ListGraders, pb.ListGradersRequest(), timeout_s=5)).graders
    assert {"deepscaler", "math", "dapo", "f1", "gpqa", "ifbench", "my_rewards:judge"} <= {one.name for one in listed}
    assert all(one.version for one in listed) and all(len(one.digest) == 64 for one in listed if ":" not in one.name)
