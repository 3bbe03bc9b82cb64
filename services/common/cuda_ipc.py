"""CUDA memory shared between processes of one host: handles as plain bytes, opened through CUDA's own API.

A handle names a whole allocation of cudaMalloc, of which a tensor may be a part. One allocation is opened once in a
process, however many tensors of it are asked for, and closed with the last of them. A process cannot open its own.
torch is imported where it is used, since most services do without.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from services.common.errors import FailedPrecondition, InvalidArgument

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class CudaMemory:
    """Bytes in the memory of a GPU, as another process may open them."""

    handle: bytes = field(repr=False)
    """cudaIpcMemHandle_t of the allocation that they lie in."""
    offset_bytes: int
    """First byte, from the start of the allocation."""
    size_bytes: int
    gpu_uuid: str
    """Of the GPU; its number differs from process to process."""


@dataclass(slots=True)
class _Mapping:
    """An allocation of another process."""

    pointer: int
    users: int = 0


_mappings: dict[bytes, _Mapping] = {}
"""By handle."""
_lock = threading.Lock()


def gpu_uuid(device: torch.device) -> str:
    """What names a GPU in every process."""
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)


def export_memory(tensor: torch.Tensor) -> CudaMemory:
    """The memory of a contiguous CUDA tensor, which must live for as long as anybody has it open.

    Raises:
        FailedPrecondition: CUDA does not share the allocation; that of an expandable segment never.
    """
    import torch
    from cuda.bindings import driver, runtime

    assert tensor.is_cuda and tensor.is_contiguous(), "only contiguous CUDA tensors are exported"
    with torch.cuda.device(tensor.device):
        _check(runtime.cudaSetDevice(tensor.device.index), "choose the GPU")  # torch may have left it to the first use
        base, _size = _check(driver.cuMemGetAddressRange(tensor.data_ptr()), "find the allocation of a tensor")
        (handle,) = _check(
            runtime.cudaIpcGetMemHandle(int(base)),
            "share a tensor's memory with other processes; if PYTORCH_CUDA_ALLOC_CONF or PYTORCH_ALLOC_CONF sets "
            "expandable_segments, unset it: only plain cudaMalloc memory can be shared",
        )
    offset = tensor.data_ptr() - int(base)
    return CudaMemory(bytes(handle.reserved), offset, tensor.nbytes, gpu_uuid(tensor.device))


def open_memory(memory: CudaMemory) -> Opened:
    """Map memory that another process exported.

    Raises:
        InvalidArgument: This process does not see the GPU.
        FailedPrecondition: The memory cannot be opened, for instance because its process has ended.
    """
    import torch

    device = _device_of(memory.gpu_uuid)
    with _lock, torch.cuda.device(device):
        mapping = _mappings.get(memory.handle) or _Mapping(_map(memory.handle, device))
        mapping.users += 1
        _mappings[memory.handle] = mapping
    return Opened(memory, device, mapping.pointer)


class Opened:
    """Memory of another process, until it is closed; also a context manager."""

    def __init__(self, memory: CudaMemory, device: torch.device, pointer: int) -> None:
        import torch

        self._memory, self._closed = memory, False
        self.device = device
        array = _Array(pointer + memory.offset_bytes, memory.size_bytes)
        self.tensor = torch.as_tensor(array, device=device)
        """[size_bytes] uint8."""

    def close(self) -> None:
        """Unmap it. Nothing may use `tensor` any more, nor work on the GPU be under way that does. Idempotent."""
        if not self._closed:
            self._closed = True
            del self.tensor
            _release(self._memory.handle, self.device)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Array:
    """A pointer as torch takes it: https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html."""

    def __init__(self, pointer: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 2,
        }


def _device_of(uuid: str) -> torch.device:
    import torch

    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    seen = {gpu_uuid(device): device for device in devices}
    if uuid not in seen:
        raise InvalidArgument(
            f"the memory lies on GPU {uuid}, and this process sees {', '.join(seen) or 'none'}: check its "
            "CUDA_VISIBLE_DEVICES",
            field="cuda_memory.gpu_uuid",
        )
    return seen[uuid]


def _map(handle: bytes, device: torch.device) -> int:
    from cuda.bindings import runtime

    if len(handle) != len(runtime.cudaIpcMemHandle_t().reserved):
        raise InvalidArgument(f"a CUDA IPC handle does not have {len(handle)} bytes", field="cuda_memory.handle")
    native = runtime.cudaIpcMemHandle_t()
    native.reserved = handle
    _check(runtime.cudaSetDevice(device.index), "choose the GPU")
    flags = runtime.cudaIpcMemLazyEnablePeerAccess
    (pointer,) = _check(runtime.cudaIpcOpenMemHandle(native, flags), "open the memory of a process that may be gone")
    return int(pointer)


def _release(handle: bytes, device: torch.device) -> None:
    import torch
    from cuda.bindings import runtime

    with _lock, torch.cuda.device(device):
        mapping = _mappings[handle]
        mapping.users -= 1
        if mapping.users == 0:
            del _mappings[handle]
            _check(runtime.cudaSetDevice(device.index), "choose the GPU")
            _check(runtime.cudaIpcCloseMemHandle(mapping.pointer), "close memory of another process")


def _check(answer: tuple[Any, ...], what: str) -> tuple[Any, ...]:
    """The results of a CUDA call without its status, which must be success."""
    status, *results = answer
    if int(status) != 0:
        raise FailedPrecondition(f"cannot {what}: {status.name}")
    return tuple(results)
