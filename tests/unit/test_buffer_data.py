"""The prompt data set: formats, order, and malformed rows that name file and line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.buffer.data import load_prompts
from services.common.spec import DataSpec, SpecError
from services.common.tokenizers import stop_token_ids
from tests.tiny_models import save_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def spec(path: Path, **fields: object) -> DataSpec:
    return DataSpec.model_validate({"prompt_data": path, "shuffle": False} | fields)


def load(path: Path, tokenizer, **fields: object):
    return load_prompts(path, spec(path, **fields), tokenizer)


def test_text_and_messages_are_rendered_alike(tmp_path, tokenizer):
    path = write(
        tmp_path / "d.jsonl",
        {"prompt": "hi", "label": 3},
        "",
        {"prompt": [{"role": "user", "content": "hi"}], "label": "3"},
    )
    data = load(path, tokenizer)
    assert data.prompts[0].token_ids == data.prompts[1].token_ids
    assert tokenizer.decode(data.prompts[0].token_ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert [(p.row, p.label) for p in data.prompts] == [(1, "3"), (3, "3")]


def test_without_template_the_text_is_taken_as_it_is(tmp_path, tokenizer):
    path = write(tmp_path / "d.jsonl", {"q": "2+2=", "a": 4})
    data = load(path, tokenizer, input_key="q", label_key="a", apply_chat_template=False)
    assert tokenizer.decode(data.prompts[0].token_ids) == "2+2="


def test_parquet_reads_like_jsonl(tmp_path, tokenizer):
    import pyarrow
    from pyarrow import parquet

    rows = [{"prompt": [{"role": "user", "content": str(i)}], "label": str(i)} for i in range(3)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    expected = load(write(tmp_path / "d.jsonl", *rows), tokenizer)
    assert load(tmp_path / "d.parquet", tokenizer).prompts == expected.prompts


def test_overlong_prompts_are_dropped_and_counted(tmp_path, tokenizer):
    path = write(tmp_path / "d.jsonl", {"prompt": "x", "label": "1"}, {"prompt": "x" * 100, "label": "2"})
    data = load(path, tokenizer, max_prompt_tokens=60)
    assert [p.label for p in data.prompts] == ["1"] and data.overlong == 1
    with pytest.raises(SpecError, match="no prompt is left"):
        load(path, tokenizer, max_prompt_tokens=1)


def test_every_data_epoch_is_a_permutation_and_they_differ(tmp_path, tokenizer):
    path = write(tmp_path / "d.jsonl", *({"prompt": "x", "label": i} for i in range(20)))
    data = load(path, tokenizer, shuffle=True)
    first, second = ([data.at(epoch * 20 + i).label for i in range(20)] for epoch in range(2))
    assert sorted(first, key=int) == sorted(second, key=int) == [str(i) for i in range(20)]
    assert first != second
    assert first == [load(path, tokenizer, shuffle=True).at(i).label for i in range(20)], "the same in another process"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{not json", "not valid JSON"),
        ("[1]", "a row must be a JSON object"),
        ({"prompt": "x"}, "no field 'label'"),
        ({"label": "x"}, "no field 'prompt'"),
        ({"prompt": "x", "label": None}, "no field 'label'"),
        ({"prompt": "x", "label": ["1"]}, "must be text or a number"),
        ({"prompt": "x", "label": True}, "must be text or a number"),
        ({"prompt": 7, "label": "1"}, "must be text or a list"),
        ({"prompt": [{"role": "user"}], "label": "1"}, "must be text or a list"),
    ],
)
def test_a_malformed_row_names_file_and_line(tmp_path, tokenizer, row, words):
    path = write(tmp_path / "d.jsonl", {"prompt": "x", "label": "1"}, row)
    with pytest.raises(SpecError) as caught:
        load(path, tokenizer)
    assert f"{path}:2" in str(caught.value) and words in str(caught.value)


def test_a_broken_parquet_file_is_named(tmp_path, tokenizer):
    path = write(tmp_path / "d.parquet", "no parquet")
    with pytest.raises(SpecError, match=r"d\.parquet"):
        load(path, tokenizer)


def test_stop_tokens_come_from_tokenizer_and_generation_config(tmp_path, tokenizer):
    assert stop_token_ids(tmp_path, tokenizer) == [tokenizer.eos_token_id]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert stop_token_ids(tmp_path, tokenizer) == sorted([tokenizer.eos_token_id, 7, 9])


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ('{"prompt": "a", "label": "\\ud800"}', "surrogate"),
        ('{"prompt": "", "label": "1"}', "'prompt' is empty"),
        ('{"prompt": "a", "label": ""}', "'label' is empty"),
        ('{"prompt": "a", "label": ' + "1" * 5000 + "}", "not valid JSON"),
    ],
)
def test_rows_that_could_never_be_graded_are_refused(tmp_path, tokenizer, row, words):
    with pytest.raises(SpecError, match=words):
        load(write(tmp_path / "d.jsonl", row), tokenizer)


def test_metadata_of_a_row_is_kept_and_part_of_the_digest(tmp_path, tokenizer):
    rows = {"prompt": "x", "label": "1", "metadata": {"rm_type": "boxed_f1", "n": 1}}, {"prompt": "x", "label": "1"}
    data = load(write(tmp_path / "d.jsonl", *rows), tokenizer)
    assert [p.metadata for p in data.prompts] == [{"rm_type": "boxed_f1", "n": 1}, {}]
    without = load(write(tmp_path / "e.jsonl", rows[1], rows[1]), tokenizer)
    assert data.digest() != without.digest()
    renamed = load(tmp_path / "d.jsonl", tokenizer, metadata_key="about")
    assert renamed.digest() == without.digest()


@pytest.mark.parametrize("metadata", [[1], "text", {"rm_type": "guess"}, {"rm_type": "package.module:function"}])
def test_metadata_that_cannot_be_used_names_file_and_line(tmp_path, tokenizer, metadata):
    path = write(
        tmp_path / "d.jsonl", {"prompt": "x", "label": "1"}, {"prompt": "x", "label": "1", "metadata": metadata}
    )
    with pytest.raises(SpecError, match=r"d\.jsonl:2: field 'metadata'"):
        load(path, tokenizer)
