"""The run spec: overrides, bad input, round trip."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.common.spec import ParallelSpec, SpecError, load_run

MINIMAL = """
run_id = "r"
[model]
hf_checkpoint = "model"
[data]
prompt_data = "data.jsonl"
[rollout]
num_rollout = 2
rollout_batch_size = 4
n_samples_per_prompt = 2
"""


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL)
    return path


def refused(path, *overrides: str, environ=None) -> str:
    with pytest.raises(SpecError) as caught:
        load_run(path, overrides, environ or {})
    return str(caught.value)


def test_paths_are_relative_to_the_file(run_file):
    spec = load_run(run_file, environ={})
    assert spec.data.prompt_data == run_file.parent / "data.jsonl"
    assert spec.run_dir == run_file.parent / "runs" / "r"


def test_files_of_redis_are_relative_too_where_they_are_given(run_file):
    redis = load_run(run_file, ["redis.password_file=password", "redis.tls_ca_file=/etc/ca.pem"], {}).redis
    assert (redis.password_file, redis.tls_ca_file) == (run_file.parent / "password", Path("/etc/ca.pem"))
    assert load_run(run_file, environ={}).redis.password_file == Path()


def test_set_wins_over_environment_wins_over_file(run_file):
    environ = {"FLOTILLA__ROLLOUT__NUM_ROLLOUT": "5", "FLOTILLA__OPTIMIZER__LR": "1e-3"}
    spec = load_run(run_file, ["rollout.num_rollout=7"], environ)
    assert (spec.rollout.num_rollout, spec.optimizer.lr) == (7, 1e-3)


def test_entries_of_lists_can_be_set(run_file):
    text = "\n[[services.engines]]\ngrpc_port = 1000\nhttp_port = 1001\n"
    run_file.write_text(MINIMAL + text)
    spec = load_run(run_file, ["services.engines.0.host=gpu1"], {})
    assert spec.services.engines[0].grpc == "gpu1:1000"


def test_resolved_spec_reads_back_the_same(run_file, tmp_path):
    spec = load_run(run_file, ["weight_sync.quantization=none"], {})
    copy = tmp_path / "copy.toml"
    copy.write_text(spec.to_toml())
    again = load_run(copy, environ={})
    assert again == spec and again.digest() == spec.digest()


def test_digest_ignores_where_it_runs_but_not_what_it_computes(run_file):
    digest = load_run(run_file, environ={}).digest()
    assert load_run(run_file, ["redis.port=9999", "services.buffer.host=b"], {}).digest() == digest
    assert load_run(run_file, ["parallel.recompute=full", "parallel.overlap=true"], {}).digest() == digest
    assert load_run(run_file, ["optimizer.lr=0.5"], {}).digest() != digest


def test_micro_batches_come_in_multiples_of_an_interleaved_pipeline():
    assert ParallelSpec(pipeline=4, virtual_stages=2).micro_batch_multiple == 4
    assert ParallelSpec(pipeline=4).micro_batch_multiple == 1


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.batch=3", ["rollout.batch", "unknown key"]),
        ("rollout.num_rollout=many", ["rollout.num_rollout", "integer"]),
        ("rollout.num_rollout=0", ["rollout.num_rollout"]),
        ("rollout.n_samples_per_prompt=1", ["rollout.n_samples_per_prompt"]),
        ("algorithm.num_steps_per_rollout=3", ["num_steps_per_rollout", "8 samples"]),
        ("optimizer.lr_decay=cosine", ["optimizer.lr_decay_steps: missing; the run has 2 optimizer steps"]),
        ("engine.max_model_len=100", ["engine.max_model_len", "100"]),
        ("reward.grader=guess", ["reward.grader", "deepscaler"]),
        ("run_id=Has Space", ["run_id"]),
        ("services.buffer.grpc_port=99999", ["services.buffer.grpc_port"]),
        ("services.weight_agents=[]", ["services.weight_agents"]),
        ("services.trainer_ranks=[{grpc_port=1,http_port=2}]", ["services.weight_agents", "2 ranks"]),
        ("parallel.context=2", ["tensor x context x pipeline = 2"]),
        ("parallel.tensor=2", ["tensor x context x pipeline = 2", "number of ranks, 1", "services.trainer_ranks"]),
        ("parallel.expert=2", ["expert_tensor x expert x pipeline = 2"]),
        ("nonsense", ["section.field=value"]),
        ("run_id.x=1", ["run_id", "not a section"]),
    ],
)
def test_bad_values_name_the_field(run_file, override, words):
    message = refused(run_file, override)
    assert all(word in message for word in words), message


def test_a_gpu_is_named_once(run_file):
    assert load_run(run_file, ["services.trainer.gpus=[1,0]"], {}).services.trainer.gpus == [1, 0]
    words = refused(run_file, environ={"FLOTILLA__SERVICES__TRAINER__GPUS": "[0, 0]"})
    assert "services.trainer.gpus: [0, 0] names a GPU twice" in words


def test_missing_file_and_bad_toml(tmp_path):
    assert "no such run spec" in refused(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("run_id = ")
    assert str(broken) in refused(broken)


def test_missing_section_is_named(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('run_id = "r"\n')
    message = refused(path)
    assert "model: missing" in message and "rollout: missing" in message


def test_missing_inputs_are_named(run_file):
    with pytest.raises(SpecError, match=r"model\.hf_checkpoint"):
        load_run(run_file, environ={}).check_files()


@pytest.mark.parametrize("grader", ["math", "boxed_f1", "package.module:function"])
def test_graders_are_accepted_by_name(run_file, grader):
    assert load_run(run_file, [f"reward.grader={grader}"], environ={}).reward.grader == grader


@pytest.mark.parametrize(
    "override",
    [
        "reward.grader=boxed_guess",
        "reward.grader=remote",
        "reward.remote_url=http://localhost:1",
        'reward={grader = "remote", remote_url = "file:///etc/passwd"}',
        'reward={grader = "remote", remote_url = "grpc://host:1"}',
        "reward.custom_per_group=true",
        "reward.values.wrong=nan",
        "reward.values.unknown=1",
        "rollout.lease_ttl_s=inf",
        "optimizer.lr=nan",
        'evaluation.sets={"../x" = {prompt_data = "e.jsonl"}}',
        'evaluation={max_response_tokens = 9999, sets = {e = {prompt_data = "e.jsonl"}}}',
    ],
)
def test_values_that_cannot_work_are_refused(run_file, override):
    refused(run_file, override)


def test_a_spec_that_is_a_directory_is_refused(tmp_path):
    assert str(tmp_path) in refused(tmp_path)
