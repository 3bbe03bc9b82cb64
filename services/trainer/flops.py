"""What a sample costs the trainer, as the buffer needs it to give every rank equal work."""

from __future__ import annotations

from dataclasses import dataclass

from services.trainer.model_config import LatentAttention, ModelConfig


@dataclass(frozen=True, slots=True)
class SampleFlops:
    """A sample of t tokens takes `per_token x t + per_token_squared x t^2` FLOPs."""

    per_token: float
    per_token_squared: float


def forward_flops(model: ModelConfig) -> SampleFlops:
    """FLOPs of the forward pass of a decoder; the backward pass takes twice as many, for every sample alike.

    Only matrix products count, one of `[m, k]` and `[k, n]` as 2mkn, as in Narayanan et al. 2021 (arXiv 2104.04473,
    appendix), here with causal grouped-query attention and a gated feed-forward. In each layer

        projections    2 x hidden x (2 x heads + 2 x key_value_heads) x head_size    a token
        feed-forward   2 x hidden x 3 x ffn_hidden                                   a token
        attention      2 x 2 x heads x head_size                                     a pair of t x (t + 1) / 2

    and once 2 x hidden x vocabulary a token for the output layer, which is too much for tokens of the prompt. A layer
    with experts has the feed-forward of those that a token goes to, and the router; latent attention its own
    projections, and in a pair queries and keys of another size than values. Multi-token prediction is a layer more, 2 x
    hidden x 2 x hidden a token for what it takes in, and the output layer once more.
    """
    layers, predictors = model.layers + model.mtp_built, 1 + model.mtp_built
    latent = model.latent
    projections = _latent_projections(model, latent) if latent else _projections(model)
    pair = 2 * model.heads * (latent.query_size + latent.value_size if latent else 2 * model.head_size)
    sparse_layers = layers - model.dense_layers
    feed_forward = 6 * model.hidden * (model.dense_layers * model.ffn_hidden + sparse_layers * _active_width(model))
    routers = sparse_layers * 2 * model.hidden * (model.experts.count if model.experts else 0)
    output = 2 * model.hidden * (model.vocabulary * predictors + 2 * model.hidden * model.mtp_built)
    return SampleFlops(
        per_token=layers * (projections + pair / 2) + feed_forward + routers + output,
        per_token_squared=layers * pair / 2,
    )


def _projections(model: ModelConfig) -> float:
    """Of a layer, for a token."""
    return 4 * model.hidden * (model.heads + model.key_value_heads) * model.head_size


def _latent_projections(model: ModelConfig, latent: LatentAttention) -> float:
    queries = model.heads * latent.query_size
    keys_and_values = model.heads * (latent.plain_size + latent.value_size)
    return 2 * (
        latent.query_rank * (model.hidden + queries)
        + model.hidden * (latent.key_value_rank + latent.rotary_size)
        + latent.key_value_rank * keys_and_values
        + model.heads * latent.value_size * model.hidden
    )


def _active_width(model: ModelConfig) -> int:
    """Of all experts that a token goes to, together."""
    experts = model.experts
    return experts.chosen * experts.ffn_hidden + experts.shared_ffn_hidden if experts else 0
