"""A checkpoint directory: config.json, safetensors files and their index, checked against each other."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.weight_sync.checkpoints.errors import CheckpointError
from services.weight_sync.checkpoints.header import Entry, Shard, parse_object, read_shard

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
JOURNAL = ".flotilla-conversion.json"
"""Lies in the directory of a conversion until it is complete, and says what it is."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5")
WEIGHT_ENDINGS = (*WEIGHT_SUFFIXES, *(f"{suffix}.index.json" for suffix in WEIGHT_SUFFIXES))


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose files agree."""

    directory: Path
    config: Mapping[str, Any]
    shards: tuple[Shard, ...]
    """By name."""
    tensors: Mapping[str, Entry]
    indexed: bool
    """It has an index; else it is one file."""

    @property
    def config_file(self) -> Path:
        """Its config.json, for errors."""
        return self.directory / CONFIG

    @property
    def model_config(self) -> Mapping[str, Any]:
        """The part of the config that describes the language model."""
        return self.config.get("text_config") or self.config


def open_checkpoint(directory: Path) -> Checkpoint:
    """Read headers, index and config of a checkpoint.

    Raises:
        CheckpointError: A file is missing, truncated or inconsistent with the others.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory; `hf download` brings a checkpoint from the hub")
    if (directory / JOURNAL).is_file():
        raise CheckpointError(f"{directory.resolve()} is an unfinished conversion")
    config = _json_object(directory.resolve() / CONFIG)
    if not isinstance(config.get("text_config") or {}, dict):
        raise CheckpointError(f"{directory / CONFIG}: text_config is not a JSON object")
    indexed = (directory / INDEX).is_file()
    weight_map = _weight_map(directory / INDEX) if indexed else {}
    names = _shard_names(directory, weight_map)
    shards = tuple(read_shard(directory / name) for name in names)
    tensors = _tensors(shards)
    if indexed:
        _check_index(directory / INDEX, weight_map, tensors)
    return Checkpoint(directory, config, shards, tensors, indexed)


def other_files(directory: Path) -> list[Path]:
    """Files that belong to a checkpoint and are no weights, relative to it, sorted; hidden folders are left out.

    Raises:
        CheckpointError: A symbolic link leads nowhere, or back to a folder above it.
    """
    return sorted(_walk(directory, Path(), (directory.resolve(),)))


def _walk(root: Path, folder: Path, above: tuple[Path, ...]) -> Iterator[Path]:
    for path in (root / folder).iterdir():
        relative = folder / path.name
        if not path.exists():
            raise CheckpointError(f"{path} is a link to nothing")
        if path.is_dir():
            if path.resolve() in above:
                raise CheckpointError(f"{path} is a link to a folder that it lies in")
            if not path.name.startswith("."):
                yield from _walk(root, relative, (*above, path.resolve()))
        elif not path.name.endswith(WEIGHT_ENDINGS) and relative != Path(CONFIG):
            if not path.is_file() or not os.access(path, os.R_OK):
                raise CheckpointError(f"{path} is no file that can be read")
            yield relative


def left_files(directory: Path) -> list[Path]:
    """Files of weights that are neither safetensors of the checkpoint nor copied with it, relative to it, sorted."""
    files = (path for path in directory.rglob("*") if path.name.endswith(WEIGHT_SUFFIXES))
    relative = (path.relative_to(directory) for path in files)
    others = (path for path in relative if len(path.parts) > 1 or path.suffix != ".safetensors")
    return sorted(path for path in others if not any(part.startswith(".") for part in path.parts))


def _json_object(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise CheckpointError(f"{file} is missing" if not file.exists() else f"{file} is not a file")
    return parse_object(file.read_bytes(), str(file))


def _weight_map(file: Path) -> dict[str, str]:
    weight_map = _json_object(file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{file} has no weight_map")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{file}: {tensor} is said to be in {name!r}, which is no safetensors file beside it")
    return weight_map


def _shard_names(directory: Path, weight_map: Mapping[str, str]) -> list[str]:
    present = {file.name for file in directory.glob("*.safetensors")}
    expected = set(weight_map.values()) or {SINGLE}
    if missing := sorted(expected - present):
        raise CheckpointError(f"{directory / missing[0]} is missing" + ("" if weight_map else f", and so is {INDEX}"))
    if extra := sorted(present - expected):
        raise CheckpointError(f"{directory / extra[0]} is not in the index")
    return sorted(expected)


def _tensors(shards: tuple[Shard, ...]) -> dict[str, Entry]:
    tensors: dict[str, Entry] = {}
    for entry in (entry for shard in shards for entry in shard.entries):
        if (other := tensors.setdefault(entry.name, entry)) is not entry:
            raise CheckpointError(f"{entry.name} is in {other.file} and in {entry.file}")
    return tensors


def _check_index(file: Path, weight_map: Mapping[str, str], tensors: Mapping[str, Entry]) -> None:
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].file.name != shard:
            raise CheckpointError(f"{file} says that {name} is in {shard}, and it is not")
    for name, entry in tensors.items():
        if name not in weight_map:
            raise CheckpointError(f"{entry.file} has {name}, which is not in {file}")
