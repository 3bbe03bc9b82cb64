"""Runs the real megatron-core on a machine without CUDA, with torch's CPU build and gloo.

Megatron-core asks `torch.cuda` for its device, streams and random state, and allocates with `device="cuda"`. Its
modules are given a view of torch in which these mean the CPU. Torch itself stays as it is for everybody else in the
process, but for two methods: `Tensor.cuda` answers the tensor, and `Tensor.type` tells Megatron's optimizer a GPU type.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F

CPU = torch.device("cpu")
FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "rand", "randn", "tensor", "zeros", "zeros_like")
LAZY_MODULES = ("megatron.core.dist_checkpointing.strategies.state_dict_saver",)
"""Modules that megatron-core imports only when it first needs them."""
TRITON_MODULE = "megatron.core.transformer.moe.ops.paged_stash"
JIT_MODULE = "megatron.core.jit"


def prepare_import() -> None:
    """Make megatron-core importable without triton and a compiler; call before its first import."""
    if importlib.util.find_spec("triton") is None:
        stub: Any = types.ModuleType(TRITON_MODULE)
        stub.GLOBAL_BLOCK_SIZE = 1024
        stub.paged_stash_copy_kernel = stub.paged_stash_pop_kernel = None
        sys.modules[TRITON_MODULE] = stub
    jit: Any = types.ModuleType(JIT_MODULE)  # on CPU torch.compile would want a C++ compiler, and half a minute
    jit.jit_fuser = jit.noop_decorator = lambda function: function
    jit.enable_jit_fuser = jit.disable_jit_fuser = lambda: None
    sys.modules[JIT_MODULE] = jit


def adopt_modules() -> None:
    """Give every megatron-core module the CPU view of torch; call when the others are loaded. Idempotent."""
    for name in LAZY_MODULES:
        importlib.import_module(name)
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and vars(module).get("torch") is torch:
            module.__dict__["torch"] = _VIEW
    random: Any = sys.modules["megatron.core.tensor_parallel.random"]
    random._lazy_call = lambda callback: callback()
    random._lazy_init = lambda: None
    dispatcher: Any = sys.modules["megatron.core.transformer.moe.token_dispatcher"]
    dispatcher.maybe_move_tensor_to_cpu = _to_host
    swiglu: Any = sys.modules["megatron.core.fusions.fused_bias_swiglu"]
    swiglu.swiglu_back = _swiglu_gradient
    torch.Tensor.type = _tensor_type
    torch.Tensor.cuda = lambda self, *_, **__: self


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if torch.device(kwargs.get("device") or CPU).type == "cuda":
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return on_cpu


def _to_host(tensor: Any, *, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """What is on the CPU already; Megatron only converts what comes from a GPU."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _swiglu_gradient(gradient: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
    """Of gates and ups side by side, each half in its place; Megatron's wants to be compiled."""
    result = torch.empty_like(mixed)
    (gate, up), (of_gate, of_up) = mixed.chunk(2, -1), result.chunk(2, -1)
    torch.mul(gradient, F.silu(gate), out=of_up)
    torch.ops.aten.silu_backward(gradient * up, gate, grad_input=of_gate)
    return result


class _Stream:
    """The one stream of a machine that has none, and every event in it: everything is already in order."""

    def wait_stream(self, _stream: object) -> None:
        """Nothing to wait for."""

    def record_event(self) -> _Stream:
        """An event that has happened."""
        return self

    def synchronize(self) -> None:
        """Nothing to wait for."""


def _no_op(*_args: object, **_kwargs: object) -> None:
    """Stands for a call that only orders work on a GPU."""


def _stream_context(_stream: object = None) -> AbstractContextManager[None]:
    return nullcontext()


def _make_cuda_view() -> types.ModuleType:
    view: Any = types.ModuleType("torch.cuda")
    view.__dict__.update(torch.cuda.__dict__)
    stream = _Stream()
    view.current_device = lambda: CPU
    view.set_device = view.synchronize = view.empty_cache = _no_op
    view.current_stream = view.default_stream = lambda *_: stream
    view.stream, view.Stream = _stream_context, _Stream
    view.is_current_stream_capturing = lambda: False
    view.nvtx = types.SimpleNamespace(range_push=_no_op, range_pop=_no_op)
    view.default_generators = {CPU: torch.default_generator}
    view.get_rng_state = lambda *_, **__: torch.get_rng_state()
    view.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    view.random = types.SimpleNamespace(get_rng_state=view.get_rng_state, set_rng_state=view.set_rng_state)
    view.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))
    return view


def _make_view() -> types.ModuleType:
    view: Any = types.ModuleType("torch")
    view.__dict__.update(torch.__dict__)
    view.__dict__.update({name: _on_cpu(getattr(torch, name)) for name in FACTORIES})
    view.__getattr__ = lambda name: getattr(torch, name)
    view.cuda = _make_cuda_view()
    return view


_VIEW = _make_view()
_torch_tensor_type = torch.Tensor.type


def _tensor_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """`Tensor.type`, but Megatron's optimizer, which knows only GPU types, reads a CPU type as one of those."""
    result = _torch_tensor_type(self, *args, **kwargs)
    caller = sys._getframe(1).f_globals.get("__name__", "")
    if not args and not kwargs and caller.startswith("megatron.core.optimizer"):
        return result.replace("torch.", "torch.cuda.", 1)
    return result
