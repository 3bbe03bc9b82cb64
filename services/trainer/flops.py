"""What a sample costs the trainer, as the buffer needs it to give every rank equal work."""

from __future__ import annotations

from dataclasses import dataclass

from services.trainer.model import ModelConfig


@dataclass(frozen=True, slots=True)
class SampleFlops:
    """A sample of t tokens takes `per_token x t + per_token_squared x t^2` FLOPs."""

    per_token: float
    per_token_squared: float


def forward_flops(model: ModelConfig) -> SampleFlops:
    """FLOPs of the forward pass of a dense decoder; the backward pass takes twice as many, for every sample alike.

    Only matrix products count, one of `[m, k]` and `[k, n]` as 2mkn, as in Narayanan et al. 2021 (arXiv 2104.04473,
    appendix), here with causal grouped-query attention and a gated feed-forward. In each layer

        projections    2 x hidden x (2 x heads + 2 x key_value_heads) x head_size    a token
        feed-forward   2 x hidden x 3 x ffn_hidden                                   a token
        attention      2 x 2 x heads x head_size                                     a pair of t x (t + 1) / 2

    and once 2 x hidden x vocabulary a token for the output layer, which is too much for tokens of the prompt.
    """
    attention = 4 * model.hidden * (model.heads + model.key_value_heads) * model.head_size
    feed_forward = 6 * model.hidden * model.ffn_hidden
    pair = 4 * model.heads * model.head_size
    output = 2 * model.hidden * model.vocabulary
    return SampleFlops(
        per_token=model.layers * (attention + feed_forward + pair / 2) + output,
        per_token_squared=model.layers * pair / 2,
    )
