"""Fixtures that several tests share: free ports, a real Redis, and a place for the sockets of vLLM."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"
"""Data and cases that lie beside a checkout of the project; tests that need them skip where they are absent."""


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on now, all different."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def shared_file(name: str) -> Path:
    """A file of the shared folder; skips the test where it is absent."""
    path = SHARED / name
    if not path.is_file():
        pytest.skip(f"needs {name} from the shared folder, which is not beside this checkout")
    return path


@pytest.fixture(scope="session", autouse=True)
def vllm_sockets() -> Iterator[None]:
    """A directory for the sockets that vLLM's processes meet at, since those of a killed one stay."""
    with TemporaryDirectory(prefix="flotilla-tests-") as directory, pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_RPC_BASE_PATH", directory)
        yield


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Directory of a tiny Qwen3 checkpoint."""
    from tests.tiny_models import save_model

    path = tmp_path_factory.mktemp("qwen3")
    save_model(path)
    yield path
