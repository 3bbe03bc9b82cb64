"""The warm start: supervised training from scratch until a tiny model answers some problems, so that RL can begin.

First drill sheets, so that it can calculate; then problems worked by a careless teacher, so that it knows the form of
an answer and a third of the right ones. Shapes: B rows, T tokens of the longest row, D hidden, V vocabulary, N learned.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3ForCausalLM

from demo.model import build_model
from demo.muon import Muon
from demo.problems import CARELESS_TEACHER, Problem, Split, draw_drill, draw_problem, work
from demo.tokenizer import END_OF_TURN, PADDING, build_tokenizer, encode_prompt, token_id

MAX_THREADS = 2
"""More do not help matrices this small."""
MAX_NEW_TOKENS = 64
REPORT_NAME = "warm_start.json"


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a warm start is made of."""

    seed: int = 0
    drill_steps: int = 400
    worked_steps: int = 600
    batch_size: int = 32
    two_step_share: float = 0.25
    muon_lr: float = 0.02
    """For the matrices of the decoder layers."""
    adam_lr: float = 3e-3
    """For everything else."""
    evaluation_problems: int = 256

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return self.drill_steps + self.worked_steps


@dataclass(frozen=True, slots=True)
class WarmStartReport:
    """What came of it."""

    accuracy: float
    """Greedy, on held-out problems, half of them of two steps."""
    final_loss: float
    parameters: int
    wall_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """One training text."""

    tokens: list[int]
    learn: list[bool]
    """For each token, whether the loss counts its prediction."""


Progress = Callable[[str, int], None]
"""Called after every optimizer step with the name of the stage and the steps done so far."""


def warm_start(path: Path, recipe: Recipe, progress: Progress) -> WarmStartReport:
    """Train and write a Hugging Face checkpoint directory; `path` appears at once, and only when all is in it."""
    torch.set_num_threads(min(MAX_THREADS, torch.get_num_threads()))
    wall, cpu = time.monotonic(), time.process_time()
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, recipe.seed)
    loss = _train(model, tokenizer, recipe, progress)
    random = Random(f"evaluation {recipe.seed}")
    problems = [draw_problem(random, Split.HELD_OUT, two_step_share=0.5) for _ in range(recipe.evaluation_problems)]
    report = WarmStartReport(
        accuracy=accuracy(model, tokenizer, problems),
        final_loss=loss,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        wall_s=round(time.monotonic() - wall, 1),
        cpu_s=round(time.process_time() - cpu, 1),
    )
    _save(path, model, tokenizer, recipe, report)
    return report


def load_report(path: Path, recipe: Recipe) -> WarmStartReport | None:
    """The report of a warm start by the same recipe that `path` holds already, or None."""
    try:
        content = json.loads((path / REPORT_NAME).read_text())
    except FileNotFoundError:
        return None
    return WarmStartReport(**content["report"]) if content["recipe"] == asdict(recipe) else None


def _save(
    path: Path, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: Recipe, report: WarmStartReport
) -> None:
    unfinished = path.with_name(path.name + ".unfinished")
    for stale in (unfinished, path):
        shutil.rmtree(stale, ignore_errors=True)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    (unfinished / REPORT_NAME).write_text(json.dumps({"recipe": asdict(recipe), "report": asdict(report)}, indent=2))
    unfinished.rename(path)


# --------------------------------------------------------------------------------------------------------- training


def _train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: Recipe, progress: Progress) -> float:
    """Run both stages; returns the last loss."""
    optimizers = _optimizers(model, recipe)
    full_lrs = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    loss = 0.0
    for step, (stage, rows) in enumerate(_batches(tokenizer, recipe)):
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for group, full_lr in zip(groups, full_lrs, strict=True):
            group["lr"] = full_lr * lr_factor(step, recipe)
        loss = _step(model, optimizers, rows, token_id(tokenizer, PADDING))
        progress(stage, step + 1)
    return loss


def lr_factor(step: int, recipe: Recipe) -> float:
    """Linear warm-up over 30 steps; over the last 40 % of the worked steps down to a tenth."""
    worked = max(0, step - recipe.drill_steps) / max(1, recipe.worked_steps)
    return min(1.0, (step + 1) / 30) * min(1.0, 1 - 0.9 * (worked - 0.6) / 0.4)


