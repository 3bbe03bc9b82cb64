"""Two checkpoints compared tensor by tensor, each dequantised as its config says.

Where a side is fp8, a difference is measured in units of what rounding to fp8 may do to an element x with scale s:
max(2^-4 |x|, 2^-10 s), half a unit in the last place of e4m3; where both are, of the sum of both. Else the bits must be
the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from services.weight_sync.checkpoints.strips import Strip, strip_rows, strips
from services.weight_sync.checkpoints.weights import Contents, Weight
from services.weight_sync.layout import Scaling

RELATIVE_ERROR = 2.0**-4
"""Of a normal e4m3."""
SUBNORMAL_ERROR = 2.0**-10
"""Of a subnormal one, times its scale."""
SLACK = 2.0**-16
"""Relative: quotient, product and scale are float32."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Two tensors of the same name and shape."""

    name: str
    equal: bool
    """The same bits, or with fp8 within the bound."""
    relative: float
    """Largest difference of two elements, by the largest magnitude in either tensor; NaN counts as infinitely far."""
    units: float | None
    """Largest quotient of a difference and the bound of its element; None without fp8."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """All that two checkpoints differ in."""

    differences: tuple[Difference, ...]
    """Of every tensor that both have in one shape, the worst first."""
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    shapes: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    """Tensors that have two shapes."""

    @property
    def equal(self) -> bool:
        """Whether one may stand for the other."""
        differs = self.only_first or self.only_second or self.shapes
        return not differs and all(one.equal for one in self.differences)


def compare(first: Contents, second: Contents, workers: int, advance: Callable[[int], None]) -> Comparison:
    """Compare two checkpoints.

    Args:
        first: One.
        second: The other.
        workers: Threads; each has a tensor of its own, and a few strips of it in memory.
        advance: Told by the threads the bytes of `first` that have been compared since the last call.

    Raises:
        CheckpointError: A value or a scale of fp8 is not finite, or a file has changed.
    """
    both = [name for name in first.weights if name in second.weights]
    pairs = [(first.weights[name], second.weights[name]) for name in both]
    alike = [(a, b) for a, b in pairs if a.entry.shape == b.entry.shape]
    with ThreadPoolExecutor(workers) as pool:
        differences = list(pool.map(lambda pair: _difference(pair[0], pair[1], advance), alike))
    return Comparison(
        differences=tuple(sorted(differences, key=_badness, reverse=True)),
        only_first=tuple(sorted(set(first.weights) - set(both))),
        only_second=tuple(sorted(set(second.weights) - set(both))),
        shapes=tuple((a.name, a.entry.shape, b.entry.shape) for a, b in pairs if a.entry.shape != b.entry.shape),
    )


def _badness(difference: Difference) -> tuple[bool, float, float]:
    return not difference.equal, difference.units or 0.0, difference.relative


def _difference(a: Weight, b: Weight, advance: Callable[[int], None]) -> Difference:
    parts = list(_parts(a, b, advance)) or [_Part(True, 0.0, 0.0, 0.0)]
    difference, magnitude = max(part.difference for part in parts), max(part.magnitude for part in parts)
    relative = difference / magnitude if 0 < difference < math.inf else difference
    if not (a.scale or b.scale):
        return Difference(a.name, all(part.same_bits for part in parts), relative, None)
    units = max(part.units for part in parts)
    return Difference(a.name, units <= 1 + SLACK, relative, units)


def _parts(a: Weight, b: Weight, advance: Callable[[int], None]) -> Iterator[_Part]:
    if not a.size_bytes:
        return
    step = strip_rows([a, b])
    for one, other in zip(strips(a, step), strips(b, step), strict=True):
        yield _part(_side(a, one), _side(b, other))
        advance(one.values.nbytes)


def _side(weight: Weight, strip: Strip) -> _Side:
    if strip.scales is not None and strip.scaling is not None:
        x = strip.dequantised(weight, torch.float32)
        return _Side(x, _spread(strip.scales, strip.scaling, x.shape), None)
    dtype = torch.float32 if strip.values.dtype in (torch.bfloat16, torch.float16, torch.float32) else torch.float64
    return _Side(strip.values.to(dtype), None, strip.values)


def _spread(scales: torch.Tensor, scaling: Scaling, shape: Sequence[int]) -> torch.Tensor:
    """The scale of each element: [r, C], or less where that broadcasts."""
    if scaling.rows > 1:
        scales = scales[torch.arange(shape[0]) // scaling.rows]
    return scales[:, torch.arange(shape[1]) // scaling.columns] if scaling.columns else scales


def _part(a: _Side, b: _Side) -> _Part:
    distance = _distance(a.x, b.x)
    difference = float(distance.max())
    same_bits = _same_bits(a, b, difference)
    if not difference:
        return _Part(same_bits, 0.0, 0.0, 0.0)
    return _Part(same_bits, difference, max(_magnitude(a.x), _magnitude(b.x)), _units(a, b, distance))


def _distance(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """[r, C] magnitudes of differences; NaN is as far as can be from all but NaN."""
    distance = (x - y).abs_()
    if math.isfinite(float(distance.max())):
        return distance
    same = (x == y) | (x.isnan() & y.isnan())
    return distance.masked_fill_(same, 0.0).nan_to_num_(nan=math.inf, posinf=math.inf)


def _magnitude(x: torch.Tensor) -> float:
    """Of the largest element that is a number."""
    largest = float(torch.stack(torch.aminmax(x)).abs().max())
    return float(x.abs().nan_to_num_(nan=0.0, posinf=math.inf).max()) if math.isnan(largest) else largest


def _units(a: _Side, b: _Side, distance: torch.Tensor) -> float:
    # What was rounded is the other side, or unknown where that is fp8 too; then its own value bounds as well.
    bounds = [
        _bound(side.x if other.scales is not None else other.x, side.scales)
        for side, other in ((a, b), (b, a))
        if side.scales is not None
    ]
    if not bounds:
        return 0.0
    units = distance / sum(bounds[1:], bounds[0])
    largest = float(units.max())
    if math.isnan(largest):  # from 0 / 0, or an infinite distance to an infinite element
        largest = float(units.masked_fill_(distance == 0, 0.0).nan_to_num_(nan=math.inf, posinf=math.inf).max())
    return largest


def _bound(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return torch.maximum(x.abs().mul_(RELATIVE_ERROR), scales * SUBNORMAL_ERROR)


def _same_bits(a: _Side, b: _Side, difference: float) -> bool:
    """Of one dtype, bit by bit; of two that are floats, as numbers."""
    if a.stored is None or b.stored is None:
        return not difference
    if a.stored.dtype != b.stored.dtype:
        return a.stored.is_floating_point() and b.stored.is_floating_point() and not difference
    return torch.equal(a.stored.view(torch.uint8), b.stored.view(torch.uint8))


@dataclass(frozen=True, slots=True)
class _Side:
    """A strip of one of the two."""

    x: torch.Tensor
    """[r, C] float32, or float64 of what is no such float."""
    scales: torch.Tensor | None
    """Of fp8: what broadcasts to [r, C]."""
    stored: torch.Tensor | None
    """[r, C] of what is not fp8, as it is in the file."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What two strips say; the largest of each makes the tensor's."""

    same_bits: bool
    difference: float
    magnitude: float
    units: float
