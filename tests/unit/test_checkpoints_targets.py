"""Which weights become fp8: the names of the recipes' models, the source's own list, and what vLLM could not load.

Checkpoints are headers over holes: real files with the names and shapes of the models, and no data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from services.common.fp8_layers import FAMILIES
from services.rollout_gateway.engine.arguments import block_fp8_config
from services.weight_sync.checkpoints.errors import CheckpointError
from services.weight_sync.checkpoints.header import NewTensor, make_header, tensor_bytes
from services.weight_sync.checkpoints.plan import Conversion, plan_bf16, plan_fp8
from services.weight_sync.checkpoints.targets import choose_targets
from services.weight_sync.checkpoints.weights import Contents, open_directory
from services.weight_sync.layout import BLOCK_128, CHANNEL, TENSOR, Scaling

Shapes = Mapping[str, tuple[int, ...]]
MLP = ("gate_proj", "up_proj", "down_proj")


def mlp(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
    return {f"{prefix}.{name}.weight": shape for name, shape in zip(MLP, shapes, strict=True)}


def gqa(layer: str, hidden: int, heads: int, kv: int, dim: int = 128) -> dict[str, tuple[int, ...]]:
    rows = {"q_proj": (heads * dim, hidden), "k_proj": (kv * dim, hidden), "v_proj": (kv * dim, hidden)}
    return {f"{layer}.self_attn.{name}.weight": shape for name, shape in rows.items()} | {
        f"{layer}.self_attn.o_proj.weight": (hidden, heads * dim),
        f"{layer}.self_attn.q_proj.bias": (heads * dim,),
        f"{layer}.self_attn.q_norm.weight": (dim,),
        f"{layer}.input_layernorm.weight": (hidden,),
    }


def mla(layer: str, hidden: int = 7168) -> dict[str, tuple[int, ...]]:
    return {
        f"{layer}.self_attn.q_a_proj.weight": (1536, hidden),
        f"{layer}.self_attn.q_a_layernorm.weight": (1536,),
        f"{layer}.self_attn.q_b_proj.weight": (24576, 1536),
        f"{layer}.self_attn.kv_a_proj_with_mqa.weight": (576, hidden),
        f"{layer}.self_attn.kv_a_layernorm.weight": (512,),
        f"{layer}.self_attn.kv_b_proj.weight": (32768, 512),
        f"{layer}.self_attn.o_proj.weight": (hidden, 16384),
        f"{layer}.input_layernorm.weight": (hidden,),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
    }


def moe(layer: str, hidden: int, inner: int, experts: int = 2) -> dict[str, tuple[int, ...]]:
    routed = {name: s for e in range(experts) for name, s in mlp(f"{layer}.mlp.experts.{e}", hidden, inner).items()}
    return {
        **routed,
        **mlp(f"{layer}.mlp.shared_experts", hidden, inner),
        f"{layer}.mlp.gate.weight": (experts, hidden),
        f"{layer}.mlp.gate.e_score_correction_bias": (experts,),
    }


def mtp(layer: str, hidden: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{layer}.embed_tokens.weight": (vocabulary, hidden),
        f"{layer}.enorm.weight": (hidden,),
        f"{layer}.hnorm.weight": (hidden,),
        f"{layer}.eh_proj.weight": (hidden, 2 * hidden),
        f"{layer}.shared_head.norm.weight": (hidden,),
        f"{layer}.shared_head.head.weight": (vocabulary, hidden),
    }


def ends(vocabulary: int, hidden: int) -> dict[str, tuple[int, ...]]:
    shape = (vocabulary, hidden)
    return {"model.embed_tokens.weight": shape, "lm_head.weight": shape, "model.norm.weight": (hidden,)}


def deepseek_r1() -> dict[str, tuple[int, ...]]:
    """Layer 0 is dense, 3 has experts, 61 predicts a second token."""
    layers = {**mla("model.layers.0"), **mlp("model.layers.0.mlp", 7168, 18432)}
    for layer in ("model.layers.3", "model.layers.61"):
        layers |= {**mla(layer), **moe(layer, 7168, 2048)}
    return {**layers, **mtp("model.layers.61", 7168, 129280), **ends(129280, 7168)}


def glm_47() -> dict[str, tuple[int, ...]]:
    """Layer 0 is dense, 3 has experts, 92 predicts a second token."""
    layers = {**gqa("model.layers.0", 5120, 96, 8), **mlp("model.layers.0.mlp", 5120, 12288)}
    for layer in ("model.layers.3", "model.layers.92"):
        layers |= {**gqa(layer, 5120, 96, 8), **moe(layer, 5120, 1536)}
    return {**layers, **mtp("model.layers.92", 5120, 151552), **ends(151552, 5120)}


def contents_of(
    directory: Path, shapes: Shapes, model_type: object, dtypes: Mapping[str, str] = MappingProxyType({}), **config: Any
) -> Contents:
    directory.mkdir(exist_ok=True)
    tensors = [NewTensor(name, dtypes.get(name, "BF16"), shape) for name, shape in shapes.items()]
    header, _ = make_header(tensors)
    with (directory / "model.safetensors").open("wb") as stream:
        stream.write(header)
        stream.truncate(len(header) + sum(tensor_bytes(one.dtype, one.shape) for one in tensors))
    (directory / "config.json").write_text(json.dumps({"model_type": model_type, **config}))
    return open_directory(directory)


def plain(contents: Contents, scaling: Scaling = BLOCK_128) -> list[str]:
    return list(choose_targets(contents, scaling).plain_modules)


def header_of(plan: Conversion) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {one.name: (one.dtype, one.shape) for shard in plan.shards for one in shard.tensors}


R1_PLAIN = [
    "lm_head",
    "model.layers.3.mlp.gate",
    "model.layers.61.eh_proj",
    "model.layers.61.mlp.gate",
    "model.layers.61.shared_head.head",
]


def test_deepseek_r1(tmp_path: Path) -> None:
    contents = contents_of(tmp_path, deepseek_r1(), "deepseek_v3", num_hidden_layers=61)
    targets = choose_targets(contents, BLOCK_128)
    linears = {name for name, shape in deepseek_r1().items() if len(shape) == 2 and name.endswith("_proj.weight")}
    linears |= {name for name in deepseek_r1() if name.endswith("kv_a_proj_with_mqa.weight")}
    assert targets.quantised == linears - {"model.layers.61.eh_proj.weight"}
    assert list(targets.plain_modules) == R1_PLAIN
    made = header_of(plan_fp8(contents, BLOCK_128))
    kv_a = "model.layers.61.self_attn.kv_a_proj_with_mqa.weight"
    assert made[kv_a] == ("F8_E4M3", (576, 7168))
    assert made[f"{kv_a}_scale_inv"] == ("F32", (5, 56))
    assert made["model.layers.3.mlp.gate.e_score_correction_bias"] == ("BF16", (2,))


def test_glm_47(tmp_path: Path) -> None:
    contents = contents_of(tmp_path, glm_47(), "glm4_moe", num_hidden_layers=92)
    targets = choose_targets(contents, CHANNEL)
    assert targets.quantised == {
        name for name, shape in glm_47().items() if name.endswith("_proj.weight") and "eh_proj" not in name
    }
    assert list(targets.plain_modules) == [
        "lm_head",
        "model.layers.3.mlp.gate",
        "model.layers.92.eh_proj",
        "model.layers.92.mlp.gate",
        "model.layers.92.shared_head.head",
    ]
    made = header_of(plan_fp8(contents, CHANNEL))
    assert made["model.layers.3.mlp.experts.1.down_proj.weight_scale"] == ("F32", (5120, 1))
    made = header_of(plan_fp8(contents, TENSOR))
    assert made["model.layers.3.mlp.experts.1.down_proj.weight_scale"] == ("F32", (1,))


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_dense_families_and_a_head_that_is_the_embedding(tmp_path: Path, model_type: str) -> None:
    shapes = {**gqa("model.layers.10", 1024, 16, 8), **mlp("model.layers.10.mlp", 1024, 3072)}
    contents = contents_of(tmp_path, {**shapes, "model.embed_tokens.weight": (151936, 1024)}, model_type)
    targets = choose_targets(contents, BLOCK_128)
    assert targets.quantised == {name for name in shapes if name.endswith("_proj.weight")}
    assert list(targets.plain_modules) == ["lm_head"]


def test_what_is_not_in_the_table_stays_and_is_named(tmp_path: Path) -> None:
    shapes = {
        **moe("model.layers.0", 256, 128),
        "model.layers.0.mlp.shared_expert_gate.weight": (128, 256),
        "model.layers.0.self_attn.indexer.weight": (128, 256),
        "visual.blocks.0.mlp.up_proj.weight": (128, 256),
    }
    targets = choose_targets(contents_of(tmp_path, shapes, "qwen3_moe"), BLOCK_128)
    assert targets.quantised == {name for e in range(2) for name in mlp(f"model.layers.0.mlp.experts.{e}", 1, 1)}
    assert list(targets.plain_modules) == [
        "lm_head",
        "model.layers.0.mlp.gate",
        "model.layers.0.mlp.shared_expert_gate",
        *(f"model.layers.0.mlp.shared_experts.{name}" for name in sorted(MLP)),
        "model.layers.0.self_attn.indexer",
        "visual.blocks.0.mlp.up_proj",
    ]


def test_what_the_source_excludes_stays_with_all_that_vllm_merges_it_with(tmp_path: Path) -> None:
    shapes = {
        name: shape
        for layer in ("model.layers.1", "model.layers.11")
        for name, shape in {**gqa(layer, 256, 2, 2), **moe(layer, 256, 128)}.items()
    }
    excluded = ["model.layers.1.self_attn.k_proj", "re:.*layers.11.mlp.experts.0.up_proj", "down_proj.nowhere"]
    quantization = {"quant_method": "fp8", "modules_to_not_convert": excluded}
    contents = contents_of(tmp_path, shapes, "glm4_moe", quantization_config=quantization)
    assert plain(contents) == [
        "lm_head",
        "model.layers.1.mlp.gate",
        *(f"model.layers.1.self_attn.{name}" for name in ("k_proj", "q_proj", "v_proj")),
        *(f"model.layers.11.mlp.experts.{e}.{name}" for e in range(2) for name in sorted(MLP)),
        "model.layers.11.mlp.gate",
    ]


@pytest.mark.parametrize("listed", ["model.layers.1", "mlp.down_proj", "model.layers.1.mlp.down_proj"])
def test_a_part_of_a_name_excludes_at_dots_alone(tmp_path: Path, listed: str) -> None:
    shapes = {**mlp("model.layers.1.mlp", 256, 128), **mlp("model.layers.12.mlp", 256, 128)}
    quantization = {"quant_method": "fp8", "modules_to_not_convert": [listed, "own_proj", "layers.1.ml"]}
    found = plain(contents_of(tmp_path, shapes, "llama", quantization_config=quantization))
    assert ("model.layers.1.mlp.down_proj" in found) and ("model.layers.1.mlp.up_proj" in found) == (
        listed == "model.layers.1"
    )
    assert ("model.layers.12.mlp.down_proj" in found) == (listed == "mlp.down_proj")


def test_blocks_that_vllm_cannot_load_are_left_plain(tmp_path: Path) -> None:
    """Ragged columns; a ragged block before another part of a merged layer; ragged experts."""
    shapes = {
        **gqa("model.layers.0", 256, 3, 1, dim=64),
        **mlp("model.layers.0.mlp", 256, 192),
        **gqa("model.layers.1", 256, 2, 2),
        **moe("model.layers.1", 256, 192),
    }
    shapes["model.layers.1.self_attn.v_proj.weight"] = (130, 256)
    contents = contents_of(tmp_path, shapes, "glm4_moe")
    assert choose_targets(contents, BLOCK_128).quantised == {
        f"model.layers.1.self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj")
    }
    assert choose_targets(contents, Scaling(64, 64)).quantised == choose_targets(contents, CHANNEL).quantised
    linears = {name for name in shapes if name.endswith("_proj.weight")}
    assert choose_targets(contents, CHANNEL).quantised == choose_targets(contents, TENSOR).quantised == linears


@pytest.mark.parametrize("model_type", ["deepseek_v3", "qwen3", "llama", "glm4_moe"])
def test_an_engine_is_told_what_a_converted_checkpoint_says(tmp_path: Path, model_type: str) -> None:
    shapes = deepseek_r1() if model_type == "deepseek_v3" else glm_47()
    shapes["model.layers.0.self_attn.o_proj.weight"] = (5120, 12300)
    plan = plan_fp8(contents_of(tmp_path, shapes, model_type), BLOCK_128)
    told = block_fp8_config(tmp_path)
    assert told == json.loads(plan.documents["config.json"])["quantization_config"]
    assert "model.layers.0.self_attn.o_proj" in told["modules_to_not_convert"]


@pytest.mark.parametrize("model_type", ["gpt_neox", None, 7])
def test_an_unknown_family_is_refused_with_the_known_ones(tmp_path: Path, model_type: object) -> None:
    with pytest.raises(CheckpointError) as caught:
        plan_fp8(contents_of(tmp_path, {"a.weight": (2, 2)}, model_type), BLOCK_128)
    assert "config.json: model_type" in str(caught.value) and all(name in str(caught.value) for name in FAMILIES)


def test_bf16_has_nothing_to_do_without_fp8(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no quantization_config"):
        plan_bf16(contents_of(tmp_path, {"a.weight": (2, 2)}, "llama"))


def test_vllm_reads_the_new_config_as_it_is_meant(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
    from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

    contents = contents_of(tmp_path, deepseek_r1(), "deepseek_v3", num_hidden_layers=61)
    merged = {"fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"], "gate_up_proj": ["gate_proj", "up_proj"]}
    layers = {
        "model.layers.3.self_attn.fused_qkv_a_proj": False,
        "model.layers.3.mlp.experts": False,
        "model.layers.61.mlp.shared_experts.gate_up_proj": False,
        "model.layers.3.mlp.gate": True,
        "model.layers.61.eh_proj": True,
        "lm_head": True,
    }
    section = json.loads(plan_fp8(contents, BLOCK_128).documents["config.json"])["quantization_config"]
    block = Fp8Config.from_config(section)
    assert block.weight_block_size == [128, 128] and block.activation_scheme == "dynamic"
    assert {name: is_layer_skipped(name, block.ignored_layers, merged) for name in layers} == layers
    section = json.loads(plan_fp8(contents, TENSOR).documents["config.json"])["quantization_config"]
    tensor = Fp8Config.from_config(section)
    assert tensor.weight_block_size is None and tensor.is_checkpoint_fp8_serialized
    assert {name: is_layer_skipped(name, tensor.ignored_layers, merged) for name in layers} == layers
    section = json.loads(plan_fp8(contents, CHANNEL).documents["config.json"])["quantization_config"]
    channel = CompressedTensorsConfig.from_config(section)
    scheme = channel.target_scheme_map["Linear"]
    assert scheme["weights"].strategy == "channel"
    assert CompressedTensorsConfig._is_fp8_w8a8(scheme["weights"], scheme["input_activations"])
    assert {name: should_ignore_layer(name, channel.ignore, merged) for name in layers} == layers


def test_experts_in_one_tensor_are_refused(tmp_path: Path) -> None:
    shapes = {**gqa("model.layers.0", 256, 2, 2), "model.layers.0.mlp.experts.gate_up_proj": (2, 256, 256)}
    with pytest.raises(CheckpointError, match=r"experts\.gate_up_proj \[2, 256, 256\] holds all experts"):
        choose_targets(contents_of(tmp_path, shapes, "qwen3_moe"), BLOCK_128)


def test_a_dtype_that_cannot_be_quantised_keeps_the_merged_layer_plain(tmp_path: Path) -> None:
    shapes = {**gqa("model.layers.0", 256, 2, 2), **moe("model.layers.0", 256, 128)}
    odd = {"model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.experts.1.gate_proj.weight"}
    dtypes = {name: "F64" if name in odd else "BF16" for name in shapes}
    contents = contents_of(tmp_path, shapes, "glm4_moe", dtypes=dtypes)
    assert choose_targets(contents, BLOCK_128).quantised == {
        "model.layers.0.self_attn.o_proj.weight",
        *(f"model.layers.0.mlp.shared_experts.{name}.weight" for name in MLP),
    }


@pytest.mark.parametrize(
    ("shapes", "why"), [(mlp("model.layers.0.mlp", 100, 100), "128x128 do not fit"), ({}, "no linear")]
)
def test_a_conversion_that_would_quantise_nothing_is_refused(tmp_path: Path, shapes: Shapes, why: str) -> None:
    shapes = {"model.norm.weight": (100,), **shapes}
    with pytest.raises(CheckpointError, match=why):
        choose_targets(contents_of(tmp_path, shapes, "llama"), BLOCK_128)


def test_linear_layers_that_stay_are_told(tmp_path: Path) -> None:
    shapes = {**gqa("model.layers.0", 256, 2, 2), **mlp("model.layers.0.mlp", 256, 192)}
    targets = choose_targets(contents_of(tmp_path, shapes, "llama"), BLOCK_128)
    assert targets.left_out == tuple(f"model.layers.0.mlp.{name}.weight" for name in sorted(MLP))
