"""Lists of equations that give values to names, such as `x=1, y=2`."""

from __future__ import annotations

from collections.abc import Sequence

from services.reward.graders.plus.equations import is_name


def sides(items: Sequence[str]) -> list[tuple[str, str]] | None:
    """The items as names and their values; None unless all are that."""
    pairs = [item.split("=") for item in items]
    if any(len(one) != 2 or not is_name(one[0].strip()) for one in pairs):
        return None
    return [(name.strip(), value.strip()) for name, value in pairs]


def assignments(items: Sequence[str]) -> dict[str, str]:
    """The values of `x=1, y=2` by their names, in this order; nothing if it is no such list."""
    pairs = sides(items) or []
    return dict(pairs) if len(dict(pairs)) == len(pairs) else {}


def without_name(items: Sequence[str]) -> Sequence[str]:
    """`x=1, x=2` and `x=1, 2` are the values 1 and 2."""
    pairs = sides(items)
    if pairs and len({name for name, _ in pairs}) == 1:
        return [value for _, value in pairs]
    first = sides(items[:1])
    if first and not any("=" in item for item in items[1:]):
        return [first[0][1], *items[1:]]
    return items
