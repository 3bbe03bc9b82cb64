"""CUDA memory between unrelated processes. Every process here is started anew; needs one GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

WAIT_S = 50.0
PRELUDE = """
import json, sys, torch
from services.common.cuda_ipc import CudaMemory, export_memory, open_memory
def say(**what): print(json.dumps(what), flush=True)
def hear(): return json.loads(sys.stdin.readline())
def as_json(m): return [m.handle.hex(), m.offset_bytes, m.size_bytes, m.gpu_uuid]
def of_json(j): return CudaMemory(bytes.fromhex(j[0]), *j[1:])
def pattern(size, seed): return torch.arange(size, device="cuda").mul_(seed).remainder_(251).to(torch.uint8)
"""
EXPORTER = """
size, seed = hear()
whole = pattern(size, seed)
parts = whole[: size // 4], whole[size // 2 :]
torch.cuda.synchronize()
say(memories=[as_json(export_memory(part)) for part in parts])
hear()
say(first=int(whole[0]))
"""
IMPORTER = """
while order := hear():
    try:
        opened = [open_memory(of_json(one)) for one in order["memories"]]
        size, seed = order["pattern"]
        whole = pattern(size, seed)
        parts = whole[: size // 4], whole[size // 2 :]
        say(equal=[bool(one.tensor.equal(part)) for one, part in zip(opened, parts)])
        hear()
        if order.get("read_again"):
            say(equal=bool(opened[0].tensor.equal(parts[0])))
        if order.get("write"):
            opened[0].tensor[0] = 77
        torch.cuda.synchronize()
        for one in opened:
            one.close()
            one.close()
        say(closed=True)
    except Exception as error:
        say(error=f"{type(error).__name__}: {error}")
"""


class Child:
    """A process that talks JSON lines."""

    def __init__(self, code: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )

    def say(self, what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the child ended with {self.process.wait(10)}"
        return json.loads(line)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)


@pytest.fixture
def children() -> Iterator[list[Child]]:
    started: list[Child] = []
    yield started
    for child in started:
        child.kill()


def exporter(children: list[Child], size: int, seed: int, **environment: str) -> tuple[Child, dict[str, Any]]:
    child = Child(EXPORTER, **environment)
    children.append(child)
    child.say([size, seed])
    return child, {"pattern": [size, seed], **child.hear()}


def importer(children: list[Child]) -> Child:
    children.append(Child(IMPORTER))
    return children[-1]


def ask(child: Child, order: dict[str, Any], *, meanwhile: Sequence[Child] = ()) -> list[dict[str, Any]]:
    """What the importer says, when it has opened the memory and at the end; `meanwhile` are killed in between."""
    child.say(order)
    first = child.hear()
    if "error" in first:
        return [first]
    for one in meanwhile:
        one.kill()
    child.say("go on")
    answers = [first, child.hear()]
    return answers if "closed" in answers[-1] or "error" in answers[-1] else [*answers, child.hear()]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("size", [4096, 40 << 20, (256 << 20) + 4096])
def test_tensors_of_one_allocation_arrive_and_can_be_opened_again(children, size):
    source, order = exporter(children, size, 3)
    reader = importer(children)
    assert order["memories"][0][0] == order["memories"][1][0], "one allocation has one handle"
    for _ in range(3):
        assert ask(reader, order)[0] == {"equal": [True, True]}
    assert ask(reader, order | {"write": True})[1] == {"closed": True}
    source.say("go on")
    assert source.hear() == {"first": 77}, "it is the same memory, not a copy"


@pytest.mark.timeout(60)
def test_an_exporter_that_is_killed_leaves_the_importer_able_to_go_on(children):
    first, order = exporter(children, 64 << 20, 3)
    reader = importer(children)
    assert ask(reader, order, meanwhile=[first]) == [{"equal": [True, True]}, {"closed": True}]
    [refused] = ask(reader, order)
    assert "FailedPrecondition" in refused["error"]
    _second, order = exporter(children, 64 << 20, 5)
    assert ask(reader, order)[0] == {"equal": [True, True]}


@pytest.mark.timeout(60)
def test_memory_of_a_dead_exporter_stays_while_it_is_open(children):
    first, order = exporter(children, 64 << 20, 3)
    answers = ask(importer(children), order | {"read_again": True}, meanwhile=[first])
    assert answers[1] == {"equal": True}


@pytest.mark.timeout(60)
def test_a_gpu_that_the_importer_does_not_see_is_named(children):
    _source, order = exporter(children, 4096, 3)
    order["memories"][0][3] = "no-such-gpu"
    [refused] = ask(importer(children), order)
    assert refused["error"].startswith("InvalidArgument: the memory lies on GPU no-such-gpu, and this process sees ")


@pytest.mark.timeout(60)
def test_memory_that_cannot_be_shared_is_refused_with_the_setting_to_change(children):
    child = Child(
        "x = torch.zeros(64 << 20, dtype=torch.uint8, device='cuda')\n"
        "try: export_memory(x); say(error='')\n"
        "except Exception as error: say(error=f'{type(error).__name__}: {error}')",
        PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",
        PYTORCH_ALLOC_CONF="expandable_segments:True",
    )
    children.append(child)
    error = child.hear()["error"]
    assert error.startswith("FailedPrecondition") and "expandable_segments, unset it" in error
