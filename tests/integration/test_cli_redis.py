"""The Redis that `flotilla up` starts: the real one, with the command of the process table."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from services.cli.processes import find_redis, process_table
from services.common.spec import load_run
from tests.conftest import free_ports


@contextmanager
def running(argv: tuple[str, ...], port: int) -> Iterator[tuple[subprocess.Popen[bytes], redis.Redis]]:
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    client = redis.Redis(port=port, socket_timeout=5)
    try:
        give_up = time.monotonic() + 10
        while True:
            try:
                client.ping()
                break
            except (redis.ConnectionError, redis.BusyLoadingError):
                assert time.monotonic() < give_up, "Redis did not start in time"
                time.sleep(0.05)
        yield process, client
    finally:
        client.close()
        process.kill()
        process.wait(10)


@pytest.fixture
def command(tmp_path: Path) -> tuple[tuple[str, ...], int]:
    if not find_redis():
        pytest.skip("there is no redis-server")
    path = tmp_path / "demo.toml"
    path.write_text(
        'run_id = "demo"\n[model]\nhf_checkpoint = "model"\n[data]\nprompt_data = "p.jsonl"\n'
        "[rollout]\nnum_rollout = 3\nrollout_batch_size = 2\nn_samples_per_prompt = 2\n"
    )
    port = free_ports(1)[0]
    spec = load_run(path, [f"redis.port={port}", "redis.maxmemory_mb=100"], environ={})
    (spec.run_dir / "redis").mkdir(parents=True)
    return process_table(spec, path)[0].argv, port


def test_its_settings(command):
    expected = {
        "appendonly": "yes",
        "appendfsync": "always",
        "maxmemory": str(100 << 20),
        "maxmemory-policy": "noeviction",
        "save": "",
        "bind": "127.0.0.1",
    }
    with running(*command) as (_, client):
        settings = client.config_get("*")
    assert isinstance(settings, dict)
    assert {name: settings[name] for name in expected} == expected


def test_an_acknowledged_write_survives_a_kill(command):
    with running(*command) as (process, client):
        client.set("ledger", "written")
        process.kill()
        process.wait(10)
    with running(*command) as (_, client):
        assert client.get("ledger") == b"written"
