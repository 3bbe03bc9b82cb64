"""Models between Hugging Face's layout and Megatron's torch_dist, by one process or by many, on one node or on many.

All ranks call a function together, with the same arguments, and share a file system. What is written appears whole or
not at all, and every weight has the same bits on both sides.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import ceil
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from services.common.spec import ParallelSpec
from services.trainer.boxes import boxes_of, cuts_of, only_owned, weight_boxes
from services.trainer.export import Written, make_anew, publish_hf, write_weights
from services.trainer.hf_files import find_tensors, open_weights
from services.trainer.hf_mapping import load_hf, rules_of, to_hf, weights_of
from services.trainer.hf_mtp import is_mtp, with_copies, with_mtp_of
from services.trainer.loading import MTP_PREFIX, CheckpointError, check_files, check_tensors, read_boxes, stored_tensors
from services.trainer.megatron import ShardedTensor
from services.trainer.model import PolicyModel, build_model
from services.trainer.model_config import ModelConfig, ModelError, read_config
from services.trainer.ranks import held, on_first_rank, together
from services.trainer.run_model import with_mtp
from services.trainer.saving import TEMPORARY_PREFIX, Saving

FILE_BYTES = 5_000_000_000
"""Of a file of weights, as Hugging Face cuts them; a process holds little more at a time."""
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}
"""Of weights, by safetensors' names."""

T = TypeVar("T")
Tensors = dict[str, Tensor]
"""By Hugging Face name."""


def split_pipeline(layers: int, ranks: int) -> ParallelSpec:
    """A stage for each rank, all alike but the last; half as many stages while that would get no layer.

    Raises:
        CheckpointError: There is no such split.
    """
    if ranks > layers:
        raise CheckpointError(f"{ranks} ranks are more than the {layers} layers: start fewer, or give sizes")
    stages = ranks
    while (last := layers - ceil(layers / stages) * (stages - 1)) <= 0:
        if stages % 2:
            raise CheckpointError(f"{layers} layers cannot be split over {ranks} ranks: start others, or give sizes")
        stages //= 2
    return ParallelSpec(pipeline=stages, last_stage_layers=last if stages > 1 else 0)


def write_torch_dist(hf: Path, output: Path, parallel: ParallelSpec) -> None:
    """Write the weights of a Hugging Face checkpoint; every rank holds its part of the model.

    Args:
        hf: Checkpoint; of layers for multi-token prediction only a single one is taken along.
        output: New directory.
        parallel: Layout of the ranks, as Megatron was initialised.

    Raises:
        FlotillaError: The checkpoint cannot be used, or the directory not be written.
    """
    with _making(output):
        model = with_mtp_of(_plain_model(hf), hf)
        chunks = build_model(model, _dtype(hf, model), parallel)
        together(partial(load_hf, chunks, model, hf))
        Saving(output, only_owned(weight_boxes(chunks)), {}).finish()


