"""What `flotilla up` refuses before it starts anything, and in which words."""

from __future__ import annotations

import json
import socket
from collections import namedtuple
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.cli import preflight
from services.cli.main import app
from services.cli.preflight import (
    check_gpus,
    check_inputs,
    check_machine,
    check_ports,
    check_redis,
    make_run_dir,
    write_run_file,
)
from services.common.spec import RedisSpec, RunSpec, SpecError, load_run
from tests.conftest import free_ports
from tests.model_configs import RECIPES

MODEL = RECIPES["Qwen3-30B-A3B"]
ROW = {"prompt": "1+1", "label": "2"}


def write_run(tmp_path: Path, *, model_type: str = "qwen3_moe", rows: str | None = None, more: str = "") -> Path:
    (tmp_path / "model").mkdir(exist_ok=True)
    (tmp_path / "model" / "config.json").write_text(json.dumps({**MODEL, "model_type": model_type}))
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / "model" / name).touch()
    (tmp_path / "prompts.jsonl").write_text(json.dumps(ROW) + "\n" if rows is None else rows)
    path = tmp_path / "demo.toml"
    path.write_text(
        'run_id = "demo"\n[model]\nhf_checkpoint = "model"\n[data]\nprompt_data = "prompts.jsonl"\n'
        f"[rollout]\nnum_rollout = 3\nrollout_batch_size = 2\nn_samples_per_prompt = 2\n{more}"
    )
    return path


def spec_of(tmp_path: Path, **settings) -> RunSpec:
    return load_run(write_run(tmp_path, **settings), environ={})


def on_free_ports(tmp_path: Path) -> RunSpec:
    """The spec with ports that nothing listens on."""
    ports = iter(free_ports(15))
    tables = [f"[services.{name}]" for name in ("buffer", "reward", "rollout_gateway", "trainer", "weight_sync")]
    tables += ["[[services.weight_agents]]", "[[services.engines]]"]
    more = "".join(f"{table}\ngrpc_port = {next(ports)}\nhttp_port = {next(ports)}\n" for table in tables)
    return spec_of(tmp_path, more=f"{more}[redis]\nport = {next(ports)}\n")


def test_a_good_run_passes(tmp_path):
    spec = on_free_ports(tmp_path)
    check_inputs(spec)
    check_machine(spec)


def test_unknown_model(tmp_path):
    with pytest.raises(SpecError) as error:
        check_inputs(spec_of(tmp_path, model_type="mamba"))
    assert str(tmp_path / "model" / "config.json") in str(error.value)
    assert "'mamba'" in str(error.value) and "llama, qwen2, qwen3" in str(error.value)


def test_all_families_pass(tmp_path):
    for model in RECIPES.values():
        spec = spec_of(tmp_path)
        (tmp_path / "model" / "config.json").write_text(json.dumps(model))
        check_inputs(spec)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            "[model.overrides]\nhidden_size = 12\n",
            r"model\.overrides\.hidden_size: the checkpoint has 2048, on",
        ),
        ("[model.overrides]\nn_group = 2\n", r"model\.overrides\.n_group: "),
        (
            "[trainer]\nmtp_loss_scaling_factor = 0.1\n",
            r"trainer\.mtp_loss_scaling_factor = 0\.1: num_nextn_predict_layers",
        ),
    ],
)
def test_what_the_model_cannot_be(tmp_path, more, message):
    with pytest.raises(SpecError, match=message):
        check_inputs(spec_of(tmp_path, more=more))


def test_a_context_that_is_longer_than_the_model_s(tmp_path):
    spec = spec_of(tmp_path, more="[model.overrides]\nmax_position_embeddings = 1024\n")
    with pytest.raises(SpecError, match=r"engine\.max_model_len = \d+ is more than .*max_position_embeddings = 1024"):
        check_inputs(spec)


def test_a_model_with_what_the_trainer_lacks(tmp_path):
    spec = spec_of(tmp_path)
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "use_sliding_window": True}))
    with pytest.raises(SpecError, match=r"config\.json: use_sliding_window"):
        check_inputs(spec)


