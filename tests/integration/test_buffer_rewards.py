"""What a row of the data says to graders reaches the reward service; engines, trainer and grader are scripted."""

from __future__ import annotations

import json
from typing import Any

from flotilla.reward.v1 import reward_pb2
from services.common.prompts import read_rows
from tests.buffer_harness import running

METADATA = {"rm_type": "boxed_f1", "n": [1, 2]}


async def test_metadata_and_grader_of_a_row_reach_the_reward_service(tmp_path, monkeypatch):
    def with_metadata(path: Any, data: Any) -> Any:
        for row in read_rows(path, data):
            row.metadata.update(METADATA)
            yield row

    monkeypatch.setattr("services.buffer.data.read_rows", with_metadata)
    async with running(tmp_path) as buffer:
        items: list[reward_pb2.GradeItem] = []
        honest = buffer.reward.honest

        async def listen(request: Any, context: Any) -> reward_pb2.GradeResponse:
            items.extend(request.items)
            return await honest(request, context)

        buffer.reward.answer = listen
        epoch = await buffer.begin_epoch()
        await buffer.go_live(epoch, 0)
        await buffer.fill_batch(epoch)
    assert items and all(one.grader == "boxed_f1" and json.loads(one.metadata) == METADATA for one in items)
    assert all(one.group_id and one.label and not one.prompt for one in items)


async def test_graders_see_special_tokens_but_not_the_one_that_ended_the_response(tmp_path):
    async with running(tmp_path) as buffer:
        seen: list[str] = []
        honest = buffer.reward.honest

        async def listen(request: Any, context: Any) -> reward_pb2.GradeResponse:
            seen.extend(one.response for one in request.items)
            return await honest(request, context)

        buffer.reward.answer = listen
        epoch = await buffer.begin_epoch()
        await buffer.go_live(epoch, 0)
        await buffer.fill_batch(epoch, text="a<|im_start|>b<|im_end|>")
    assert seen and {one[1:] for one in seen} == {"a<|im_start|>b"}