def write_hf(checkpoint: Path, hf: Path, output: Path, overrides: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Write the weights of a torch_dist directory of any layout, the ranks a file each in turn.

    Megatron was initialised without sizes: no rank holds the model.

    Args:
        checkpoint: What `write_torch_dist` wrote, or a checkpoint of a run.
        hf: Where config and tokenizer come from, and layers for multi-token prediction that are not in `checkpoint`.
        output: New directory.
        overrides: Fields of config.json that the model has with other values.

    Raises:
        FlotillaError: The checkpoint is damaged or not of this model, or the directory cannot be written.
    """
    with _making(output):
        model = _plain_model(hf)
        check_files(checkpoint)
        if any(name.startswith(MTP_PREFIX) for name in stored_tensors(checkpoint)):
            model = with_mtp(model, where=f"{checkpoint} has such a layer")
        with FakeTensorMode():  # of the whole model, its shapes alone
            chunks = build_model(model, torch.bfloat16)
        check_tensors(checkpoint, weight_boxes(chunks))
        reads = [*_reads_of_trained(chunks, model, checkpoint, set(find_tensors(hf))), *_reads_of_mtp(model, hf)]
        temporary = output.with_name(TEMPORARY_PREFIX + output.name)
        on_first_rank(partial(make_anew, temporary))
        parts = together(partial(_write_files, reads, temporary))
        written = {name: one for part in parts for name, one in part.items()}
        on_first_rank(partial(publish_hf, written, temporary, hf, output, overrides))


def _reads_of_trained(
    chunks: Sequence[PolicyModel], model: ModelConfig, checkpoint: Path, wanted: set[str]
) -> Iterator[Callable[[], Tensors]]:
    """For each file to write, what reads its tensors; `wanted` are the names of all files together."""
    stored, cuts, rules = stored_tensors(checkpoint), cuts_of(chunks), rules_of(model)
    weights = {weight.name: weight for weight in weights_of(chunks)}
    dtypes = {name: stored[cuts[weight.source][0].key].dtype for name, weight in weights.items()}

    def boxes(name: str, tensor: Tensor) -> Iterator[ShardedTensor]:
        return boxes_of(cuts[weights[name].source], weights[name].data, 0, {"": tensor.view(-1)})

    def read(names: list[str]) -> Tensors:
        tensors = {name: torch.empty(weights[name].data.shape, dtype=dtypes[name]) for name in names}
        read_boxes(checkpoint, [box for name, one in tensors.items() for box in boxes(name, one)])
        pairs = [zip(rules[name].hf, to_hf(rules[name], one, model), strict=True) for name, one in tensors.items()]
        return with_copies({name: tensor for several in pairs for name, tensor in several}, model, wanted)

    for names in _files(weights, lambda name: weights[name].data.numel() * dtypes[name].itemsize):
        yield partial(read, names)


def _reads_of_mtp(model: ModelConfig, hf: Path) -> Iterator[Callable[[], Tensors]]:
    """The same for layers for multi-token prediction that are not trained: a file for each file that has some."""
    files = {} if model.mtp_built else find_tensors(hf)

    def read(file: Path) -> Tensors:
        with open_weights(file) as tensors:
            return {name: tensors.get_tensor(name) for name in tensors.keys() if is_mtp(name, model)}  # noqa: SIM118

    for file in sorted({file for name, file in files.items() if is_mtp(name, model)}):
        yield partial(read, file)


def _files(names: Iterable[str], size: Callable[[str], int]) -> Iterator[list[str]]:
    """Names in order, as many together as FILE_BYTES allow, or one."""
    file: list[str] = []
    total = 0
    for name in names:
        if file and total + size(name) > FILE_BYTES:
            yield file
            file, total = [], 0
        file.append(name)
        total += size(name)
    yield file


def _write_files(reads: list[Callable[[], Tensors]], directory: Path) -> dict[str, Written]:
    """Write this rank's files, and force them to disk. Returns where each tensor is."""
    found = {}
    for number in range(dist.get_rank(), len(reads), dist.get_world_size()):
        file = directory / f"model-{number + 1:05d}-of-{len(reads):05d}.safetensors"
        tensors = {
            name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in reads[number]().items()
        }
        found |= write_weights(tensors, file)
    return found


@contextmanager
def _making(output: Path) -> Iterator[None]:
    """Have rank 0 hold a new directory while the block makes it, so that no other process writes beside it."""
    _check_new(output)
    lock = output.with_name(f".{output.name}.lock")
    with held(lock, "wait for its end, or choose another directory", output):
        try:
            _check_new(output)
            yield
        finally:
            if dist.get_rank() == 0:
                lock.unlink(missing_ok=True)


def _check_new(output: Path) -> None:
    if output.exists():
        raise CheckpointError(f"{output} is there already; remove it, or choose another directory")


def _plain_model(hf: Path) -> ModelConfig:
    """Raises ModelError if the weights are quantised."""
    model = read_config(hf)
    if "quantization_config" in json.loads((hf / "config.json").read_text()):
        raise ModelError(f"{hf / 'config.json'}: quantised weights; `flotilla convert fp8-to-bf16` makes plain ones")
    return model


def _dtype(hf: Path, model: ModelConfig) -> torch.dtype:
    """Of all weights, so that none is rounded; but for routers' biases, which Megatron has in float32."""
    names = {
        name for rule in rules_of(model).values() if not rule.megatron.endswith(".expert_bias") for name in rule.hf
    }
    found: dict[str, str] = {}
    for file in sorted(set(find_tensors(hf).values())):
        with open_weights(file) as tensors:
            for name in names & set(tensors.keys()):
                found.setdefault(tensors.get_slice(name).get_dtype(), f"{file}: {name}")
    if len(found) != 1 or not found.keys() <= DTYPES.keys():
        each = ", ".join(f"{where} is {dtype}" for dtype, where in found.items())
        raise ModelError(f"{hf}: weights must all be BF16 or all F32; {each}")
    return DTYPES[found.popitem()[0]]
