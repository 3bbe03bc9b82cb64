"""`flotilla report` over synthetic run files; every expected number is computed here by hand."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.cli.main import app
from services.cli.records import JsonlTail, SupervisorRecord, last_by, read_rows, read_supervisor
from services.cli.report import write_report
from services.cli.transcripts import choose_pairs, fenced, match_pairs

REWARDS = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95]


def metrics_row(step: int, reward: float) -> dict:
    return {
        "step": step,
        "rollout/mean_reward": reward,
        "rollout/kept_groups": 32,
        "rollout/dropped_groups": 4,
        "rollout/mean_response_tokens": 20.5,
        "rollout/tokens_per_second": 1000.0 + step,
        "train/tokens_per_second": 5000.0 + step,
        "train/log_prob_gap_mean": 0.001 * step,
        "rollout/seconds": 2.0,
        "train/seconds": 1.0,
        "time/publish_seconds": 0.5,
    }


def evaluation_row(name: str, step: int, mean: float) -> dict:
    return {
        "name": name,
        "step": step,
        "run_epoch": 1,
        "mean_reward": mean,
        "issued": 64,
        "scored": 63,
        "failed": 1,
        "mean_response_tokens": 21.0,
        "time": 0.0,
    }


def answer(prompt: str, response: str, reward: float, name: str = "sums") -> dict:
    verdict = "right" if reward else "wrong"
    return {
        "name": name,
        "group_id": f"g-{prompt}-{response}",
        "sample_index": 0,
        "prompt": prompt,
        "response": response,
        "label": "4",
        "reward": reward,
        "verdict": verdict,
        "reason": "",
    }


def write_rows(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def run_dir(tmp_path) -> Path:
    repeated = metrics_row(4, 99.0)  # trained before a restart, and again after it: the later row counts
    rows = [metrics_row(step, reward) for step, reward in enumerate(REWARDS, 1)]
    write_rows(tmp_path / "metrics.jsonl", [*rows[:3], repeated, *rows[3:]])
    evaluations = [evaluation_row("sums", step, mean) for step, mean in ((0, 0.25), (5, 0.5), (10, 0.875))]
    write_rows(tmp_path / "evaluations.jsonl", evaluations)
    syncs = [
        {"step": step, "wire_seconds": 0.1, "load_seconds": 0.2, "total_seconds": total, "wire_bytes": 1 << 20,
         "plain_bytes": 2 << 20, "equal": step != 1}
        for step, total in enumerate((0.9, 0.4, 0.5))
    ]  # fmt: skip
    write_rows(tmp_path / "weight_sync.jsonl", syncs)
    write_rows(tmp_path / "evaluations" / "step-000000-sums.jsonl", [answer("2+2", "5", 0.0), answer("1+3", "4", 1.0)])
    write_rows(tmp_path / "evaluations" / "step-000005-sums.jsonl", [answer("2+2", "6", 0.0)])
    write_rows(tmp_path / "evaluations" / "step-000010-sums.jsonl", [answer("1+3", "4", 1.0), answer("2+2", "4", 1.0)])
    process = {"pid": None, "started": True, "restarts": 2, "memory_bytes": 0}
    record = {"started_at": 0.0, "wall_seconds": 187.0, "outcome": "complete", "peak_memory_bytes": 3 << 30}
    record |= {"processes": {"engine-0": process}, "restarts": {"engine-0": 2}}
    (tmp_path / "supervisor.json").write_text(json.dumps(record))
    return tmp_path


def test_numbers(run_dir):
    write_report("demo", run_dir)
    report = json.loads((run_dir / "report" / "report.json").read_text())
    assert report["steps"] == 10
    assert report["reward"]["first_5"] == pytest.approx(0.3)
    assert report["reward"]["last_5"] == pytest.approx(3.95 / 5)
    assert report["evaluations"]["sums"]["before"]["mean_reward"] == 0.25
    assert report["evaluations"]["sums"]["after"] == {
        "step": 10, "mean_reward": 0.875, "scored": 63, "failed": 1, "mean_response_tokens": 21.0,
    }  # fmt: skip
    assert report["rollout_tokens_per_second"] == pytest.approx(1005.5)
    assert report["train_tokens_per_second"] == pytest.approx(5005.5)
    assert report["log_prob_gap_mean_max"] == pytest.approx(0.010)
    assert (report["weight_sync"]["digests_equal"], report["weight_sync"]["transfers"]) == (2, 3)
    assert report["weight_sync"]["median_total_seconds"] == pytest.approx(0.5)
    assert report["peak_memory_bytes"] == 3 << 30
    assert report["restarts"] == {"engine-0": 2}
    assert (report["wall_seconds"], report["outcome"]) == (187.0, "complete")


def test_page(run_dir):
    text = write_report("demo", run_dir)
    assert text == (run_dir / "report" / "report.md").read_text()
    for words in ("0.300 / 0.790", "0.250 (step 0) / 0.875 (step 10)", "2 of 3", "3.00 GiB", "engine-0 2", "3:07"):
        assert words in text


def test_curves_are_a_picture(run_dir):
    write_report("demo", run_dir)
    head = (run_dir / "report" / "curves.png").read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", head[16:24]) == (1320, 900)


def test_transcripts_show_what_became_right(run_dir):
    write_report("demo", run_dir)
    text = (run_dir / "report" / "transcripts.md").read_text()
    first, second = text.split("## ")[1:]
    assert first.startswith("1. wrong, became right") and "2+2" in first and "\n5\n" in first and "\n4\n" in first
    assert second.startswith("2. right, stayed right") and "1+3" in second


def test_an_empty_run_dir_gives_what_there_is(tmp_path):
    write_report("demo", tmp_path)
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert report == {"run_id": "demo", "steps": 0}
    assert sorted(path.name for path in (tmp_path / "report").iterdir()) == ["report.json", "report.md"]


def test_partial_rows_are_reported_as_far_as_they_go(tmp_path):
    write_rows(
        tmp_path / "metrics.jsonl", [{"step": 1, "rollout/mean_reward": 0.5}, {"step": 2, "rollout/mean_reward": None}]
    )
    write_rows(tmp_path / "evaluations" / "step-000000-sums.jsonl", [answer("2+2", "5", 0.0)])
    write_report("demo", tmp_path)
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert report["steps"] == 2 and report["reward"] == {"first_5": 0.5, "last_5": 0.5}
    assert (tmp_path / "report" / "curves.png").is_file()
    assert not (tmp_path / "report" / "transcripts.md").exists()


def test_report_of_a_run_directory(tmp_path):
    (tmp_path / "model").mkdir()
    spec = (
        f'run_id = "demo"\nrun_dir = "{tmp_path}"\n[model]\nhf_checkpoint = "model"\n[data]\nprompt_data = "p.jsonl"\n'
        "[rollout]\nnum_rollout = 3\nrollout_batch_size = 2\nn_samples_per_prompt = 2\n"
    )
    (tmp_path / "run.toml").write_text(spec)
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 0 and "# Report of demo" in result.stdout


def test_report_of_nothing(tmp_path):
    result = CliRunner().invoke(app, ["report", str(tmp_path / "none.toml")])
    assert result.exit_code == 2 and "there is no such run spec" in result.stderr


def test_pairs_take_kinds_in_turn():
    prompts = {"a": (0, 1), "b": (0, 1), "c": (0, 1), "d": (0, 1), "e": (1, 0), "f": (0, 0), "g": (1, 1)}
    before = [answer(prompt, "x", was) for prompt, (was, _) in prompts.items()]
    after = [answer(prompt, "y", now) for prompt, (_, now) in prompts.items()]
    chosen = choose_pairs(match_pairs(before, after), most=6)
    assert [pair.before["prompt"] for pair in chosen] == ["a", "f", "e", "g", "b", "c"]


def test_prompts_of_other_data_sets_do_not_match():
    assert match_pairs([answer("a", "x", 0, "one")], [answer("a", "y", 1, "two")]) == []


def test_backticks_do_not_end_a_block():
    assert fenced("a\n````\nb").startswith("`````text\n")
    assert fenced("plain").startswith("```text\n")


def test_tail_waits_for_whole_lines_and_passes_over_torn_ones(tmp_path):
    path = tmp_path / "rows.jsonl"
    tail = JsonlTail(path)
    assert tail.new_rows() == []
    path.write_bytes(b'{"a": 1}\n{"a": ')
    assert tail.new_rows() == [{"a": 1}]
    with path.open("ab") as file:
        file.write(b'{"a": 2}\n{"a": 3}\n')  # the writer was killed in the middle of a row, and wrote it again
    assert tail.new_rows() == [{"a": 3}]
    assert read_rows(path) == [{"a": 1}, {"a": 3}]


def test_last_by_keeps_the_last_and_sorts():
    rows = [{"step": 2, "n": 0}, {"step": 1, "n": 1}, {"step": 2, "n": 2}]
    assert last_by(rows, "step") == [{"step": 1, "n": 1}, {"step": 2, "n": 2}]


def test_supervisor_record_round_trip(run_dir, tmp_path_factory):
    record = read_supervisor(run_dir)
    assert record and record.restarts == {"engine-0": 2}
    other = tmp_path_factory.mktemp("other")
    record.write(other)
    assert read_supervisor(other) == record
    assert json.loads((other / "supervisor.json").read_text())["restarts"] == {"engine-0": 2}
    assert read_supervisor(other / "none") is None
    assert SupervisorRecord(started_at=0.0).restarts == {}
