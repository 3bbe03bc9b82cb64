"""Receives weights inside the vLLM worker: a worker extension, called through collective RPC.

`weight_sync_start` returns at once and leaves the receiving to a thread, because an RPC that blocks stops generation.
Bytes arrive in staging memory while the engine serves; `weight_sync_poll` says when they are there, and
`weight_sync_finish` alone changes the model, through vLLM's layer-wise reload. Everything before it can be aborted
without effect. Importing this module in a worker process ties the process to its parent and repairs vLLM on CPU.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from flotilla.rollout_gateway.v1 import engine_pb2
from services.common.service import set_parent_death_signal
from services.weight_sync import vllm_cpu_fixes
from services.weight_sync.manifest import checkpoint_shapes, make_manifest
from services.weight_sync.reception import Reception
from services.weight_sync.records import ManifestParameter
from services.weight_sync.vllm_model import describe_model, restore_attention_scales, serves_fp8

if multiprocessing.parent_process() is not None:
    # A worker outlives an engine core that is killed, and would keep its memory and its GPU.
    set_parent_death_signal(signal.SIGKILL)
vllm_cpu_fixes.apply()


class WeightReceiver:
    """Mixed into vLLM's worker; every method is called through collective RPC."""

    rank: int
    device: torch.device
    model_config: Any
    model_runner: Any
    _weight_sync_reception: Reception | None = None

    def weight_sync_start(self, request: bytes) -> None:
        """Begin to receive in a thread.

        Args:
            request: A serialized StartWeightUpdateRequest. Another session aborts the one that runs; a repeat of the
                same one changes nothing.

        Raises:
            RuntimeError: A tensor would come in another encoding than the engine can take.
        """
        message = engine_pb2.StartWeightUpdateRequest.FromString(request)
        current = self._weight_sync_reception
        if current is not None and current.session_id == message.session_id:
            return
        if serves_fp8(self.model_config):
            self._weight_sync_check(message)
        if current is not None:
            current.abort()
        self._weight_sync_reception = Reception(message, self.rank, torch.device(self.device))

    def weight_sync_poll(self, session_id: str) -> dict[str, Any]:
        """State (receiving, received or failed), digest, wire_seconds and error of a session."""
        current = self._weight_sync_reception
        if current is None or current.session_id != session_id:
            return {"state": "failed", "digest": "", "wire_seconds": 0.0, "error": f"no session {session_id} runs"}
        return current.poll()

    def weight_sync_finish(self, session_id: str) -> dict[str, Any]:
        """Load what was received; answers with load_seconds. A repeat answers the same.

        Raises:
            RuntimeError: The session is not complete.
        """
        current = self._weight_sync_reception
        if current is None or current.session_id != session_id:
            raise RuntimeError(f"no session {session_id} runs: there is nothing to load")
        keep_fp8 = serves_fp8(self.model_config)
        return {"load_seconds": current.load(self._weight_sync_reload, self.model_config.dtype, keep_fp8)}

    def weight_sync_abort(self, session_id: str) -> None:
        """End a session without effect; nothing if it is not the one that runs."""
        current = self._weight_sync_reception
        if current is not None and current.session_id == session_id:
            current.abort()

    def weight_sync_manifest(self) -> list[dict[str, Any]]:
        """Name, shape, dtype and quantisable of every parameter that the engine wants, sorted by name."""
        return [
            {"name": p.name, "shape": list(p.shape), "dtype": p.dtype, "quantisable": p.quantisable}
            for p in self._weight_sync_parameters()
        ]

    def _weight_sync_parameters(self) -> list[ManifestParameter]:
        shapes = checkpoint_shapes(Path(self.model_config.model))
        return make_manifest(shapes, describe_model(self.model_runner.get_model(), self.model_config))

    def _weight_sync_check(self, message: engine_pb2.StartWeightUpdateRequest) -> None:
        """An engine that holds fp8 would take other bytes for fp8 values without scales."""
        fp8 = {p.name for p in self._weight_sync_parameters() if p.quantisable}
        for tensor in (tensor for bucket in message.buckets for tensor in bucket.tensors):
            if tensor.name in fp8 and tensor.format != engine_pb2.WIRE_FORMAT_FP8_BLOCK_128:
                raise RuntimeError(f"buckets: {tensor.name} must come as block fp8, as this engine holds it")

    def _weight_sync_reload(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.model_runner.reload_weights(weights_iterator=tensors, is_checkpoint_format=True)
        if serves_fp8(self.model_config):
            restore_attention_scales(self.model_runner.get_model())
