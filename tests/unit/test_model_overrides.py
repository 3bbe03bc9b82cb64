"""Fields of a run spec in place of those of config.json. Nothing is faked."""

from __future__ import annotations

import json
import shutil
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from services.common.model_overrides import config_of
from services.common.spec import ModelSpec, SpecError
from services.rollout_gateway.engine.arguments import write_configs
from services.trainer.model_config import ModelError, read_config
from tests.model_configs import RECIPES
from tests.trainer_cases import make_spec


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(RECIPES["DeepSeek-R1"]))
    return tmp_path


def test_tables_are_merged_and_the_rest_is_replaced(checkpoint: Path) -> None:
    model = read_config(
        checkpoint, {"rope_scaling": {"factor": 8, "beta_fast": 16}, "rope_theta": 500000, "rms_norm_eps": 1e-6}
    )
    assert model.rope.yarn and (model.rope.yarn.factor, model.rope.yarn.beta_fast) == (8, 16)
    assert (model.rope.yarn.beta_slow, model.rope.yarn.original_positions, model.rope.theta) == (1, 4096, 500000)
    assert json.loads((checkpoint / "config.json").read_text()) == RECIPES["DeepSeek-R1"]


@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "vocab_size", "n_routed_experts", "model_type"])
def test_what_tensors_depend_on_is_refused_by_name(checkpoint: Path, name: str) -> None:
    with pytest.raises(SpecError, match=rf"model\.overrides\.{name}: the checkpoint has .*, on which"):
        read_config(checkpoint, {name: 12})
    assert read_config(checkpoint, {name: RECIPES["DeepSeek-R1"][name]}) == read_config(checkpoint)


def test_a_field_that_nobody_knows_is_refused(checkpoint: Path) -> None:
    with pytest.raises(
        SpecError,
        match=r"model\.overrides\.hiden_size: .* has no such field; what can be another is max",
    ):
        read_config(checkpoint, {"hiden_size": 7168})


@pytest.mark.parametrize(
    ("recipe", "overrides", "name"),
    [
        ("Qwen3-30B-A3B", {"n_group": 2}, "n_group"),
        ("Qwen3-30B-A3B", {"rope_scaling": {"rope_type": "default", "factor": 4.0}}, r"rope_scaling\.factor"),
        ("DeepSeek-R1", {"rope_scaling": {"attention_factor": 2.0}}, r"rope_scaling\.attention_factor"),
        ("DeepSeek-R1", {"rope_parameters": {"type": "default"}, "rope_scaling": {"factor": 4.0}}, "rope_scaling"),
    ],
)
def test_what_the_family_does_not_read_is_refused(
    tmp_path: Path, recipe: str, overrides: dict[str, Any], name: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RECIPES[recipe]))
    with pytest.raises(ModelError, match=rf"model\.overrides\.{name}: "):
        read_config(tmp_path, overrides)


def test_what_the_family_does_not_support_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ModelError, match="rope scaling of type 'linear'"):
        read_config(checkpoint, {"rope_scaling": {"type": "linear"}})


@pytest.mark.parametrize(
    "value", ["10000", [1], {"a": 1}, True, -5, 0.5, float("inf"), float("nan"), date(1979, 5, 27)]
)
def test_a_value_that_the_field_cannot_have_is_refused(checkpoint: Path, value: Any) -> None:
    with pytest.raises(ModelError, match=r"config\.json, with model\.overrides: rope_theta = "):
        read_config(checkpoint, {"rope_theta": value})


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000])
def test_a_config_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SpecError, match=r"config\.json: not a JSON object"):
        read_config(tmp_path)


TRANSFORMERS_5 = {
    **{name: value for name, value in RECIPES["GLM-4.7"].items() if name not in ("rope_theta", "rope_scaling")},
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000, "partial_rotary_factor": 0.5},
}
"""As it writes GLM's config: one field is there twice."""


@pytest.mark.parametrize(
    "overrides", [{"partial_rotary_factor": 0.25}, {"rope_parameters": {"partial_rotary_factor": 0.25}}], ids=str
)
def test_a_field_that_is_there_twice_changes_in_both_places(tmp_path: Path, overrides: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TRANSFORMERS_5))
    assert read_config(tmp_path, overrides).rope.fraction == 0.25
    found = config_of(tmp_path, overrides)
    assert found["partial_rotary_factor"] == found["rope_parameters"]["partial_rotary_factor"] == 0.25
    assert found["rope_parameters"]["rope_theta"] == 1000000 and "rope_theta" not in found


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"rope_theta": 3}, r"model\.overrides\.rope_theta: the checkpoint has rope_parameters\.rope_theta; override"),
        ({"partial_rotary_factor": 1, "rope_parameters": {"partial_rotary_factor": 0.25}}, "differ; give one of them"),
        ({"rope_scaling": {"type": "default"}}, "rope_parameters, which is there too, goes before"),
    ],
)
def test_an_override_where_the_config_has_another_spelling(
    tmp_path: Path, overrides: dict[str, Any], words: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TRANSFORMERS_5))
    with pytest.raises((SpecError, ModelError), match=words):
        read_config(tmp_path, overrides)


def test_overrides_belong_to_the_run(checkpoint: Path) -> None:
    plain, other = make_spec(checkpoint), make_spec(checkpoint, model={"overrides": {"rope_scaling": {"factor": 8.0}}})
    assert plain.digest() != other.digest()
    assert "[model.overrides.rope_scaling]\nfactor = 8.0" in other.to_toml()


def test_engines_read_the_same(checkpoint: Path) -> None:
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": 3}')
    overrides = {"rope_scaling": {"factor": 8.0}}
    directory = write_configs(ModelSpec(hf_checkpoint=checkpoint, overrides=overrides))
    try:
        assert json.loads((directory / "config.json").read_text()) == config_of(checkpoint, overrides)
        assert (directory / "generation_config.json").read_text() == '{"eos_token_id": 3}'
    finally:
        shutil.rmtree(directory)
