"""What is in a checkpoint: tensors grouped over layers and experts, and bytes by part of the model."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from math import prod

from services.weight_sync.checkpoints.header import Entry
from services.weight_sync.checkpoints.weights import Contents

LAYER = re.compile(r"\blayers\.(\d{1,9})\.")
EXPERT = re.compile(r"\bexperts\.\d+\.")
PARTS = (
    ("norms", re.compile(r"norm\b|layernorm\b|\benorm\b|\bhnorm\b")),
    ("embeddings", re.compile(r"\bembed_tokens\b|\blm_head\b")),
    ("attention", re.compile(r"\bself_attn\b")),
    ("routers", re.compile(r"\bmlp\.gate\.")),
    ("experts", re.compile(r"\bexperts\.|\bshared_experts?\b")),
    ("dense mlp", re.compile(r"\bmlp\.")),
)
"""The first that is found in a name; scales and layers for multi-token prediction go before."""
ORDER = ("attention", "dense mlp", "experts", "routers", "embeddings", "norms", "mtp", "scales", "other")


@dataclass(frozen=True, slots=True)
class Row:
    """Tensors that differ in the numbers of their layer and expert only."""

    name: str
    """With * for the numbers."""
    count: int
    shape: tuple[int, ...]
    dtype: str
    quantisation: str
    """`fp8 block 128x128`; nothing if it is not quantised."""
    size_bytes: int
    """Of all of them."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the model."""

    name: str
    tensors: int
    parameters: int
    """Elements; those of scales are none."""
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Summary:
    """What is in a checkpoint."""

    model_type: str
    quantisation: str
    """As in a row; `none` if nothing is."""
    files: int
    rows: tuple[Row, ...]
    """In the order of the model's layers, as far as names say."""
    parts: tuple[Part, ...]
    total: Part


def summarise(contents: Contents) -> Summary:
    """Group and count the tensors of a checkpoint."""
    checkpoint = contents.checkpoint
    layer_count = checkpoint.model_config.get("num_hidden_layers")
    layers = layer_count if isinstance(layer_count, int) else None
    entries = [entry for shard in checkpoint.shards for entry in shard.entries]
    by_part: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        by_part["scales" if entry.name in contents.scales else _part(entry.name, layers)].append(entry)
    return Summary(
        model_type=str(checkpoint.model_config.get("model_type")),
        quantisation=contents.format.label if contents.format else "none",
        files=len(checkpoint.shards),
        rows=_rows(entries, contents, layers),
        parts=tuple(_total(name, by_part[name], contents) for name in ORDER if name in by_part),
        total=_total("total", entries, contents),
    )


def _rows(entries: list[Entry], contents: Contents, layers: int | None) -> tuple[Row, ...]:
    groups: dict[tuple[str, tuple[int, ...], str, str], list[Entry]] = defaultdict(list)
    for entry in sorted(entries, key=lambda entry: _natural(entry.name)):
        groups[folded_name(entry.name, layers), entry.shape, entry.dtype, _quantisation(entry, contents)].append(entry)
    return tuple(
        Row(name, len(group), shape, dtype, quantisation, sum(entry.size_bytes for entry in group))
        for (name, shape, dtype, quantisation), group in groups.items()
    )


def _quantisation(entry: Entry, contents: Contents) -> str:
    weight = contents.weights.get(entry.name)
    return contents.format.label if weight and weight.scale and contents.format else ""


def folded_name(name: str, layers: int | None = None) -> str:
    """A name with * for numbers; a layer for multi-token prediction keeps its own."""
    folded = EXPERT.sub("experts.*.", name)
    return folded if _is_mtp(name, layers) else LAYER.sub("layers.*.", folded)


def _is_mtp(name: str, layers: int | None) -> bool:
    found = LAYER.search(name)
    return layers is not None and found is not None and int(found[1]) >= layers


def _part(name: str, layers: int | None) -> str:
    if _is_mtp(name, layers):
        return "mtp"
    return next((part for part, pattern in PARTS if pattern.search(name)), "other")


def _total(name: str, entries: list[Entry], contents: Contents) -> Part:
    parameters = sum(prod(entry.shape) for entry in entries if entry.name not in contents.scales)
    return Part(name, len(entries), parameters, sum(entry.size_bytes for entry in entries))


def _natural(name: str) -> list[tuple[int, str]]:
    """So that layer 10 comes after layer 9."""
    return [(int(part), "") if part.isdecimal() and len(part) < 10 else (0, part) for part in name.split(".")]
