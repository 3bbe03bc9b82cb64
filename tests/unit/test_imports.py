"""What must import where: the light services without torch, and services without one another."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ROOT / "services"
LIGHT = ("common", "buffer", "reward")

BLOCKER = """
import importlib, pkgutil, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "vllm", "megatron"):
            raise ImportError(name + " is not installed here")
sys.meta_path.insert(0, Blocker())
for package in sys.argv[1:]:
    root = importlib.import_module(package)
    for module in pkgutil.walk_packages(root.__path__, package + "."):
        importlib.import_module(module.name)
"""


@pytest.mark.parametrize("package", LIGHT)
def test_light_services_import_without_torch_vllm_and_megatron(package):
    done = subprocess.run(
        [sys.executable, "-c", BLOCKER, f"services.{package}"], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


def imported_services(path: Path) -> set[str]:
    """Names of the service packages that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        found |= {name.split(".")[1] for name in names if name.startswith("services.")}
    return found


@pytest.mark.parametrize("service", ["buffer", "reward", "rollout_gateway", "trainer", "weight_sync"])
def test_services_import_only_themselves_and_common(service):
    for path in (SERVICES / service).rglob("*.py"):
        assert imported_services(path) <= {service, "common"}, path


def test_no_pickle_on_any_wire():
    for path in SERVICES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            assert not {"pickle", "cloudpickle", "dill"} & set(names), path