def test_a_config_that_is_not_json(tmp_path):
    spec = spec_of(tmp_path)
    (tmp_path / "model" / "config.json").write_text("{")
    with pytest.raises(SpecError, match=r"config\.json: not a JSON object"):
        check_inputs(spec)


def test_missing_file(tmp_path):
    spec = spec_of(tmp_path)
    (tmp_path / "prompts.jsonl").unlink()
    with pytest.raises(SpecError, match=r"data\.prompt_data: there is no file .*prompts\.jsonl"):
        check_inputs(spec)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("", r"data\.prompt_data: .* is empty"),
        ("\n\n", r"data\.prompt_data: .* is empty"),
        (json.dumps(ROW) + "\nnot json\n", r"prompts\.jsonl:2: not valid JSON"),
        ("[1]\n", r"prompts\.jsonl:1: a row must be a JSON object"),
        ('{"question": "x", "label": "2"}\n', r"no field 'prompt'; the row has \['label', 'question'\]"),
        ('{"prompt": "x", "answer": "2"}\n', r"no field 'label'; the row has \['answer', 'prompt'\]"),
    ],
)
def test_prompt_rows(tmp_path, rows, words):
    with pytest.raises(SpecError, match=words):
        check_inputs(spec_of(tmp_path, rows=rows))


@pytest.mark.parametrize("missing", ["model.safetensors", "tokenizer.json"])
def test_a_model_that_is_not_whole_is_refused(tmp_path, missing):
    spec = spec_of(tmp_path)
    (tmp_path / "model" / missing).unlink()
    with pytest.raises(SpecError, match=r"model\.hf_checkpoint: there is no"):
        check_inputs(spec)


def test_evaluation_rows_are_checked_too(tmp_path):
    (tmp_path / "held_out.jsonl").write_text("{}\n")
    spec = spec_of(tmp_path, more='[evaluation.sets.sums]\nprompt_data = "held_out.jsonl"\n')
    with pytest.raises(SpecError, match=r"held_out\.jsonl:1: no field 'prompt'"):
        check_inputs(spec)


def test_port_in_use_names_the_field_and_what_to_do(tmp_path):
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SpecError) as error:
            check_ports({"services.buffer.grpc_port": ("127.0.0.1", port)})
    message = str(error.value)
    assert message.startswith("services.buffer.grpc_port: ") and f":{port}" in message
    assert "in use" in message and "another port" in message


def test_two_fields_with_one_port():
    port = free_ports(1)[0]
    fields = {"services.buffer.grpc_port": ("127.0.0.1", port), "redis.port": ("127.0.0.1", port)}
    with pytest.raises(SpecError, match=rf"redis\.port and services\.buffer\.grpc_port are both {port}"):
        check_ports(fields)


def test_no_redis(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "find_redis", lambda: None)
    with pytest.raises(SpecError, match="no redis-server on PATH; install Redis"):
        check_machine(on_free_ports(tmp_path))


@pytest.mark.parametrize("setting", ['username = "flotilla"', 'password_file = "password"', "tls = true"])
def test_the_redis_that_the_supervisor_starts_has_neither_users_nor_tls(tmp_path, setting):
    spec = spec_of(tmp_path, more=f"[redis]\n{setting}\n")
    with pytest.raises(SpecError, match=rf"redis\.{setting.split()[0]}: .* open Redis on 127\.0\.0\.1, .*leave it out"):
        check_redis(spec.redis)


def test_a_redis_elsewhere_needs_nothing_here(monkeypatch):
    monkeypatch.setattr(preflight, "find_redis", lambda: None)
    check_redis(RedisSpec(host="redis.example", username="flotilla", password_file=Path("password"), tls=True))


def test_shared_memory_smaller_than_the_weights(tmp_path, monkeypatch):
    spec = on_free_ports(tmp_path)
    (tmp_path / "model" / "model.safetensors").write_bytes(bytes(3 << 20))
    usage = namedtuple("usage", "free")(2 << 20)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(SpecError, match="/dev/shm has 2 MiB free and the weights take at least 3 MiB"):
        check_machine(spec)


def test_run_dir_that_is_a_file(tmp_path):
    spec = spec_of(tmp_path)
    (tmp_path / "runs").write_text("")
    with pytest.raises(SpecError, match=r"run_dir: cannot write .*choose another run_dir"):
        make_run_dir(spec)


