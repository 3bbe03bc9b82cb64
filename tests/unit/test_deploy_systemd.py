"""deploy/systemd against the process table, and through `systemd-analyze verify` where it is installed."""

from __future__ import annotations

import configparser
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from services.cli.processes import process_table
from services.common.spec import load_run

UNITS = Path(__file__).resolve().parents[2] / "deploy" / "systemd"
SPEC = (
    'run_id = "demo"\n[model]\nhf_checkpoint = "model"\n[data]\nprompt_data = "prompts.jsonl"\n'
    "[rollout]\nnum_rollout = 3\nrollout_batch_size = 2\nn_samples_per_prompt = 2\n"
)


def read_unit(name: str) -> configparser.ConfigParser:
    unit = configparser.ConfigParser(strict=False, interpolation=None, delimiters=("=",))
    unit.optionxform = str  # pyright: ignore[reportAttributeAccessIssue]  keys are case-sensitive
    unit.read(UNITS / f"flotilla-{name}@.service")
    return unit


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "demo.toml"
    path.write_text(SPEC)
    spec = load_run(path, ["run_dir=/var/lib/flotilla/demo"], environ={})
    run_file = Path("/etc/flotilla/demo.toml")
    made = process_table(spec, run_file, python="/opt/flotilla/bin/python", redis="/usr/bin/redis-server")
    return {one.name: one for one in made}


def test_one_unit_for_each_process(table):
    assert {path.name for path in UNITS.glob("*.service")} == {f"flotilla-{name}@.service" for name in table}


def test_commands_are_those_of_flotilla_up(table):
    for name, process in table.items():
        command = read_unit(name)["Service"]["ExecStart"]
        values = {"%i": "demo", "%j": name.rpartition("-")[2]}
        values |= {"${FLOTILLA__REDIS__PORT}": "7790", "${FLOTILLA__REDIS__MAXMEMORY_MB}": "2048"}
        for specifier, value in values.items():
            command = command.replace(specifier, value)
        assert shlex.split(command) == list(process.argv), name


def test_units_restart_stop_and_belong_to_the_run(table):
    for name in table:
        unit = read_unit(name)
        service = unit["Service"]
        assert service["Restart"] == "on-failure", name
        assert service["KillMode"] == "control-group", name
        assert int(service["TimeoutStopSec"]) >= 20, name
        assert service["EnvironmentFile"] == "-/etc/flotilla/%i.env", name
        assert unit["Unit"]["PartOf"] == "flotilla@%i.target", name


def test_the_target_wants_every_unit(table):
    text = (UNITS / "flotilla@.target").read_text()
    wanted = {word for line in text.splitlines() if line.startswith("Wants=") for word in line[6:].split()}
    assert wanted == {f"flotilla-{name}@%i.service" for name in table}


def test_systemd_accepts_the_units(tmp_path):
    analyze = shutil.which("systemd-analyze")
    if not analyze:
        pytest.skip("systemd-analyze is not installed")
    for path in UNITS.iterdir():
        text = (
            path.read_text()
            .replace("/opt/flotilla/bin/python", "/bin/true")
            .replace("/usr/bin/redis-server", "/bin/true")
        )
        (tmp_path / path.name.replace("@.", "@demo.")).write_text(text)
    units = sorted(str(path) for path in tmp_path.iterdir())
    done = subprocess.run([analyze, "verify", "--man=no", *units], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
