"""Reading a config.json, and knowing what was read of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


class Reading(dict[str, Any]):
    """The fields of a config.json, tables in it included; remembers which were asked for."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__({name: Reading(one) if isinstance(one, Mapping) else one for name, one in fields.items()})
        self._asked: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self._asked.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """As of a dictionary."""
        self._asked.add(name)
        return super().get(name, default)

    def unread(self, wanted: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
        """Dotted names of wanted fields that nobody asked for."""
        for name, value in wanted.items():
            if name not in self._asked:
                yield prefix + name
            elif isinstance(value, Mapping):
                yield from super().__getitem__(name).unread(value, f"{prefix}{name}.")
