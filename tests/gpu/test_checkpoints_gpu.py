"""Converted checkpoints of every kind load in vLLM and answer as the model does. Needs CUDA.

The model is the demo's warm start: `FLOTILLA_DEMO_MODEL` names one that is there already; and a random one has experts.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoTokenizer

from demo.problems import Split, draw_problem
from demo.tokenizer import encode_prompt
from services.weight_sync.layout import BLOCK_128, CHANNEL, TENSOR, Scaling
from tests.gpu.fresh_engine import (
    Tokens,
    demo_model,
    greedy_answers,
    start_greedy,
    write_bf16_checkpoint,
    write_fp8_checkpoint,
)
from tests.tiny_models import VOCABULARY, save_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(500),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

PROMPTS, MOST_TOKENS = 64, 64
ALIKE = 0.5
"""Share of answers that are the same, token for token, with fp8 weights and activations: rounding moves some."""
KINDS: dict[str, Scaling] = {"block": BLOCK_128, "channel": CHANNEL, "tensor": TENSOR}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokens]:
    """Greedy answers of the model in bf16 and of its conversions, each by an engine of its own."""
    folder = tmp_path_factory.mktemp("converted")
    model = demo_model(folder)
    paths = {name: folder / name for name in ("bf16", *KINDS, "channel-to-block")}
    write_bf16_checkpoint(model, paths["bf16"])
    for name, scaling in KINDS.items():
        write_fp8_checkpoint(paths["bf16"], paths[name], scaling)
    write_fp8_checkpoint(paths["channel"], paths["channel-to-block"])
    prompts = drawn(model)
    running = {name: start_greedy(path, prompts, MOST_TOKENS, 0) for name, path in paths.items()}
    return {name: greedy_answers(paths[name], process) for name, process in running.items()}


def drawn(model: Path) -> Tokens:
    """Prompts of the demo's task."""
    tokenizer, random = AutoTokenizer.from_pretrained(model), Random(0)
    return [encode_prompt(tokenizer, draw_problem(random, Split.HELD_OUT, 0.5).text) for _ in range(PROMPTS)]


@pytest.mark.parametrize("name", [*KINDS, "channel-to-block"])
def test_a_converted_checkpoint_answers_as_its_source_does(answers: dict[str, Tokens], name: str):
    alike = sum(one == other for one, other in zip(answers["bf16"], answers[name], strict=True))
    print(f"{name}: {alike} of {PROMPTS} greedy answers are those of bf16")
    assert alike >= ALIKE * PROMPTS


def test_converted_experts_load(tmp_path: Path) -> None:
    """A random model has no answers worth comparing beyond the first token."""
    save_model(tmp_path / "float32", "qwen3_moe", moe_intermediate_size=128, num_experts=8, head_dim=64)
    paths = {name: tmp_path / name for name in ("bf16", *KINDS)}
    write_bf16_checkpoint(tmp_path / "float32", paths["bf16"])
    for name, scaling in KINDS.items():
        write_fp8_checkpoint(paths["bf16"], paths[name], scaling)
    random = Random(1)
    prompts = [[random.randrange(3, VOCABULARY) for _ in range(20)] for _ in range(PROMPTS)]
    running = {name: start_greedy(path, prompts, 4, 0) for name, path in paths.items()}
    answers = {name: greedy_answers(paths[name], process) for name, process in running.items()}
    for name in KINDS:
        alike = sum(one[0] == other[0] for one, other in zip(answers["bf16"], answers[name], strict=True))
        print(f"experts by {name}: {alike} of {PROMPTS} first tokens are those of bf16")
        assert alike >= ALIKE * PROMPTS
