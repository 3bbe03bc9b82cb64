"""The receiving end of one session, in a thread of its own, and on CUDA on a stream of its own.

Bytes arrive in staging memory while the engine serves; `load` alone changes the model. Everything before it can be
aborted without effect.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch

from flotilla.rollout_gateway.v1 import engine_pb2
from services.common.rpc import seconds
from services.weight_sync import codec
from services.weight_sync.digest import total
from services.weight_sync.digest_torch import digest_bucket
from services.weight_sync.meeting import Seat, SessionError
from services.weight_sync.staging import make_staging
from services.weight_sync.streams import own_stream, with_index
from services.weight_sync.transport import Transport, abort_session
from services.weight_sync.wire import decode_bucket

Reload = Callable[[Iterator[tuple[str, torch.Tensor]]], None]
"""Puts tensors, by HF name, into the model; each is valid only until the next is asked for."""


@dataclass(frozen=True, slots=True)
class Staged:
    """What a session has brought."""

    buffers: list[torch.Tensor] = field(repr=False)
    """One for each bucket."""
    digest: str
    wire_seconds: float


class Reception:
    """One session: a thread that fills staging memory.

    The state is receiving, then received or failed; whoever ends `receiving` first decides, the thread or an abort.
    """

    def __init__(self, request: engine_pb2.StartWeightUpdateRequest, worker: int, device: torch.device) -> None:
        """Begin.

        Args:
            request: The session.
            worker: Which of the engine's workers this is.
            device: Where the model is.
        """
        self.session_id = request.session_id
        self.state, self.error = "receiving", ""
        self.load_seconds: float | None = None
        self._staged: Staged | None = None
        self._buckets = codec.buckets_from_proto(request.buckets)
        self._cancelled = threading.Event()
        self._seat = Seat(
            rendezvous=request.rendezvous_address,
            session_id=request.session_id,
            rank=request.first_rank + worker,
            world_size=request.world_size,
            sends=False,
            device=with_index(device),
            deadline_s=time.monotonic() + seconds(request.session_timeout),
            cancelled=self._cancelled,
        )
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name=f"receive {self.session_id}", daemon=True).start()

    def poll(self) -> dict[str, Any]:
        """How it stands."""
        with self._lock:
            staged = self._staged
            return {
                "state": self.state,
                "digest": staged.digest if staged else "",
                "wire_seconds": staged.wire_seconds if staged else 0.0,
                "error": self.error,
            }

    def abort(self) -> None:
        """End it without effect, unless it is loaded. The thread ends with its connections, at the deadline at last."""
        if self.load_seconds is None:
            self._cancelled.set()
            self._fail("it was aborted")
            abort_session(self._seat.rendezvous, self.session_id, self._seat.world_size)

    def load(self, reload: Reload, model_dtype: torch.dtype, keep_fp8: bool = False) -> float:
        """Put what was received into the model; seconds that it took. A repeat answers the same.

        Args:
            reload: Loads the tensors.
            model_dtype: dtype of what was quantised, once it is dequantised.
            keep_fp8: Hand over values and scales of what was quantised instead; see `decode_bucket`.

        Raises:
            RuntimeError: The session is not complete.
        """
        if self._staged is None or self.state != "received":
            raise RuntimeError(f"session {self.session_id} is {self.state}, not received: there is nothing to load")
        if self.load_seconds is None:
            begun = time.monotonic()
            self.state = "failed"  # until all is loaded: a load that broke off must not be taken for complete
            try:
                reload(self._tensors(self._staged.buffers, model_dtype, keep_fp8))
            finally:
                self._staged.buffers.clear()  # memory that the next session needs
            if self._seat.device.type == "cuda":
                torch.cuda.synchronize(self._seat.device)
            self.state, self.load_seconds = "received", time.monotonic() - begun
        return self.load_seconds

    def _tensors(
        self, buffers: list[torch.Tensor], model_dtype: torch.dtype, keep_fp8: bool
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Decode what was received, giving up each bucket once it is through."""
        for bucket in self._buckets:
            buffer = buffers.pop(0)
            if buffer.is_cuda:  # allocated for another stream, which must not reuse it before this one is done
                buffer.record_stream(torch.cuda.current_stream(buffer.device))
            yield from decode_bucket(bucket, buffer, model_dtype, keep_fp8)

    def _run(self) -> None:
        try:
            with own_stream(self._seat.device):
                staged = self._receive()
        except SessionError as error:
            self._fail(str(error))
        except Exception as error:  # noqa: BLE001  nobody joins the thread: the error goes to whoever polls
            self._fail(f"{type(error).__name__}: {error}")
        else:
            self._complete(staged)

    def _receive(self) -> Staged:
        staging = make_staging(self._buckets, self._seat.device)
        with closing(Transport(self._seat)) as transport:
            begun = time.monotonic()
            transport.receive(staging.messages, staging.sources)
            wire_seconds = time.monotonic() - begun
        digest = total(map(digest_bucket, self._buckets, staging.buffers))
        return Staged(staging.buffers, str(digest), wire_seconds)

    def _complete(self, staged: Staged) -> None:
        with self._lock:
            if self.state == "receiving":
                self.state, self._staged = "received", staged

    def _fail(self, error: str) -> None:
        with self._lock:
            if self.state != "failed":
                self.state, self.error, self._staged = "failed", error, None
