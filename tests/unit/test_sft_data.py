"""Rows of supervised fine-tuning: what is learned of them, how batches are made, and errors that name row and field.

The tokenizer has one token a byte, and a ChatML-like template. Nothing is faked.
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from pyarrow import Table, parquet

from services.common.schedule import Layout
from services.common.spec import SpecError
from services.common.spec.sft import SftDataSpec, SftSpec, load_sft
from services.common.tokenizers import load_tokenizer
from services.trainer.sft.data import SftData, load_data
from services.trainer.sft.samples import SftSample, make_batch, make_sample
from tests.tiny_models import CHAT_TEMPLATE, VOCABULARY, save_tokenizer

ASKED = {"role": "user", "content": "1+1?"}
ANSWERED = {"role": "assistant", "content": "2, é"}
CONVERSATION = [{"role": "system", "content": "s"}, ASKED, ANSWERED, {"role": "user", "content": "sure?"}, ANSWERED]
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FORGETFUL = CHAT_TEMPLATE.replace(
    "m['content']", "(m['content'] if loop.last or m['role'] != 'assistant' else m['content'][3:])"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(path)
    return path


def with_template(path: Path, template: str) -> Path:
    tokenizer = save_tokenizer(path)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    return path


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(checkpoint: Path, path: Path, **fields: Any) -> SftData:
    return load_data(SftDataSpec(path=path, **fields), checkpoint, VOCABULARY)


def learned(checkpoint: Path, sample: SftSample) -> list[str]:
    """The texts that are learned, one for each run of learned tokens."""
    pairs = zip(sample.tokens, sample.mask, strict=True)
    runs = [[token for token, _ in run] for is_learned, run in groupby(pairs, key=itemgetter(1)) if is_learned]
    return [load_tokenizer(checkpoint).decode(run) for run in runs]


def test_the_turns_of_the_assistant_are_learned_to_their_end(tmp_path: Path, checkpoint: Path) -> None:
    (sample,) = load(checkpoint, write(tmp_path / "d.jsonl", {"messages": CONVERSATION})).samples
    assert learned(checkpoint, sample) == ["2, é<|im_end|>"] * 2
    tokenizer = load_tokenizer(checkpoint)
    text = tokenizer.apply_chat_template(CONVERSATION, tokenize=False)
    assert tokenizer.decode(sample.tokens) + "\n" == text, "what the template writes after the last turn is left out"


def test_a_template_that_marks_turns_says_the_same(tmp_path: Path, checkpoint: Path) -> None:
    data = write(tmp_path / "d.jsonl", {"messages": CONVERSATION})
    marked = with_template(tmp_path / "marked", MARKED)
    assert load(marked, data).samples == load(checkpoint, data).samples


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, MARKED], ids=["prompted", "marked"])
def test_a_turn_can_be_left_out(tmp_path: Path, template: str) -> None:
    model = with_template(tmp_path / "model", template)
    messages = [*CONVERSATION[:2], {**ANSWERED, "content": "first", "step_loss_mask": 0}, *CONVERSATION[3:]]
    (sample,) = load(model, write(tmp_path / "d.jsonl", {"messages": messages})).samples
    assert learned(model, sample) == ["2, é<|im_end|>"]
    assert "first" in load_tokenizer(model).decode(sample.tokens)


def test_a_template_that_changes_earlier_turns_is_refused_unless_only_the_last_one_is_learned(tmp_path: Path) -> None:
    model = with_template(tmp_path / "model", FORGETFUL)
    rows = [{"messages": CONVERSATION[:3]}, {"messages": CONVERSATION}]
    with pytest.raises(
        SpecError, match=r"d\.jsonl:2: field 'messages': .*message 2 otherwise when others .*one row for each"
    ):
        load(model, write(tmp_path / "d.jsonl", *rows))
    messages = [*CONVERSATION[:2], {**ANSWERED, "step_loss_mask": 0}, *CONVERSATION[3:]]
    (sample,) = load(model, write(tmp_path / "e.jsonl", {"messages": messages})).samples
    assert learned(model, sample) == ["2, é<|im_end|>"]


def test_a_template_whose_prompt_is_not_what_it_writes_is_refused(tmp_path: Path) -> None:
    model = with_template(tmp_path / "model", CHAT_TEMPLATE.replace("assistant\n'", "assistant\n<think>'"))
    with pytest.raises(SpecError, match=r"d\.jsonl:1: field 'messages': .*message 1 behind .*give prompt and response"):
        load(model, write(tmp_path / "d.jsonl", {"messages": [ASKED, ANSWERED]}))


def test_a_template_sees_tools_and_calls(tmp_path: Path) -> None:
    template = "{% if tools %}{{ tools[0]['name'] + '\n' }}{% endif %}" + CHAT_TEMPLATE.replace(
        "m['content']", "m['content'] + (m['tool_calls'][0]['id'] if m['tool_calls'] else '')"
    )
    model = with_template(tmp_path / "model", template)
    messages = [ASKED, {"role": "assistant", "content": None, "tool_calls": [{"id": "call"}]}]
    (sample,) = load(model, write(tmp_path / "d.jsonl", {"messages": messages, "tools": [{"name": "add"}]})).samples
    assert learned(model, sample) == ["call<|im_end|>"]
    assert load_tokenizer(model).decode(sample.tokens).startswith("add\n")


def test_prompt_and_response_are_taken_as_they_are(tmp_path: Path, checkpoint: Path) -> None:
    rows = (
        {"prompt": "ab", "response": "cd"},
        {"prompt": [5, 6], "response": [7, 8, 9]},
        {"prompt": [5], "response": [6, 7, 8, 9], "loss_mask": [0, 1, 1, 0]},
    )
    text, ids, masked = load(checkpoint, write(tmp_path / "d.jsonl", *rows)).samples
    assert (load_tokenizer(checkpoint).decode(text.tokens), list(text.mask)) == ("abcd", [0, 0, 1, 1])
    assert (list(ids.tokens), list(ids.mask)) == ([5, 6, 7, 8, 9], [0, 0, 1, 1, 1])
    assert (list(masked.tokens), list(masked.mask)) == ([5, 6, 7, 8], [0, 0, 1, 1])


def test_parquet_says_the_same(tmp_path: Path, checkpoint: Path) -> None:
    rows = [{"messages": CONVERSATION}, {"messages": [ASKED, {**ANSWERED, "step_loss_mask": 1}]}]
    parquet.write_table(Table.from_pylist(rows), tmp_path / "d.parquet")
    expected = load(checkpoint, write(tmp_path / "d.jsonl", *rows)).samples
    assert load(checkpoint, tmp_path / "d.parquet").samples == expected


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"message": [ASKED]},
            "neither 'messages' nor 'prompt' and 'response' are among the fields of the row, ['message']",
        ),
        ({"response": "a"}, "no field 'prompt'"),
        ({"prompt": "a"}, "no field 'response'"),
        ({"prompt": "", "response": "b"}, "field 'prompt' is empty"),
        ({"prompt": "a", "response": []}, "field 'response' is empty"),
        ({"prompt": ["a"], "response": "b"}, "field 'prompt' must be text or a list of token ids"),
        ({"prompt": [True], "response": "b"}, "field 'prompt' must be text or a list of token ids"),
        ({"prompt": [VOCABULARY], "response": "b"}, f"field 'prompt': token {VOCABULARY} is outside the vocabulary"),
        ({"prompt": [1], "response": [2, 3], "loss_mask": [1]}, "field 'loss_mask' must have 0 or 1 for each of the 2"),
        ({"prompt": [1], "response": [2], "loss_mask": [2]}, "field 'loss_mask' must have 0 or 1"),
        ({"prompt": [1], "response": [2], "loss_mask": [[1]]}, "field 'loss_mask' must have 0 or 1"),
        ({"prompt": [1], "response": [2], "loss_mask": [1.0]}, "field 'loss_mask' must have 0 or 1"),
        ({"prompt": [1], "response": [2], "loss_mask": []}, "field 'loss_mask' must have 0 or 1"),
        ({"prompt": [1], "response": [2], "loss_mask": [0]}, "field 'response': nothing of it is learned"),
        ({"messages": "hi"}, "field 'messages': must be a list"),
        ({"messages": []}, "field 'messages': must be a list"),
        ({"messages": [ASKED, {"role": "assistant"}]}, "field 'messages': message 1 needs a role and a content"),
        ({"messages": [ASKED]}, "field 'messages': no message has the role 'assistant'"),
        (
            {"messages": [ASKED, {"role": "asistant", "content": "2"}]},
            "field 'messages': message 1: unknown role 'asistant'; 'assistant' is meant?",
        ),
        ({"messages": [ANSWERED, ASKED]}, "field 'messages': message 0 is the assistant's"),
        ({"messages": [ASKED, {**ANSWERED, "step_loss_mask": 2}]}, "field 'messages': message 1: step_loss_mask"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path: Path, checkpoint: Path, row: Any, words: str) -> None:
    path = write(tmp_path / "d.jsonl", {"prompt": "a", "response": "b"}, row)
    with pytest.raises(SpecError) as caught:
        load(checkpoint, path)
    assert f"{path}:2: {words}" in str(caught.value)


def test_what_the_template_refuses_is_named(tmp_path: Path) -> None:
    model = with_template(tmp_path / "model", "{{ raise_exception('no system') }}")
    with pytest.raises(SpecError, match=r"d\.jsonl:1: field 'messages': the chat template refuses it: no system"):
        load(model, write(tmp_path / "d.jsonl", {"messages": CONVERSATION}))
    model = with_template(tmp_path / "model", "{{ 1 // 0 }}")
    with pytest.raises(SpecError, match="the chat template refuses it: integer division"):
        load(model, write(tmp_path / "d.jsonl", {"messages": CONVERSATION}))


def test_a_conversation_of_a_larger_tokenizer_is_refused(tmp_path: Path, checkpoint: Path) -> None:
    path = write(tmp_path / "d.jsonl", {"messages": CONVERSATION})
    with pytest.raises(SpecError, match=r"d\.jsonl:1: field 'messages': token \d+ is outside the vocabulary of 50"):
        load_data(SftDataSpec(path=path), checkpoint, vocabulary=50)


def test_a_sample_that_is_too_long_is_refused_or_counted(tmp_path: Path, checkpoint: Path) -> None:
    path = write(tmp_path / "d.jsonl", {"prompt": "ab", "response": "cd"}, {"prompt": "ab", "response": "cde"})
    with pytest.raises(SpecError, match=r"d\.jsonl:2: 5 tokens are more than data\.max_tokens = 4"):
        load(checkpoint, path, max_tokens=4)
    data = load(checkpoint, path, max_tokens=4, overlong="drop")
    assert (len(data.samples), data.overlong) == (1, 1)
    with pytest.raises(SpecError, match="there are no samples"):
        load(checkpoint, path, max_tokens=3, overlong="drop")


def make_spec(batch_size: int, epochs: int, shuffle: bool = True) -> SftSpec:
    data = {"path": "d.jsonl", "shuffle": shuffle}
    sft = {"batch_size": batch_size, "epochs": epochs}
    return SftSpec.model_validate({"run_id": "r", "model": {"hf_checkpoint": "m"}, "data": data, "sft": sft})


def test_every_sample_is_used_once_an_epoch() -> None:
    data = SftData([make_sample([0, token], [0, 1]) for token in range(10)], 0)
    spec = make_spec(batch_size=4, epochs=3)
    used = [one.tokens[1] for number in range(data.batches(spec)) for one in data.batch(number, spec)]
    assert data.batches(spec) == 8 and len(data.batch(7, spec)) == 2
    epochs = [used[begin : begin + 10] for begin in range(0, 30, 10)]
    assert all(sorted(one) == list(range(10)) for one in epochs)
    assert len(set(map(tuple, epochs))) == 3, "each in an order of its own"
    assert [one.tokens[1] for one in data.batch(0, make_spec(4, 1, shuffle=False))] == [0, 1, 2, 3]


def test_a_batch_averages_over_its_learned_tokens_whatever_the_ranks() -> None:
    samples = [make_sample(range(1, 3 + n), [0, 1] + [1] * n) for n in range(5)]
    made = make_batch(7, samples, Layout(1, 8), 0)
    whole, rows = made.batch, made.samples
    parts = [make_batch(7, samples, Layout(2, 8), rank).batch for rank in range(2)]
    assert (whole.number, whole.rollouts_per_step) == (7, (1,))
    assert {row.loss_denominator for row in whole.rows} == {sum(one.learned for one in samples)} == {15}
    assert {one.digest for one in parts} == {whole.digest}
    assert Counter(row for part in parts for one in part.micro_batches for row in one.rows) == Counter(range(5))
    assert (rows[2].prompt, rows[2].response, rows[2].loss_mask) == ((1,), (2, 3, 4), (1, 1, 1))
    assert make_batch(7, samples[::-1], Layout(1, 8), 0).batch.digest != whole.digest


def test_the_spec_names_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "sft.toml"
    path.write_text('run_id = "r"\n[model]\nhf_checkpoint = "m"\n[data]\npath = "d.jsonl"\n[sft]\nbatch_size = 4\n')
    spec = load_sft(path, environ={})
    assert (spec.run_dir, spec.data.path) == (tmp_path / "runs" / "r", tmp_path / "d.jsonl")
    assert load_sft(path, ["data.max_tokens=7"], environ={}).data.max_tokens == 7
    with pytest.raises(SpecError, match=r"data\.path: there is no file|model\.hf_checkpoint: there is no file"):
        spec.check_files()
    with pytest.raises(SpecError, match=r"sft\.epochz: unknown key"):
        load_sft(path, ["sft.epochz=1"], environ={})
    with pytest.raises(SpecError, match=r"data\.overlong"):
        load_sft(path, ["data.overlong=cut"], environ={})
