"""What the documents promise exists: files, commands, metrics."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from services.trainer.metrics import STEP_METRICS
from services.trainer.sft.run import SFT_METRICS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_metric_of_a_step_is_documented():
    text = (ROOT / "docs" / "metrics.md").read_text()
    assert [name for name in STEP_METRICS if f"`{name}`" not in text] == []


def test_every_metric_of_supervised_fine_tuning_is_documented():
    text = (ROOT / "docs" / "sft.md").read_text()
    assert [name for name in SFT_METRICS if f"`{name}`" not in text] == []


def test_commands_of_the_readme_are_those_that_are_started():
    text = (ROOT / "README.md").read_text()
    for module in re.findall(r"^python -m (\S+) --run", text, re.MULTILINE):
        done = subprocess.run([sys.executable, "-c", f"import importlib.util as u; assert u.find_spec('{module}')"])
        assert done.returncode == 0, module


def test_ports_of_the_readme_are_the_defaults():
    from services.common.spec import RedisSpec, ServicesSpec

    services, text = ServicesSpec(), (ROOT / "README.md").read_text()
    for name in ("buffer", "reward", "rollout_gateway", "trainer", "weight_sync"):
        endpoint = getattr(services, name)
        assert f"| {name} | {endpoint.grpc_port} | {endpoint.http_port} |" in text
    assert f"| Redis | {RedisSpec().port} | |" in text
