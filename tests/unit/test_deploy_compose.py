"""deploy/compose.yaml against the process table and the run spec; no container is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from services.cli.processes import Process, process_table
from services.common.spec import RunSpec, load_run

COMPOSE = Path(__file__).resolve().parents[2] / "deploy" / "compose.yaml"
RUN_FILE = "/inputs/run.toml"
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


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    return yaml.safe_load(COMPOSE.read_text())["services"]


def environment_of(service: dict[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in service["environment"].items()}


@pytest.fixture
def spec(tmp_path, services) -> RunSpec:
    """The run as the trainer's container sees it."""
    path = tmp_path / "run.toml"
    path.write_text(SPEC)
    return load_run(path, environ=environment_of(services["trainer"]))


@pytest.fixture
def table(tmp_path) -> dict[str, Process]:
    path = tmp_path / "plain.toml"
    path.write_text(SPEC)
    spec = load_run(path, environ={})
    return {one.name: one for one in process_table(spec, Path(RUN_FILE), python="python", redis="redis-server")}


def test_one_container_for_each_process(services, table):
    assert set(services) == set(table)


def test_commands_are_those_of_flotilla_up(services, table):
    for name, process in table.items():
        if name != "redis":
            assert services[name]["command"] == list(process.argv), name


def test_redis_differs_only_in_where_it_listens_and_writes(services, table):
    ours, theirs = (dict(zip(argv[1::2], argv[2::2], strict=True)) for argv in
                    (table["redis"].argv, services["redis"]["command"]))  # fmt: skip
    assert theirs | {"--bind": ours["--bind"], "--dir": ours["--dir"]} == ours | {"--protected-mode": "no"}


def test_restart_policies_are_those_of_flotilla_up(services, table):
    assert {name: one["restart"] for name, one in services.items()} == {
        name: process.restart for name, process in table.items()
    }


def test_every_container_is_found_by_its_name_and_listens_to_others(services, spec):
    at = spec.services
    endpoints = {name: getattr(at, name) for name in ("buffer", "reward", "rollout_gateway", "trainer", "weight_sync")}
    endpoints |= {"weight_agent-0": at.weight_agents[0], "engine-0": at.engines[0]}
    for name, endpoint in endpoints.items():
        assert (endpoint.host, endpoint.bind) == (name, "0.0.0.0"), name
        assert f"http://127.0.0.1:{endpoint.http_port}/readyz" in services[name]["healthcheck"]["test"][-1], name
    assert spec.redis.host == "redis" and str(spec.redis.port) in services["redis"]["command"]


def test_all_services_see_one_run(services):
    environments = [environment_of(one) for name, one in services.items() if name != "redis"]
    assert all(one == environments[0] for one in environments)


def test_profile_health_and_grace(services):
    for name, one in services.items():
        assert one["profiles"] == ["cpu"], name
        assert one["stop_grace_period"] == "20s", name
        assert one["healthcheck"]["test"][0] == "CMD", name


def test_containers_wait_only_for_containers_that_exist(services):
    for name, one in services.items():
        for other in one.get("depends_on", {}):
            assert other in services and other != name


def test_trainer_and_agent_share_memory(services):
    assert services["weight_agent-0"]["ipc"] == "shareable"
    assert services["trainer"]["ipc"] == "service:weight_agent-0"
    assert "weight_agent-0" in services["trainer"]["depends_on"]


def test_images_come_from_one_dockerfile_and_known_extras(services):
    import tomllib

    root = COMPOSE.parents[1]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name, one in services.items():
        if name != "redis":
            assert (COMPOSE.parent / one["build"]["context"] / one["build"]["dockerfile"]).is_file(), name
            assert one["build"]["args"]["EXTRA"] in extras, name
