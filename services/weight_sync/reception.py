"""The receiving end of one session, in a thread of its own.

Bytes arrive in staging memory while the engine serves; `load` alone changes the model. Everything before it can be
aborted without effect.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import torch

from flotilla.rollout_gateway.v1 import engine_pb2
from services.common.rpc import seconds
from services.weight_sync import codec
from services.weight_sync.digest import total
from services.weight_sync.fingerprint import digest_bucket
from services.weight_sync.transport import SessionError, Transport, abort_session, own_stream
from services.weight_sync.wire import decode_bucket


class Reception:
    """One session: a thread that fills staging memory.

    The state is receiving, then received or failed; whoever ends `receiving` first decides, the thread or an abort.
    """

    def __init__(self, request: engine_pb2.StartWeightUpdateRequest, worker: int, device: torch.device) -> None:
        self.session_id = request.session_id
        self.state, self.digest, self.error = "receiving", "", ""
        self.wire_seconds = 0.0
        self.load_seconds: float | None = None
        self._buckets = codec.buckets_from_proto(request.buckets)
        self._buffers: list[torch.Tensor] = []
        self._rendezvous, self._world_size = request.rendezvous_address, request.world_size
        self._rank, self._device = request.first_rank + worker, device
        self._deadline_s = time.monotonic() + seconds(request.session_timeout)
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name=f"receive {self.session_id}", daemon=True).start()

    def poll(self) -> dict[str, Any]:
        """How it stands."""
        with self._lock:
            return {
                "state": self.state,
                "digest": self.digest,
                "wire_seconds": self.wire_seconds,
                "error": self.error,
            }

    def abort(self) -> None:
        """End it without effect, unless it is loaded. The thread ends with its connections, at the deadline at last."""
        if self.load_seconds is None:
            self._fail("it was aborted")
            abort_session(self._rendezvous, self.session_id, self._world_size)

    def load(self, model_runner: Any, model_dtype: torch.dtype) -> float:
        """Put what was received into the model; seconds that it took. A repeat answers the same.

        Raises:
            RuntimeError: The session is not complete.
        """
        if self.state != "received":
            raise RuntimeError(f"session {self.session_id} is {self.state}, not received: there is nothing to load")
        if self.load_seconds is None:
            begun = time.monotonic()
            self.state = "failed"  # until all is loaded: a load that broke off must not be taken for complete
            model_runner.reload_weights(weights_iterator=self._tensors(model_dtype), is_checkpoint_format=True)
            self.state, self.load_seconds = "received", time.monotonic() - begun
        return self.load_seconds

    def _tensors(self, model_dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Decode what was received, giving up each bucket once it is through."""
        for bucket in self._buckets:
            yield from decode_bucket(bucket, self._buffers.pop(0), model_dtype)

    def _run(self) -> None:
        begun = time.monotonic()
        try:
            with own_stream(self._device):
                buffers = self._receive()
                wire_seconds = time.monotonic() - begun
                digest = total(map(digest_bucket, self._buckets, buffers))
        except SessionError as error:
            self._fail(str(error))
        except Exception as error:  # noqa: BLE001  nobody joins the thread: the error goes to whoever polls
            self._fail(f"{type(error).__name__}: {error}")
        else:
            self._complete(buffers, str(digest), wire_seconds)

    def _receive(self) -> list[torch.Tensor]:
        buffers = []
        join = Transport(
            self._rendezvous, self.session_id, self._rank, self._world_size, self._deadline_s, self._device
        )
        with closing(join) as transport:
            for bucket in self._buckets:
                buffer = torch.empty(bucket.wire_bytes, dtype=torch.uint8, device=self._device)
                transport.receive(buffer, bucket.source_rank)
                buffers.append(buffer)
            transport.confirm(sorted({bucket.source_rank for bucket in self._buckets}))
        return buffers

    def _complete(self, buffers: list[torch.Tensor], digest: str, wire_seconds: float) -> None:
        with self._lock:
            if self.state == "receiving":
                self._buffers, self.digest, self.wire_seconds = buffers, digest, wire_seconds
                self.state = "received"

    def _fail(self, error: str) -> None:
        with self._lock:
            if self.state != "failed":
                self.state, self.error, self._buffers = "failed", error, []