def test_the_written_spec_is_the_same_run(tmp_path):
    spec = spec_of(tmp_path)
    make_run_dir(spec)
    assert load_run(write_run_file(spec), environ={}) == spec


def test_a_run_goes_on_with_other_ports_but_not_with_another_batch(tmp_path):
    spec = spec_of(tmp_path)
    make_run_dir(spec)
    write_run_file(spec)
    path = tmp_path / "demo.toml"
    write_run_file(load_run(path, ["redis.port=7999"], environ={}))
    with pytest.raises(SpecError) as error:
        write_run_file(load_run(path, ["rollout.rollout_batch_size=4", "optimizer.lr=0.1"], environ={}))
    assert "other values of optimizer.lr, rollout.rollout_batch_size;" in str(error.value)


def test_up_exits_2_with_one_sentence(tmp_path):
    path = write_run(tmp_path, model_type="gpt_neox")
    result = CliRunner().invoke(app, ["up", str(path)])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1 and "gpt_neox" in result.stderr
    assert not (tmp_path / "runs").exists()


def test_up_names_an_unknown_key(tmp_path):
    path = write_run(tmp_path)
    result = CliRunner().invoke(app, ["up", str(path), "--set", "rollout.batchsize=3"])
    assert result.exit_code == 2
    assert "rollout.batchsize: unknown key" in result.stderr


def test_dry_run_prints_the_resolved_spec(tmp_path):
    path = write_run(tmp_path)
    result = CliRunner().invoke(app, ["up", str(path), "--dry-run", "--set", "rollout.num_rollout=9"])
    assert result.exit_code == 0
    printed = tmp_path / "printed.toml"
    printed.write_text(result.stdout)
    assert load_run(printed, environ={}).rollout.num_rollout == 9
    assert not (tmp_path / "runs").exists()


def test_dry_run_says_which_file_is_not_there(tmp_path):
    path = write_run(tmp_path)
    (tmp_path / "prompts.jsonl").unlink()
    result = CliRunner().invoke(app, ["up", str(path), "--dry-run"])
    assert result.exit_code == 2 and "run_id = " in result.stdout
    assert "data.prompt_data: there is no file" in result.stderr


def test_a_directory_of_supervised_fine_tuning_is_refused(tmp_path):
    spec = spec_of(tmp_path)
    make_run_dir(spec)
    (spec.run_dir / "sft.toml").write_text("")
    with pytest.raises(SpecError, match=r"sft\.toml is there, of a run of `flotilla sft`"):
        write_run_file(spec)


def test_gpus_that_are_not_there(tmp_path, monkeypatch):
    spec = on_free_ports(tmp_path)
    trainer = spec.services.trainer.model_copy(update={"gpus": [0, 2]})
    named = spec.model_copy(update={"services": spec.services.model_copy(update={"trainer": trainer})})
    with pytest.raises(SpecError, match=r"services\.trainer\.gpus: vLLM is installed for the CPU"):
        check_gpus(named, found=3)
    monkeypatch.setattr(preflight, "engines_on_cpu", lambda: False)
    check_gpus(named, found=3)
    with pytest.raises(SpecError, match=r"services\.trainer\.gpus: there is no GPU 2; this machine has 2"):
        check_gpus(named, found=2)
    with pytest.raises(SpecError, match=r"services\.trainer\.gpus: there is no GPU 2; this machine has none$"):
        check_gpus(named, found=0)


def test_a_weight_agent_sees_the_gpu_of_the_trainer(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "engines_on_cpu", lambda: False)
    agent = "[[services.weight_agents]]\ngrpc_port = 9000\nhttp_port = 9001\ngpus = "
    for gpus in ("[]", "[1]", "[0, 1]"):
        check_gpus(spec_of(tmp_path, more=f"[services.trainer]\ngpus = [1]\n{agent}{gpus}\n"), found=2)
    apart = spec_of(tmp_path, more=f"[services.trainer]\ngpus = [1]\n{agent}[0]\n")
    with pytest.raises(SpecError, match=r"services\.weight_agents\.0\.gpus: the trainer computes on GPU 1"):
        check_gpus(apart, found=2)
