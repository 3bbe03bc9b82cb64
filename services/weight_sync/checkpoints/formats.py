"""What `quantization_config` in config.json says of the weights."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.weight_sync.checkpoints.errors import CheckpointError
from services.weight_sync.checkpoints.folder import Checkpoint
from services.weight_sync.layout import CHANNEL, TENSOR, Scaling, scale_shape

SECTIONS = ("quantization_config", "compression_config")
"""The second is an older name."""
LARGEST_BLOCK = 1 << 16
PATTERN = "re:"
"""Begins a regular expression in a list of modules."""


@dataclass(frozen=True, slots=True)
class Format:
    """How the fp8 matrices of a checkpoint are scaled."""

    scaling: Scaling
    scale_suffix: str
    """What the name of a scale has more than that of its matrix."""
    plain: tuple[str, ...] = ()
    """Modules that the config says are not quantised: names, parts of names, or `re:` and a regular expression."""

    def scale_shapes(self, shape: Sequence[int]) -> list[tuple[int, ...]]:
        """Shapes that the scale of a matrix of this shape may have."""
        return [(1,), (), (1, 1)] if self.scaling == TENSOR else [scale_shape(shape, self.scaling)]

    def leaves_plain(self, module: str) -> bool:
        """Whether the config says that a module is not quantised."""
        return any(_matches(pattern, module) for pattern in self.plain)

    @property
    def label(self) -> str:
        """For tables: fp8 and what shares a scale."""
        if self.scaling in (CHANNEL, TENSOR):
            return "fp8 channel" if self.scaling == CHANNEL else "fp8 tensor"
        return f"fp8 block {self.scaling.rows}x{self.scaling.columns}"


def read_format(checkpoint: Checkpoint) -> Format | None:
    """The format of the fp8 matrices; None if the config says nothing of quantisation.

    Raises:
        CheckpointError: The config says something that is not understood; names the field.
    """
    for holder in (checkpoint.config, checkpoint.model_config):
        for name in SECTIONS:
            if holder.get(name) is not None:
                return _read(_Section(str(checkpoint.config_file), name, holder[name]))
    return None


@dataclass(frozen=True, slots=True)
class _Section:
    """A JSON object in config.json that knows its name."""

    file: str
    name: str
    content: Any

    def refuse(self, field: str, understood: str) -> CheckpointError:
        found = self.content.get(field) if isinstance(self.content, Mapping) else self.content
        return CheckpointError(f"{self.file}: {self.name}.{field} is {found!r}; understood: {understood}")

    def one_of(self, field: str, *allowed: object) -> Any:
        if not isinstance(self.content, Mapping) or self.content.get(field) not in allowed:
            raise self.refuse(field, ", ".join(repr(one) for one in allowed if one is not None) or "nothing")
        return self.content.get(field)

    def names(self, *fields: str) -> tuple[str, ...]:
        for field in fields:
            if found := self.content.get(field):
                if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
                    raise self.refuse(field, "a list of names")
                self._check_patterns(field, found)
                return tuple(found)
        return ()

    def block(self, field: str) -> Scaling:
        found = self.content.get(field)
        if (
            not isinstance(found, list)
            or len(found) != 2
            or not all(type(n) is int and 0 < n <= LARGEST_BLOCK for n in found)
        ):
            raise self.refuse(field, f"two numbers from 1 to {LARGEST_BLOCK}, as [128, 128]")
        return Scaling(*found)

    def _check_patterns(self, field: str, names: list[str]) -> None:
        for name in names:
            try:
                re.compile(name.removeprefix(PATTERN) if name.startswith(PATTERN) else "")
            except (re.error, OverflowError, RecursionError):
                raise self.refuse(field, "names and regular expressions") from None


def _read(section: _Section) -> Format:
    method = section.one_of("quant_method", "fp8", "compressed-tensors")
    return _read_fp8(section) if method == "fp8" else _read_compressed_tensors(section)


def _read_fp8(section: _Section) -> Format:
    section.one_of("fmt", "e4m3", None)
    section.one_of("store_dtype", None)
    plain = section.names("ignored_layers", "modules_to_not_convert")
    if section.content.get("weight_block_size") is None:
        return Format(TENSOR, "_scale", plain)
    return Format(section.block("weight_block_size"), "_scale_inv", plain)


def _read_compressed_tensors(section: _Section) -> Format:
    section.one_of("format", "float-quantized")
    if section.content.get("sparsity_config"):
        _Section(section.file, f"{section.name}.sparsity_config", section.content["sparsity_config"]).one_of(
            "format", "dense"
        )
    groups = section.content.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise section.refuse("config_groups", "an object with at least one group")
    scalings = {_read_group(section, name, group) for name, group in groups.items()}
    if len(scalings) > 1:
        raise section.refuse("config_groups", "groups whose weights are all scaled alike")
    return Format(scalings.pop(), "_scale", section.names("ignore"))


def _read_group(section: _Section, name: str, group: Any) -> Scaling:
    at = f"{section.name}.config_groups.{name}"
    _Section(section.file, at, group).one_of("format", "float-quantized", None)
    weights = _Section(section.file, f"{at}.weights", group.get("weights"))
    weights.one_of("num_bits", 8)
    weights.one_of("type", "float")
    weights.one_of("symmetric", True, None)
    weights.one_of("dynamic", False, None)
    strategy = weights.one_of("strategy", "channel", "tensor", "block")
    if strategy == "block":
        return weights.block("block_structure")
    return CHANNEL if strategy == "channel" else TENSOR


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith(PATTERN):
        return re.match(pattern.removeprefix(PATTERN), module) is not None
    return f".{pattern}." in f".{module}."
