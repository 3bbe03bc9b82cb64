"""What an engine wants, from headers and facts of a loaded model; and the guards of the vLLM repairs. No vLLM here."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import save_file

from services.weight_sync.manifest import LoadedModel, checkpoint_shapes, make_manifest
from services.weight_sync.vllm_cpu_fixes import _replace

MODEL = LoadedModel(
    linear_modules={"model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.o_proj"},
    expert_modules={"model.layers.0.mlp.experts"},
    packed_modules={"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]},
    parameter_dtypes={
        "model.layers.0.mlp.gate.e_score_correction_bias": "float32",
        "model.layers.0.self_attn.qkv_proj.bias": "float16",
    },
    dtype="bfloat16",
    tied=True,
    layer_count=1,
)
SHAPES = {
    "lm_head.weight": (320, 64),
    "model.embed_tokens.weight": (320, 64),
    "model.layers.0.mlp.experts.0.down_proj.weight": (64, 32),
    "model.layers.0.mlp.gate.e_score_correction_bias": (4,),
    "model.layers.0.mlp.gate.weight": (4, 64),
    "model.layers.0.self_attn.k_proj.bias": (64,),
    "model.layers.0.self_attn.k_proj.weight": (64, 64),
    "model.layers.0.self_attn.o_proj.weight": (64, 64),
    "model.layers.0.self_attn.rotary_emb.inv_freq": (16,),
    "model.layers.1.self_attn.o_proj.weight": (64, 64),
    "model.norm.weight": (64,),
}


def test_linear_layers_and_experts_are_quantisable():
    manifest = make_manifest(SHAPES, MODEL)
    assert [one.name for one in manifest if one.quantisable] == [
        "model.layers.0.mlp.experts.0.down_proj.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.self_attn.o_proj.weight",
    ]


def test_what_is_not_loaded_is_left_out():
    names = [one.name for one in make_manifest(SHAPES, MODEL)]
    layers = ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.1.self_attn.o_proj.weight")
    left_out = {"lm_head.weight", *layers}
    assert names == sorted(SHAPES.keys() - left_out)
    untied = make_manifest(SHAPES, dataclasses.replace(MODEL, tied=False))
    assert untied[0].name == "lm_head.weight" and not untied[0].quantisable


def test_dtypes_are_those_of_the_engine():
    dtypes = {one.name: one.dtype for one in make_manifest(SHAPES, MODEL)}
    assert dtypes["model.layers.0.mlp.gate.e_score_correction_bias"] == "float32"
    assert dtypes["model.layers.0.self_attn.k_proj.bias"] == "float16", "that of the merged parameter"
    assert dtypes["model.norm.weight"] == "bfloat16"


def test_shapes_come_from_the_headers(tmp_path):
    with pytest.raises(FileNotFoundError, match="no safetensors"):
        checkpoint_shapes(tmp_path)
    save_file({"a": torch.zeros(3, 4), "b": torch.zeros(5)}, tmp_path / "one.safetensors", metadata={"format": "pt"})
    save_file({"c": torch.zeros(2)}, tmp_path / "two.safetensors")
    assert checkpoint_shapes(tmp_path) == {"a": (3, 4), "b": (5,), "c": (2,)}
    index = {"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert checkpoint_shapes(tmp_path) == {"a": (3, 4), "b": (5,)}, "only files that the index names are loaded"


class Internals:
    def method(self, layer: object) -> str:
        return "broken"


def test_a_repair_is_made_once_and_refuses_other_internals():
    calls = []

    def make(original):
        calls.append(original)
        return lambda self, layer: original(self, layer) + " and repaired"

    for _ in range(2):
        _replace(Internals, "method", ["self", "layer"], make)
    assert len(calls) == 1
    assert Internals().method(0) == "broken and repaired"
    for name, parameters in (("gone", ["self"]), ("other", ["self", "layer", "more"])):
        Internals.other = lambda self, layer: ""  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(RuntimeError, match=f"Internals.{name} is not the one"):
            _replace(Internals, name, parameters, make)
