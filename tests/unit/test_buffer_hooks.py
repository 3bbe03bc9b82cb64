"""Finding and calling functions of the user's, and the examples of docs/hooks.md. Nothing is faked."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
import time
import tomllib
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc
import pytest

from services.buffer.filters import (
    BufferedGroup,
    SampledGroup,
    SampledSample,
    choose,
    decide,
    load_buffer_filter,
    load_filter,
)
from services.buffer.hooks import MAX_HANGING, HookFailed, HookHangs, load_function, run_hook
from services.common.spec import RolloutSpec, SpecError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "hooks.md"
FIELD = "rollout.buffer_filter"


@pytest.fixture
def user_dir(tmp_path, monkeypatch):
    """The current directory, which may hold the modules of a user; nothing of them stays imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def released():
    """An event that hooks wait for; set at the end, so that no thread outlives its test."""
    event = threading.Event()
    yield event
    event.set()
    join_hook_threads()


def hook_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("hook ")]


def join_hook_threads() -> None:
    for thread in hook_threads():
        thread.join(5)
        assert not thread.is_alive()


# ---------------------------------------------------------------------------------------------------- finding


def test_a_function_is_found_in_the_current_directory(user_dir):
    (user_dir / "my_package").mkdir()
    (user_dir / "my_package" / "mine.py").write_text("def double(x):\n    return 2 * x\n")
    assert load_function("my_package.mine:double", FIELD)(21) == 42
    assert sys.path[-1] == str(user_dir), "it comes last: a file of the user's hides nothing that is installed"


@pytest.mark.parametrize(
    ("text", "path", "message"),
    [
        ("", "absent_module:f", "cannot import absent_module: ModuleNotFoundError: No module named 'absent_module'"),
        ("", "user_empty:f", "module user_empty has no f"),
        ("f = 3", "user_number:f", "user_number:f is a int, not a function"),
        ("import absent_module", "user_import:f", "cannot import user_import: ModuleNotFoundError"),
        ("def f(:", "user_syntax:f", "cannot import user_syntax: SyntaxError"),
        ("1 / 0", "user_raises:f", "cannot import user_raises: ZeroDivisionError: division by zero"),
    ],
)
def test_what_cannot_be_found_is_an_error_of_the_spec_that_names_the_field(user_dir, text, path, message):
    if not path.startswith("absent"):
        (user_dir / f"{path.partition(':')[0]}.py").write_text(text)
    with pytest.raises(SpecError, match=re.escape(f"{FIELD}: {message}")):
        load_function(path, FIELD)


# ---------------------------------------------------------------------------------------------------- calling


async def double(x: int) -> int:
    await asyncio.sleep(0.001)
    return 2 * x


async def test_a_hook_runs_outside_the_event_loop_and_may_be_async():
    assert await run_hook(threading.get_ident) != threading.get_ident()
    assert await run_hook(double, 21) == 42
    assert await run_hook(partial(double, 21)) == 42


class Misbehaves(BaseException):
    pass


@pytest.mark.parametrize(
    "error", [KeyError("x"), StopIteration(), TimeoutError("mine"), SystemExit(3), Misbehaves(), ValueError("\ud800")]
)
@pytest.mark.parametrize("is_async", [False, True])
async def test_whatever_a_hook_raises_becomes_a_hook_failure(error, is_async):
    async def slow():
        raise error

    def quick():
        raise error

    raised = rf"{__name__}:(slow|quick) raised (RuntimeError|{type(error).__name__}): "
    with pytest.raises(HookFailed, match=raised) as caught:
        await run_hook(slow if is_async else quick, deadline_s=5)
    assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION
    assert caught.value.__cause__ is not None, "the log has the traceback"
    str(caught.value).encode()


async def test_the_text_of_an_exception_is_cut():
    def quote():
        raise ValueError("response " * 10_000)

    with pytest.raises(HookFailed) as caught:
        await run_hook(quote)
    assert len(str(caught.value)) < 600


