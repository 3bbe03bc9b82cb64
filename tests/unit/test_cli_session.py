"""What `flotilla up` takes out of shared memory at its end. Nothing is faked but the folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.cli import session
from services.common.spec import load_run

RUN = """
run_id = "one"
model.hf_checkpoint = "model"
data.prompt_data = "prompts.jsonl"
rollout = {num_rollout = 1, rollout_batch_size = 1, n_samples_per_prompt = 2}
"""


def test_weights_of_a_killed_trainer_are_removed_and_those_of_other_runs_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "run.toml").write_text(RUN)
    memory = tmp_path / "shm"
    memory.mkdir()
    monkeypatch.setattr(session, "SHARED_MEMORY", memory)
    for name in ("flotilla-one-rank0", "flotilla-one-rank0-rank0", "flotilla-two-rank0"):
        (memory / name).touch()
    spec = load_run(tmp_path / "run.toml", environ={})
    session.free_shared_memory(spec)
    assert {path.name for path in memory.iterdir()} == {"flotilla-one-rank0-rank0", "flotilla-two-rank0"}
    session.free_shared_memory(spec)
