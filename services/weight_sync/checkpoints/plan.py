"""What a conversion does, as data: every file of the result with its header, and what comes to each place in it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from services.weight_sync.checkpoints.configs import bf16_config, fp8_config
from services.weight_sync.checkpoints.errors import CheckpointError
from services.weight_sync.checkpoints.folder import CONFIG, INDEX, other_files
from services.weight_sync.checkpoints.header import FileState, NewTensor, Shard, make_header, tensor_bytes
from services.weight_sync.checkpoints.targets import choose_targets
from services.weight_sync.checkpoints.weights import FP8, Contents, Weight
from services.weight_sync.layout import Scaling, scale_shape


@dataclass(frozen=True, slots=True)
class Quantised:
    """What a matrix becomes."""

    scaling: Scaling
    scale_suffix: str
    """What the name of the scale has more than that of the matrix."""


@dataclass(frozen=True, slots=True)
class Job:
    """A weight and its place: quantised if there is a scaling; else dequantised to bf16 if it is fp8; else as is."""

    weight: Weight
    scaling: Scaling | None
    offset: int
    """First byte of the values in the new file."""
    scales_offset: int
    """First byte of the new scales, if there are any."""


@dataclass(frozen=True, slots=True)
class NewShard:
    """A file of the result."""

    name: str
    header: bytes
    size_bytes: int
    tensors: tuple[NewTensor, ...]
    jobs: tuple[Job, ...]
    """By place in the source."""

    @property
    def read_bytes(self) -> int:
        """Bytes of weights that are read for it."""
        return sum(job.weight.size_bytes for job in self.jobs)


@dataclass(frozen=True, slots=True)
class Conversion:
    """A conversion of one checkpoint."""

    source: Path
    shards: tuple[NewShard, ...]
    files: tuple[Path, ...]
    """What is copied, relative to the source."""
    documents: Mapping[str, str]
    """The index, if the source has one, and the config, in the order in which they are written."""
    identity: Mapping[str, Any]
    """What a conversion must have in common with this one to be continued by it; JSON."""
    states: Mapping[Path, FileState]
    """Of all files of the source, when they were read."""
    left_out: tuple[Weight, ...] = ()
    """Linear layers that stay unquantised, because of the source's config or of what vLLM can load."""


def plan_bf16(contents: Contents) -> Conversion:
    """Every fp8 matrix becomes bf16, and scales go. Raises CheckpointError if there is none."""
    if contents.format is None:
        raise CheckpointError(f"{contents.checkpoint.config_file} has no quantization_config: there is nothing to do")
    shards = [_new_shard(shard, contents, frozenset(), None) for shard in contents.checkpoint.shards]
    return _conversion(contents, shards, bf16_config(contents.checkpoint.config), {"to": "bf16"})


def plan_fp8(contents: Contents, scaling: Scaling) -> Conversion:
    """The linear layers of the model become fp8, whatever they were; other fp8 becomes bf16, the rest stays.

    Args:
        contents: Of the source.
        scaling: Blocks, rows (CHANNEL) or matrices (TENSOR).

    Raises:
        CheckpointError: The model is not of a known family.
    """
    targets = choose_targets(contents, scaling)
    block = bool(scaling.rows and scaling.columns)
    form = Quantised(scaling, "_scale_inv" if block else "_scale")
    shards = [_new_shard(shard, contents, targets.quantised, form) for shard in contents.checkpoint.shards]
    config = fp8_config(contents.checkpoint.config, scaling, targets.plain_modules)
    options = {"to": "fp8", "block": [scaling.rows, scaling.columns], "ue8m0": scaling.ue8m0}
    left_out = tuple(contents.weights[name] for name in targets.left_out)
    return replace(_conversion(contents, shards, config, options), left_out=left_out)


def json_text(content: Mapping[str, Any]) -> str:
    """JSON as it is written to files."""
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _conversion(
    contents: Contents, shards: Sequence[NewShard], config: Mapping[str, Any], options: Mapping[str, Any]
) -> Conversion:
    checkpoint = contents.checkpoint
    files = tuple(other_files(checkpoint.directory))
    states = {
        **{shard.file: shard.state for shard in checkpoint.shards},
        **{file: FileState.of(file) for file in (checkpoint.directory / one for one in (*files, CONFIG))},
    }
    others = [[str(file), *_time_and_size(states[checkpoint.directory / file])] for file in files]
    kept = tuple(shard for shard in shards if shard.jobs)
    index = {INDEX: json_text(_index(kept))} if checkpoint.indexed else {}
    return Conversion(
        source=checkpoint.directory,
        shards=kept,
        files=files,
        documents={**index, CONFIG: json_text(config)},
        identity={
            "options": options,
            "config": dict(checkpoint.config),
            "shards": _identities(checkpoint.shards),
            "files": others,
        },
        states=states,
    )


def _new_shard(shard: Shard, contents: Contents, quantised: frozenset[str], form: Quantised | None) -> NewShard:
    weights = [contents.weights[entry.name] for entry in shard.entries if entry.name in contents.weights]
    forms = {one.name: form if one.name in quantised else None for one in weights}
    tensors = tuple(tensor for one in weights for tensor in _new_tensors(one, forms[one.name]))
    header, offsets = make_header(tensors)
    jobs = [
        Job(one, to and to.scaling, offsets[one.name], offsets[one.name + to.scale_suffix] if to else 0)
        for one, to in ((one, forms[one.name]) for one in weights)
    ]
    size = len(header) + sum(tensor_bytes(tensor.dtype, tensor.shape) for tensor in tensors)
    return NewShard(shard.file.name, header, size, tensors, tuple(jobs))


def _new_tensors(weight: Weight, form: Quantised | None) -> list[NewTensor]:
    entry = weight.entry
    if form is None:
        return [NewTensor(entry.name, "BF16" if weight.scale else entry.dtype, entry.shape)]
    scales = scale_shape(entry.shape, form.scaling) if form.scaling.rows else (1,)
    return [NewTensor(entry.name, FP8, entry.shape), NewTensor(entry.name + form.scale_suffix, "F32", scales)]


def _index(shards: Iterable[NewShard]) -> dict[str, Any]:
    placed = {tensor.name: (shard.name, tensor) for shard in shards for tensor in shard.tensors}
    total = sum(tensor_bytes(tensor.dtype, tensor.shape) for _, tensor in placed.values())
    return {"metadata": {"total_size": total}, "weight_map": {name: placed[name][0] for name in sorted(placed)}}


def _identities(shards: Iterable[Shard]) -> list[list[Any]]:
    return [[one.file.name, *_time_and_size(one.state), one.header_sha256] for one in shards]


def _time_and_size(state: FileState) -> tuple[int, int]:
    return state.size_bytes, state.modified_ns
