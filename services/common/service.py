"""How a process of Flotilla starts, serves and stops.

`run_service` is the whole of a service's `__main__`: it reads the run spec, binds gRPC and HTTP in one event loop,
calls the service's `setup`, serves, and stops in order on SIGTERM or SIGINT. HTTP answers from the start; gRPC once
`setup` is done, and its health says NOT_SERVING again from the first signal on.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.common.board import StatusBoard
from services.common.errors import FailedPrecondition
from services.common.http import HttpServer
from services.common.logs import get_logger, setup_logging
from services.common.parent_death import set_parent_death_signal
from services.common.rpc import bind_server, make_server
from services.common.spec import Endpoint, RunSpec, SpecError, TrainingSpec, load_run

STOP_GRACE_S = 5.0
"""Time that running calls get at a stop."""
CANCEL_AGAIN_S = 0.2
HEALTH_EVERY_S = 1.0
EXIT_BAD_INPUT = 2

log = get_logger(__name__)


@dataclass(slots=True)
class ServiceHost:
    """What a service is given to live in."""

    spec: RunSpec
    endpoint: Endpoint
    board: StatusBoard
    server: grpc.aio.Server
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set at the first signal, or when a background task failed."""
    on_stop: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    """Called in reverse order after the servers have stopped."""
    service_names: list[str] = field(default_factory=list)
    failure: BaseException | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def serve(self, service_name: str, add: Callable[[Any, grpc.aio.Server], None], servicer: object) -> None:
        """Add a servicer; `service_name` is the full proto name, for health and reflection."""
        add(servicer, self.server)
        self.service_names.append(service_name)

    def spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        """Run a background task for the life of the process; if it fails, the process stops with that error."""
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def fail(self, error: BaseException) -> None:
        """Stop the process with an error."""
        self.failure = self.failure or error
        self.stopping.set()

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or not (error := task.exception()):
            return
        if isinstance(error, SpecError | FailedPrecondition):
            log.error("the run cannot be served", error=str(error))
        else:
            log.error("a background task failed", task=task.get_name(), exc_info=error)
        self.fail(error)

    async def cancel_tasks(self) -> None:
        """End the background tasks. A cancellation that meets the end of a wait can be swallowed: ask again."""
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks, timeout=CANCEL_AGAIN_S)


Setup = Callable[[ServiceHost], Awaitable[None]]
S = TypeVar("S", bound=TrainingSpec)


def service_parser(service: str) -> argparse.ArgumentParser:
    """The arguments that every service takes."""
    parser = argparse.ArgumentParser(prog=f"python -m services.{service}")
    parser.add_argument("--run", type=Path, required=True, help="run spec (TOML)")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE", help="override a field")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved run spec and exit")
    return parser


def load_spec_or_exit(args: argparse.Namespace, load: Callable[[Path, list[str]], S] = load_run) -> S:
    """The spec of the arguments; leaves with one clear message if it cannot be used."""
    try:
        spec = load(args.run, args.set)
        if args.dry_run:
            sys.stdout.write(spec.to_toml())
            sys.exit(0)
        spec.check_files()
    except SpecError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(EXIT_BAD_INPUT)
    return spec


def run_service(service: str, setup: Setup, endpoint_of: Callable[[RunSpec], Endpoint]) -> None:
    """Parse arguments, run the service until a signal, and exit: 0 after a signal, 2 if a restart would not help."""
    spec = load_spec_or_exit(service_parser(service).parse_args())
    try:
        endpoint = endpoint_of(spec)
    except SpecError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(EXIT_BAD_INPUT)
    run_process(service, spec, setup, endpoint)


def run_process(service: str, spec: RunSpec, setup: Setup, endpoint: Endpoint) -> None:
    """Run a service with a spec that is loaded already; ends the process."""
    die_with_parent()
    setup_logging(service, spec.run_id)
    failure = asyncio.run(serve(service, spec, setup, endpoint))
    if isinstance(failure, SpecError | FailedPrecondition):  # a restart would not help
        sys.exit(EXIT_BAD_INPUT)
    sys.exit(1 if failure else 0)


async def serve(service: str, spec: RunSpec, setup: Setup, endpoint: Endpoint) -> BaseException | None:
    """Serve until a signal or a failure; returns the failure."""
    board = StatusBoard(service)
    host = ServiceHost(spec, endpoint, board, make_server())
    started = False
    board.checks["started"] = lambda: "" if started else "starting"
    board.checks["draining"] = lambda: "stopping" if host.stopping.is_set() else ""
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, host.stopping.set)
    try:
        http = HttpServer(board, endpoint)
        bind_server(host.server, endpoint.bind, endpoint.grpc_port)
    except OSError as error:
        log.error("cannot listen", error=str(error))
        return error
    http_task = loop.create_task(http.serve_bound())
    healthy = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
    await healthy.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(healthy, host.server)
    try:
        await _until_stop(host, setup(host))
        if not host.stopping.is_set():
            names = [*host.service_names, health.SERVICE_NAME, reflection.SERVICE_NAME]
            reflection.enable_server_reflection(names, host.server)
            gc.freeze()  # what is there now stays: no collection need look through it again
            await host.server.start()
            started = True
            host.spawn(_mirror_readiness(board, healthy, ["", *host.service_names]), "health")
            log.info("serving", grpc=endpoint.grpc, http=endpoint.http)
            await host.stopping.wait()
    except (SpecError, FailedPrecondition) as error:
        log.error("the run cannot be served", error=str(error))
        host.fail(error)
    except Exception as error:
        log.error("the service failed", exc_info=error)
        host.fail(error)
    finally:
        host.stopping.set()
        with contextlib.suppress(Exception):
            await healthy.enter_graceful_shutdown()
        await host.cancel_tasks()
        await host.server.stop(STOP_GRACE_S)
        for stop in reversed(host.on_stop):
            try:
                await stop()
            except Exception as error:
                log.error("a part did not stop in order", exc_info=error)
        http.should_exit = True
        await http_task
        log.info("stopped")
    return host.failure


async def _mirror_readiness(board: StatusBoard, healthy: Any, names: list[str]) -> None:
    """Make gRPC health say what /readyz says."""
    while True:
        serving = not board.problems()
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in names:
            await healthy.set(name, status)
        await asyncio.sleep(HEALTH_EVERY_S)


async def _until_stop(host: ServiceHost, setup: Awaitable[None]) -> None:
    task = asyncio.ensure_future(setup)
    stop = asyncio.ensure_future(host.stopping.wait())
    await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if not task.done():
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def die_with_parent() -> None:
    """Ask the kernel for SIGTERM when the parent dies, so that a killed supervisor leaves nothing behind (Linux)."""
    set_parent_death_signal(signal.SIGTERM)


class Backoff:
    """Pauses between attempts: doubling with jitter, starting over after `reset`."""

    def __init__(self, first_s: float = 0.1, most_s: float = 5.0) -> None:
        self._first_s, self._most_s, self._next_s = first_s, most_s, first_s

    async def wait(self) -> None:
        """Sleep for the next pause."""
        await asyncio.sleep(self._next_s)
        self._next_s = min(2 * self._next_s, self._most_s)

    def reset(self) -> None:
        """After a success."""
        self._next_s = self._first_s


def now_s() -> float:
    """Monotonic time in seconds, for durations."""
    return time.monotonic()
