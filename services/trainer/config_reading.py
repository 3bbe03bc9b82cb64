"""Reading a config.json, and knowing what was read of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Fields = Mapping[str, Any]
"""A config.json, or a table in it."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What a field may be."""

    words: str
    fits: Callable[[Any], bool]


def _number(words: str, fits: Callable[[float], bool]) -> Kind:
    """A finite one; JSON's true is none."""
    return Kind(words, lambda value: type(value) in (int, float) and math.isfinite(value) and fits(value))


_TABLE = Kind("a table", lambda value: isinstance(value, Mapping))
_TEXT = Kind("a text", lambda value: isinstance(value, str) and value != "")
_COUNT = Kind("a whole number from 1 on", lambda value: type(value) is int and value >= 1)
_COUNT_OR_NONE = Kind("a whole number from 0 on", lambda value: type(value) is int and value >= 0)
_POSITIVE = _number("a number above 0", lambda value: value > 0)

_FIELDS: Mapping[Kind, str] = {
    _TABLE: "rope_parameters rope_scaling",
    _TEXT: "model_type rope_type type",
    _COUNT: (
        "head_dim hidden_size intermediate_size kv_lora_rank max_position_embeddings moe_intermediate_size n_group "
        "n_routed_experts num_attention_heads num_experts num_experts_per_tok num_hidden_layers num_key_value_heads "
        "num_local_experts original_max_position_embeddings q_lora_rank qk_nope_head_dim qk_rope_head_dim topk_group "
        "v_head_dim vocab_size"
    ),
    _COUNT_OR_NONE: "first_k_dense_replace n_shared_experts num_nextn_predict_layers",
    _POSITIVE: "beta_fast beta_slow factor rms_norm_eps routed_scaling_factor",
    _number("a number from 0 on", lambda value: value >= 0): "mscale mscale_all_dim",
    _number("a number above 0, at most 1", lambda value: 0 < value <= 1): "partial_rotary_factor",
    _number("a whole number from 1 on", lambda value: value >= 1 and value == int(value)): "rope_theta",
}
KINDS = {name: kind for kind, names in _FIELDS.items() for name in names.split()}
NULLABLE = {
    "beta_fast",
    "beta_slow",
    "head_dim",
    "num_key_value_heads",
    "partial_rotary_factor",
    "q_lora_rank",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "rope_type",
    "type",
}
"""Fields that may be null, as if they were not there."""


class Reading(dict[str, Any]):
    """The fields of a config.json, tables in it included; remembers which were asked for.

    Who asks for a field that is not what it must be gets a ValueError that names it.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__({name: Reading(one) if isinstance(one, Mapping) else one for name, one in fields.items()})
        self._asked: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self._asked.add(name)
        value, kind = super().__getitem__(name), KINDS.get(name)
        if kind and not kind.fits(value) and not (value is None and name in NULLABLE):
            raise ValueError(f"{name} = {value!r} is not {kind.words}")
        return value

    def get(self, name: str, default: Any = None) -> Any:
        """As of a dictionary."""
        if name in self:
            return self[name]
        self._asked.add(name)
        return default

    def unread(self, wanted: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
        """Dotted names of wanted fields that nobody asked for."""
        for name, value in wanted.items():
            if name not in self._asked:
                yield prefix + name
            elif isinstance(value, Mapping):
                yield from super().__getitem__(name).unread(value, f"{prefix}{name}.")


def only(config: Fields, **supported: Any) -> None:
    """Raise ValueError for a field that is there with another value."""
    for name, value in supported.items():
        if config.get(name, value) != value:
            raise ValueError(f"{name} = {config[name]!r} is not supported; only {value!r} is")