async def test_a_hook_that_hangs_is_given_up_at_its_deadline_and_blocks_nothing(released):
    ticks = 0

    async def tick():
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    ticking = asyncio.create_task(tick())
    begun = time.monotonic()
    with pytest.raises(HookFailed, match=r"threading:wait gave no answer in 0\.3 s"):
        await run_hook(released.wait, deadline_s=0.3)
    assert time.monotonic() - begun < 2
    assert ticks > 5
    ticking.cancel()


async def test_an_async_hook_that_hangs_gives_its_thread_back():
    async def forever():
        await asyncio.Event().wait()

    for _ in range(MAX_HANGING):
        with pytest.raises(HookFailed, match="forever gave no answer"):
            await run_hook(forever, deadline_s=0.05)
    join_hook_threads()
    assert await run_hook(double, 21) == 42


async def test_a_hook_of_which_too_many_calls_hang_is_not_called_until_one_returns(released):
    for _ in range(MAX_HANGING):
        with pytest.raises(HookFailed, match="gave no answer"):
            await run_hook(released.wait, deadline_s=0.05)
    for _ in range(100):
        with pytest.raises(HookHangs, match=rf"is not called: {MAX_HANGING} calls of it hang"):
            await run_hook(released.wait, deadline_s=0.05)
    assert len(hook_threads()) == MAX_HANGING
    assert await run_hook(double, 21) == 42, "the other hook goes on"
    released.set()
    join_hook_threads()
    assert await run_hook(released.wait) is True


async def test_many_calls_at_once_are_no_calls_that_hang():
    assert await asyncio.gather(*(run_hook(double, x) for x in range(64))) == [2 * x for x in range(64)]
    assert await run_hook(double, 21) == 42


async def test_a_caller_that_is_cancelled_leaves_the_late_answer_to_nobody(released):
    for _ in range(MAX_HANGING):
        call = asyncio.create_task(run_hook(released.wait, deadline_s=60))
        await asyncio.sleep(0.02)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    with pytest.raises(HookHangs, match="is not called"):
        await run_hook(released.wait)


# ---------------------------------------------------------------------------------------------------- docs/hooks.md


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def documented(user_dir) -> RolloutSpec:
    """The spec of the page, with its functions in the file that it says."""
    (name,) = set(re.findall(r"`(\w+)\.py`", PAGE.read_text()))
    (user_dir / f"{name}.py").write_text("\n\n".join(blocks("python")))
    (toml,) = blocks("toml")
    return RolloutSpec(num_rollout=1, rollout_batch_size=1, n_samples_per_prompt=4, **tomllib.loads(toml)["rollout"])


async def test_the_documented_filter(documented):
    def group(*rewards: float, truncated: int = 0) -> SampledGroup:
        samples = [SampledSample(i, "", 5, r, "SCORED", "CORRECT", i < truncated, 0) for i, r in enumerate(rewards)]
        return SampledGroup("g00000000", "What is 6 x 7?", "42", tuple(samples))

    group_filter = load_filter(documented.dynamic_sampling_filter)
    assert await decide(group_filter, group(0, 0, 1, 1)) == (True, "")
    assert await decide(group_filter, group(1, 1, 1, 1)) == (False, "too_easy_or_too_hard")
    assert await decide(group_filter, group(0, 0, 1, 1, truncated=3)) == (False, "mostly_truncated")


async def test_the_documented_buffer_filter(documented):
    one = BufferedGroup("a", 1, "42", attempts=1, finished_samples=0, partial_tokens=9, oldest_step=3, age=1)
    more, most = replace(one, group_id="b", partial_tokens=10), replace(one, group_id="c", finished_samples=1)
    older = replace(one, group_id="d", oldest_step=2, age=2)
    assert await choose(load_buffer_filter(documented.buffer_filter), 4, [older, one, more, most], 3) == ["d", "c", "b"]


def test_the_limits_of_the_page_are_those_of_the_code():
    from services.buffer.filters import CHOICE_DEADLINE_S, MAX_REASON_CHARS
    from services.buffer.hooks import DEADLINE_S

    text = PAGE.read_text()
    assert f"over {DEADLINE_S:g} s, or {CHOICE_DEADLINE_S:g} s for a buffer filter" in text
    assert f"{MAX_HANGING} calls that took too long" in text
    assert f"at most {MAX_REASON_CHARS} characters" in text
