"""The HTTP side of every process: /livez, /readyz, /metrics and /statusz."""

from __future__ import annotations

import socket
from typing import Any

import uvicorn
from fastapi import FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from services.common.board import StatusBoard
from services.common.spec import Endpoint


def make_app(board: StatusBoard) -> FastAPI:
    """The four endpoints over a status board."""
    app = FastAPI(title=f"flotilla {board.service}", docs_url=None, redoc_url=None)

    @app.get("/livez")
    async def livez() -> dict[str, str]:
        """200 as long as the event loop runs; looks at nothing else."""
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz(response: Response) -> dict[str, Any]:
        """200 when every check passes, else 503 with what is wrong."""
        problems = board.problems()
        response.status_code = 503 if problems else 200
        return {"status": "unready" if problems else "ok", "problems": problems}

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus text format."""
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/statusz")
    async def statusz() -> dict[str, Any]:
        """What the process does and what it waits for."""
        return board.snapshot()

    return app


class HttpServer(uvicorn.Server):
    """uvicorn in our event loop; signals stay with the service."""

    def __init__(self, board: StatusBoard, endpoint: Endpoint) -> None:
        super().__init__(uvicorn.Config(make_app(board), log_config=None, access_log=False, lifespan="off"))
        self._socket = bind_socket(endpoint.bind, endpoint.http_port)

    async def serve_bound(self) -> None:
        """Serve until `should_exit` is set."""
        await self._serve(sockets=[self._socket])


def bind_socket(host: str, port: int) -> socket.socket:
    """A bound TCP socket. Raises OSError that names the address if it is in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from error
    return sock