def _batches(tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> Iterator[tuple[str, list[Row]]]:
    random = Random(recipe.seed)
    for _ in range(recipe.drill_steps):
        yield "drill sheets", [drill_row(tokenizer, random) for _ in range(recipe.batch_size)]
    for _ in range(recipe.worked_steps):
        problems = [draw_problem(random, Split.TRAINING, recipe.two_step_share) for _ in range(recipe.batch_size)]
        yield "worked problems", [worked_row(tokenizer, random, problem) for problem in problems]


def drill_row(tokenizer: PreTrainedTokenizerFast, random: Random) -> Row:
    """A drill sheet; only results are learned."""
    tokens, learn = [], []
    for piece in draw_drill(random):
        ids = tokenizer.encode(piece.text, add_special_tokens=False)
        tokens += ids
        learn += [piece.learn] * len(ids)
    return Row(tokens, learn)


def worked_row(tokenizer: PreTrainedTokenizerFast, random: Random, problem: Problem) -> Row:
    """A problem with the teacher's answer; the answer is learned, its end included."""
    prompt = encode_prompt(tokenizer, problem.text)
    answer = tokenizer.encode(work(problem, random, CARELESS_TEACHER), add_special_tokens=False)
    answer.append(token_id(tokenizer, END_OF_TURN))
    return Row(prompt + answer, [False] * len(prompt) + [True] * len(answer))


def _optimizers(model: Qwen3ForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the decoder's matrices, AdamW for the embedding and, without decay, for the norms."""
    named = dict(model.named_parameters())
    matrices = [value for name, value in named.items() if value.ndim == 2 and "layers" in name]
    embedding = [value for name, value in named.items() if value.ndim == 2 and "layers" not in name]
    norms = [value for value in named.values() if value.ndim == 1]
    groups = [{"params": embedding, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    return [
        Muon(matrices, lr=recipe.muon_lr, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(groups, lr=recipe.adam_lr, betas=(0.9, 0.95)),
    ]


def _step(
    model: Qwen3ForCausalLM, optimizers: list[torch.optim.Optimizer], rows: list[Row], pad_token_id: int
) -> float:
    tokens_BT, learn_BT = _pad(rows, pad_token_id)
    # Padding stands at the right and attention is causal, so no row sees it.
    hidden_BTD = model.model(input_ids=tokens_BT, use_cache=False).last_hidden_state
    logits_NV = model.lm_head(hidden_BTD[:, :-1][learn_BT[:, 1:]])
    loss = torch.nn.functional.cross_entropy(logits_NV, tokens_BT[:, 1:][learn_BT[:, 1:]])
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
    return loss.item()


def _pad(rows: list[Row], pad_token_id: int) -> tuple[Tensor, Tensor]:
    longest = max(len(row.tokens) for row in rows)
    tokens = [row.tokens + [pad_token_id] * (longest - len(row.tokens)) for row in rows]
    learn = [row.learn + [False] * (longest - len(row.learn)) for row in rows]
    return torch.tensor(tokens), torch.tensor(learn)


# ------------------------------------------------------------------------------------------------------- evaluation


def accuracy(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: list[Problem]) -> float:
    """Share of the problems whose greedy answer ends its thinking and boxes the right number."""
    prompts = [encode_prompt(tokenizer, problem.text) for problem in problems]
    longest = max(map(len, prompts))
    # Generation continues at the right, so padding stands at the left here.
    tokens = [[token_id(tokenizer, PADDING)] * (longest - len(one)) + one for one in prompts]
    mask = [[0] * (longest - len(one)) + [1] * len(one) for one in prompts]
    output = model.generate(  # pyright: ignore[reportAttributeAccessIssue]
        input_ids=torch.tensor(tokens),
        attention_mask=torch.tensor(mask),
        generation_config=GenerationConfig(
            do_sample=False,
            max_new_tokens=MAX_NEW_TOKENS,
            eos_token_id=token_id(tokenizer, END_OF_TURN),
            pad_token_id=token_id(tokenizer, PADDING),
        ),
    )
    answers = tokenizer.batch_decode(output[:, longest:], skip_special_tokens=True)
    right = [
        answer.endswith(f"</think> \\boxed{{{one.answer}}}") for answer, one in zip(answers, problems, strict=True)
    ]
    return sum(right) / len(right)
