"""Rotary position embedding, as a config.json says it."""

from __future__ import annotations

from dataclasses import dataclass

from services.trainer.config_reading import Fields, only


@dataclass(frozen=True, slots=True)
class Yarn:
    """Scaled rotary frequencies (arXiv 2309.00071)."""

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding."""

    theta: int
    fraction: float = 1.0
    """Of each head, from its first element on."""
    yarn: Yarn | None = None
    llama3_factor: float | None = None
    """Slows low frequencies down, as Llama 3.1 does."""


def read_rope(config: Fields, *, fraction: float = 1.0, scaling: str = "") -> Rope:
    """Rotary parameters, in today's spelling (`rope_parameters`) or the one before it.

    Args:
        config: The config.json.
        fraction: Of a head, where the config does not say it.
        scaling: What the family may have beside unscaled rope.
    """
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    thetas = found.get("rope_theta"), config.get("rope_theta"), 10000
    fractions = found.get("partial_rotary_factor"), config.get("partial_rotary_factor"), fraction
    theta, fraction = int(next(filter(None, thetas))), next(filter(None, fractions))
    kind = found.get("rope_type") or found.get("type") or "default"
    if kind == "default":
        return Rope(theta, fraction)
    if kind != scaling:
        raise ValueError(f"rope scaling of type {kind!r} is not supported; only {scaling or 'default'!r} is")
    if kind == "yarn":
        return Rope(theta, fraction, yarn=_yarn(found))
    return Rope(theta, fraction, llama3_factor=_llama3_factor(found))


def _yarn(found: Fields) -> Yarn:
    return Yarn(
        factor=found["factor"],
        original_positions=found["original_max_position_embeddings"],
        beta_fast=found.get("beta_fast") or 32,
        beta_slow=found.get("beta_slow") or 1,
        mscale=found.get("mscale", 1.0),
        mscale_all_dim=found.get("mscale_all_dim", 0.0),
    )


def _llama3_factor(found: Fields) -> float:
    only(found, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    return found["factor"]
