"""How a run looks, from invented answers of its processes; nothing is started."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from flotilla.buffer.v1 import buffer_pb2, registry_pb2
from flotilla.common.v1 import common_pb2
from services.cli.observe import Answer, Observation, to_answer, to_ledger
from services.cli.processes import process_table
from services.cli.records import ProcessRecord, SupervisorRecord
from services.cli.table import LiveDisplay, PlainDisplay, draw_run
from services.cli.view import RunFiles, RunView, duration_text, make_view, service_note, service_state
from services.common.spec import RunSpec, load_run

NOW = 1_000_000.0
READY = Answer(ready=True, starting=False, problems=(), waits=())
METRICS = {
    "step": 12,
    "rollout/mean_reward": 0.625,
    "rollout/kept_groups": 32.0,
    "rollout/dropped_groups": 5.0,
    "rollout/mean_response_tokens": 21.25,
    "rollout/tokens_per_second": 3012.4,
    "train/tokens_per_second": 9100.0,
    "train/log_prob_gap_mean": 0.0021,
}
EVALUATION = {"name": "held_out", "step": 10, "mean_reward": 0.71, "issued": 64, "scored": 60, "failed": 4}


@pytest.fixture
def spec(tmp_path) -> RunSpec:
    path = tmp_path / "demo.toml"
    path.write_text(
        f'run_id = "demo"\nrun_dir = "{tmp_path}"\n[model]\nhf_checkpoint = "model"\n[data]\nprompt_data = "p.jsonl"\n'
        "[rollout]\nnum_rollout = 50\nrollout_batch_size = 2\nn_samples_per_prompt = 2\n"
    )
    return load_run(path, environ={})


def ledger():
    stats = buffer_pb2.GetBufferStatsResponse(
        issued=420,
        conserved=True,
        groups=[
            buffer_pb2.StateCount(state=buffer_pb2.GROUP_STATE_KEPT, count=20),
            buffer_pb2.StateCount(state=buffer_pb2.GROUP_STATE_COMMITTED, count=400),
            buffer_pb2.StateCount(state=buffer_pb2.GROUP_STATE_FAILED, count=0),
        ],
    )
    live = common_pb2.PolicyVersion(run_epoch=2, step=12)
    run = registry_pb2.Run(
        run_epoch=2, committed_step=10, live_version=live, desired_state=registry_pb2.DESIRED_STATE_STOPPED
    )
    return to_ledger(stats, run)


def view_of(spec: RunSpec) -> RunView:
    (spec.run_dir / "metrics.jsonl").write_text(json.dumps(METRICS) + "\n")
    (spec.run_dir / "evaluations.jsonl").write_text(json.dumps(EVALUATION) + "\n")
    (spec.run_dir / "weight_sync.jsonl").write_text(json.dumps({"step": 12, "total_seconds": 0.84}) + "\n")
    table = process_table(spec, Path("run.toml"))
    answers: dict[str, Answer | None] = {one.name: READY for one in table}
    answers["buffer"] = Answer(False, False, ("Redis is away",), ())
    answers["trainer"] = Answer(True, False, (), (("a sealed batch", NOW - 187), ("x", NOW - 1)))
    answers["engine-0"] = None
    processes = {one.name: ProcessRecord(100 + at, True, 0, 1 << 28) for at, one in enumerate(table)}
    processes["engine-0"] = ProcessRecord(None, False, 2, 0)
    record = SupervisorRecord(NOW - 3600, 3600.0, "running", 3 << 30, processes)
    files = RunFiles(spec.run_dir)
    files.advance()
    return make_view(spec, table, Observation(answers, ledger()), files, record, now=NOW)


def drawn(view: RunView) -> str:
    out = StringIO()
    Console(file=out, width=140, no_color=True).print(draw_run(view))
    return out.getvalue()


def test_the_picture_says_everything(spec):
    text = drawn(view_of(spec))
    for words in (
        "run demo", "step 12 of 50", "live weights 12", "committed 10", "epoch 2", "1:00:00",
        "1.75 GiB (peak 3.00 GiB)", "256 MiB",
        "restarting (restarted x2)", "a sealed batch, for 3:07", "Redis is away",
        "reward 0.625", "kept 32", "dropped 5", "tokens/response 21.2", "rollout tok/s 3,012", "train tok/s 9,100",
        "log-prob gap 0.0021", "weight sync 0.84 s", "held_out after step 10: mean reward 0.710 of 60, 4 failed",
        "420 issued: 20 kept, 400 committed",
    ):  # fmt: skip
        assert words in text, words


def test_a_narrow_terminal_shortens_only_the_notes(spec):
    out = StringIO()
    Console(file=out, width=80, no_color=True).print(draw_run(view_of(spec)))
    rows = [line for line in out.getvalue().splitlines() if "MiB" in line and "peak" not in line]
    assert len(rows) == 7 and all(len(line) <= 80 for line in rows)
    assert any(line.startswith("rollout_gateway  ready ") for line in rows)


def test_a_run_that_has_not_begun(spec):
    table = process_table(spec, Path("run.toml"))
    silent: dict[str, Answer | None] = {one.name: None for one in table}
    view = make_view(spec, table, Observation(silent, None), RunFiles(spec.run_dir), None)
    assert not view.anyone and view.step == 0
    assert "no answer" in drawn(view)


def test_a_ledger_that_does_not_add_up_is_shown(spec):
    stats = buffer_pb2.GetBufferStatsResponse(issued=3, conserved=False)
    broken = to_ledger(stats, registry_pb2.Run())
    table = process_table(spec, Path("run.toml"))
    view = make_view(spec, table, Observation({"buffer": READY}, broken), RunFiles(spec.run_dir), None)
    assert "3 issued: none  (they do not add up!)" in drawn(view)


def test_ledger_facts():
    facts = ledger()
    assert facts.groups == {"kept": 20, "committed": 400}
    assert (facts.live_step, facts.committed_step, facts.run_epoch, facts.stopped) == (12, 10, 2, True)
    assert to_ledger(buffer_pb2.GetBufferStatsResponse(), registry_pb2.Run()).live_step is None


@pytest.mark.parametrize(
    ("answer", "process", "state"),
    [
        (None, None, "no answer"),
        (None, ProcessRecord(7, False, 0, 0), "starting"),
        (None, ProcessRecord(7, True, 0, 0), "no answer"),
        (None, ProcessRecord(None, False, 1, 0), "restarting"),
        (Answer(False, True, (), ()), None, "starting"),
        (Answer(False, False, ("Redis is away",), ()), None, "problem"),
        (READY, ProcessRecord(7, True, 3, 0), "ready"),
    ],
)
def test_states(answer, process, state):
    assert service_state(answer, process) == state


def test_statusz_of_a_service():
    status = {
        "service": "buffer",
        "ready": False,
        "problems": {"started": "starting", "redis": "no counts yet"},
        "waiting_for": [{"what": "later", "since": 9.0}, {"what": "Redis", "since": 4.0}],
    }
    answer = to_answer(status)
    assert answer == Answer(False, True, ("no counts yet",), (("Redis", 4.0), ("later", 9.0)))
    assert service_note(Answer(False, False, (), answer.waits), 10.0) == "Redis, for 6 s"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (60, "1:00"), (3725, "1:02:05"), (-3, "0 s")]
)
def test_durations(seconds, text):
    assert duration_text(seconds) == text


def test_plain_output_is_a_line_for_what_is_new(spec):
    out = StringIO()
    view = view_of(spec)
    with PlainDisplay(Console(file=out, width=40)) as display:
        display.update(view, [METRICS], [EVALUATION])
        display.update(view, [], [])
    lines = [line.split(" ", 1)[1] for line in out.getvalue().splitlines()]
    ready = [line for line in lines if line.endswith("is ready")]
    assert len(ready) == 6 and "trainer is ready" in ready and "buffer is ready" not in ready
    assert [line for line in lines if line not in ready] == [
        "step 12/50  reward 0.625  kept 32  dropped 5  tokens/response 21.2  rollout tok/s 3,012  train tok/s 9,100  "
        "log-prob gap 0.0021  weight sync 0.84 s",
        "held_out after step 10: mean reward 0.710 of 60, 4 failed",
    ]


def test_live_output_keeps_the_last_events(spec):
    out = StringIO()
    with LiveDisplay(Console(file=out, width=140, force_terminal=True)) as display:
        for number in range(9):
            display.event(f"event {number}")
        display.update(view_of(spec), [], [])
    last = out.getvalue().rpartition("run demo")[2]
    assert "event 8" in last and "event 3" in last and "event 2" not in last
