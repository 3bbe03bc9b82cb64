"""The weights of a checkpoint as it means them: fp8 matrices paired with their scales, which may be in other files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from services.weight_sync.checkpoints.errors import CheckpointError
from services.weight_sync.checkpoints.folder import Checkpoint, open_checkpoint
from services.weight_sync.checkpoints.formats import Format, read_format
from services.weight_sync.checkpoints.header import Entry
from services.weight_sync.layout import Scaling

FP8 = "F8_E4M3"
UNREADABLE = ("F8_E5M2", "F8_E8M0")
SCALE_DTYPES = ("F32", "BF16", "F16")
SCALE_ENDINGS = (".weight_scale", ".weight_scale_inv")
ACTIVATION_SCALES = (".input_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale", ".prob_scale")
"""Of what flows through a quantised layer, not of its matrix."""


@dataclass(frozen=True, slots=True)
class Scale:
    """What an fp8 matrix is multiplied by."""

    entry: Entry
    scaling: Scaling


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter of the model."""

    entry: Entry
    scale: Scale | None = None
    """Of an fp8 matrix, and of nothing else."""

    @property
    def name(self) -> str:
        """Its name in the checkpoint."""
        return self.entry.name

    @property
    def size_bytes(self) -> int:
        """Bytes in the checkpoint, without the scale."""
        return self.entry.size_bytes


@dataclass(frozen=True, slots=True)
class Contents:
    """A checkpoint, its format, and its weights."""

    checkpoint: Checkpoint
    format: Format | None
    weights: Mapping[str, Weight]
    scales: Mapping[str, Entry]
    """All scales, those of activations too."""


def open_contents(checkpoint: Checkpoint) -> Contents:
    """Pair matrices and scales.

    Raises:
        CheckpointError: The config is not understood, a scale is missing, has the wrong shape or no matrix.
    """
    form = read_format(checkpoint)
    paired = {name: _paired(entry, form, checkpoint) for name, entry in checkpoint.tensors.items()}
    owned = {one.scale.entry.name for one in paired.values() if one.scale is not None}
    scales = {name: one for name, one in checkpoint.tensors.items() if name in owned or _is_loose_scale(one, form)}
    return Contents(checkpoint, form, {name: one for name, one in paired.items() if name not in scales}, scales)


def open_directory(directory: Path) -> Contents:
    """`open_contents` of the checkpoint in a directory."""
    return open_contents(open_checkpoint(directory))


def _paired(entry: Entry, form: Format | None, checkpoint: Checkpoint) -> Weight:
    if entry.dtype in UNREADABLE:
        raise CheckpointError(f"{entry.file}: {entry.name} is {entry.dtype}; of 8-bit floats {FP8} is understood")
    if entry.dtype != FP8:
        return Weight(entry)
    if form is None:
        raise CheckpointError(
            f"{entry.file}: {entry.name} is {FP8}, and {checkpoint.config_file} has no quantization_config"
        )
    if len(entry.shape) != 2:
        raise CheckpointError(f"{entry.file}: {entry.name} is {FP8} of shape {list(entry.shape)}, not a matrix")
    return Weight(entry, _scale(entry, form, checkpoint))


def _scale(entry: Entry, form: Format, checkpoint: Checkpoint) -> Scale:
    name = entry.name + form.scale_suffix
    scale = checkpoint.tensors.get(name)
    if scale is None:
        raise CheckpointError(f"{entry.file}: {entry.name} is {FP8} and its scale {name} is missing")
    shapes = form.scale_shapes(entry.shape)
    if scale.dtype not in SCALE_DTYPES or scale.shape not in shapes:
        raise CheckpointError(
            f"{scale.file}: {name} is {scale.dtype} {list(scale.shape)}; the scale of {entry.name} "
            f"{list(entry.shape)} must be a float of shape {list(shapes[0])}"
        )
    return Scale(scale, form.scaling)


def _is_loose_scale(entry: Entry, form: Format | None) -> bool:
    """Whether it is the scale of activations. Raises CheckpointError if it should be the scale of a matrix."""
    if entry.name.endswith(SCALE_ENDINGS):
        raise CheckpointError(f"{entry.file}: {entry.name} is a scale without an {FP8} matrix")
    return form is not None and entry.name.endswith(ACTIVATION_SCALES) and prod(entry.shape) == 1
