"""Tokenizer, model and a warm start of a few steps. Nothing is faked; the warm start is only short."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo.model import build_model
from demo.muon import Muon
from demo.problems import Split, Teacher, draw_problem, work
from demo.tokenizer import build_tokenizer, encode_prompt
from demo.warm_start import Recipe, drill_row, load_report, lr_factor, warm_start, worked_row


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def test_texts_survive_the_tokenizer_and_think_tokens_survive_decoding(tokenizer) -> None:
    random = Random(0)
    for _ in range(300):
        problem = draw_problem(random, Split.HELD_OUT, 0.5)
        assert tokenizer.decode(tokenizer.encode(problem.text, add_special_tokens=False)) == problem.text
    answer = work(draw_problem(random, Split.TRAINING, 1.0), random, Teacher())
    ids = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
    assert tokenizer.decode(ids, skip_special_tokens=True) == answer
    assert answer.startswith("<think>") and "</think>" in answer


def test_think_tokens_are_single_and_not_special(tokenizer) -> None:
    for token in ("<think>", "</think>"):
        (token_id,) = tokenizer.encode(token, add_special_tokens=False)
        assert token_id not in tokenizer.all_special_ids


def test_every_digit_is_a_token_of_its_own(tokenizer) -> None:
    tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode("1234567890", add_special_tokens=False))
    assert tokens == list("1234567890")
    assert not [token for token in tokenizer.get_vocab() if sum(map(str.isdigit, token)) > 1]


def test_the_tokenizer_fits_the_model_and_is_deterministic(tokenizer) -> None:
    assert 480 <= len(tokenizer) <= 512
    assert build_tokenizer().get_vocab() == tokenizer.get_vocab()


def test_a_prompt_ends_where_the_answer_begins(tokenizer) -> None:
    ids = encode_prompt(tokenizer, "How many?")
    assert tokenizer.decode(ids) == "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"


def test_the_model_is_tiny_and_every_decoder_matrix_is_a_multiple_of_128(tokenizer) -> None:
    model = build_model(tokenizer, seed=0)
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(0.92e6, rel=0.02)
    matrices = [value for name, value in model.named_parameters() if "layers" in name and value.ndim == 2]
    assert len(matrices) == 4 * 7
    assert all(size % 128 == 0 for value in matrices for size in value.shape)


def test_only_results_are_learned_of_a_drill_and_only_the_answer_of_a_problem(tokenizer) -> None:
    drill = drill_row(tokenizer, Random(1))
    learned = tokenizer.decode([one for one, learn in zip(drill.tokens, drill.learn, strict=True) if learn])
    assert learned.isdigit()
    problem = draw_problem(Random(1), Split.TRAINING, 0.5)
    row = worked_row(tokenizer, Random(1), problem)
    start = row.learn.index(True)
    assert all(row.learn[start:]) and not any(row.learn[:start])
    assert tokenizer.decode(row.tokens[start:]).startswith("<think>")
    assert row.tokens[-1] == tokenizer.eos_token_id


def test_muon_is_the_muon_of_torch() -> None:
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in ((384, 128), (128, 384), (128, 128), (128, 128))]
    theirs = [torch.nn.Parameter(one.detach().clone()) for one in ours]
    before = [one.detach().clone() for one in ours]
    mine = Muon(ours, lr=0.02, momentum=0.95, weight_decay=0.01)
    reference = torch.optim.Muon(theirs, lr=0.02, momentum=0.95, nesterov=True, weight_decay=0.01)
    for _ in range(3):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        mine.step()
        reference.step()
    for one, other, start in zip(ours, theirs, before, strict=True):
        bfloat16_noise = 0.03 * (other - start).abs().max()
        assert (one - other).abs().max() < bfloat16_noise


def test_the_learning_rate_rises_holds_and_falls_to_a_tenth() -> None:
    recipe = Recipe()
    factors = [lr_factor(step, recipe) for step in range(recipe.steps)]
    assert factors[0] == pytest.approx(1 / 30)
    falls = recipe.drill_steps + recipe.worked_steps * 6 // 10
    assert factors[29:falls] == pytest.approx([1.0] * (falls - 29))
    assert factors[falls:] == sorted(factors[falls:], reverse=True)
    assert factors[-1] == pytest.approx(0.1, abs=0.01)


def test_a_warm_start_writes_a_whole_checkpoint_and_learns(tmp_path: Path) -> None:
    recipe = Recipe(seed=3, drill_steps=4, worked_steps=8, batch_size=8, evaluation_problems=4)
    seen: list[tuple[str, int]] = []
    report = warm_start(tmp_path / "model", recipe, lambda stage, step: seen.append((stage, step)))
    assert [step for _, step in seen] == list(range(1, 13))
    assert report.final_loss < 6.0  # less than log(512), the loss of knowing nothing
    assert load_report(tmp_path / "model", recipe) == report
    assert load_report(tmp_path / "model", Recipe(seed=4)) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    loaded = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert loaded.chat_template
    assert model.generation_config.eos_token_id == loaded.eos_token_id == loaded.convert_tokens_to_ids("<|im_end|>")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == "qwen3"
