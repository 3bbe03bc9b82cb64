"""Repairs of vLLM on CPU (0.24.0 and 0.32.0), each of silently wrong output; a no-op on every other platform.

`apply` changes internals of vLLM, so it first checks that they are the ones it was written for. Another repair is of a
start that fails where numba is loaded.
"""

from __future__ import annotations

import inspect
from typing import Any

VERSIONS = ("0.24.0", "0.32.0")


def apply() -> None:
    """Repair this process. Raises RuntimeError if vLLM is another one than the repairs were made for."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    _check_version()
    _replace(UnquantizedFusedMoEMethod, "_setup_kernel", ["self", "layer", "w13", "w2"], _prepack_again)
    reload_parameters = ["self", "weights_iterator", "weights_path", "is_checkpoint_format"]
    _replace(GPUModelRunner, "reload_weights", reload_parameters, _pack_heads_again)
    _replace(RotaryEmbedding, "forward_cpu", ["self", "positions", "query", "key"], _native_for_heads)


def _prepack_again(original: Any) -> Any:
    """A weight update of a MoE layer skips the CPU's prepacking, which the first load does."""

    def _setup_kernel(self: Any, layer: Any, w13: Any, w2: Any) -> None:
        again = self.moe_kernel is not None
        original(self, layer, w13, w2)
        if again:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    return _setup_kernel


def _pack_heads_again(original: Any) -> Any:
    """A head that is tied to the embedding goes on multiplying by its packed copy of the old embedding."""

    def reload_weights(
        self: Any, weights_iterator: Any = None, weights_path: Any = None, is_checkpoint_format: bool = True
    ) -> None:
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        original(self, weights_iterator, weights_path, is_checkpoint_format)
        for module in self.get_model().modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    return reload_weights


def _native_for_heads(original: Any) -> Any:
    """The CPU kernel of rotary embedding is wrong for [T, H, D] with more than one head, which MLA passes."""

    def forward_cpu(self: Any, positions: Any, query: Any, key: Any = None) -> Any:
        if query.dim() == 3 or (key is not None and key.dim() == 3):
            return self.forward_native(positions, query, key)
        return original(self, positions, query, key)

    return forward_cpu


def let_vllm_start_beside_numba() -> None:
    """When vLLM starts on CPU, it reads the `__dict__` of all that lies in a module (0.32.0).

    llvmlite has an object there that answers any name with a function, this one too, which vLLM takes for a dict. Call
    it where numba is imported.
    """
    from llvmlite.binding.ffi import lib

    original = getattr(type(lib), "__getattr__", None)
    if original is None or getattr(original, "flotilla_repair", False):
        return

    def no_special_names(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return original(self, name)

    no_special_names.flotilla_repair = True  # pyright: ignore[reportFunctionMemberAccess]
    setattr(type(lib), "__getattr__", no_special_names)  # noqa: B010  no attribute that a type checker knows


def _replace(cls: type, name: str, parameters: list[str], make: Any) -> None:
    original = getattr(cls, name, None)
    if getattr(original, "flotilla_repair", False):
        return
    if original is None or list(inspect.signature(original).parameters) != parameters:
        raise RuntimeError(f"vLLM's {cls.__name__}.{name} is not the one that vllm_cpu_fixes repairs")
    repaired = make(original)
    repaired.flotilla_repair = True
    setattr(cls, name, repaired)


def _check_version() -> None:
    from importlib.metadata import version

    if (found := version("vllm-cpu")) not in VERSIONS:
        known = " and ".join(VERSIONS)
        raise RuntimeError(f"vllm_cpu_fixes was made for vllm-cpu {known}, not {found}: check whether it still applies")
