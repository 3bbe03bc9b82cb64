"""Updates of a real engine with the weights of a Qwen3 model, phase by phase.

    python -m benchmarks.gpu_weight_sync --gpus 2 --model 8b --out weight_sync.json

The real agent, coordinator and engine service, as processes; a stand-in for the trainer holds random bfloat16 weights
and shares them by CUDA IPC. With two GPUs trainer and agent are on the first and the engine on the second (NCCL), with
one all are on it (CUDA IPC). The first version is copied by the agent and encoded when it is sent; later ones are
encoded as they are read. Medians leave the first version out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from math import prod
from pathlib import Path
from typing import Any

from benchmarks.models import QWEN3
from benchmarks.records import need_gpus, table, write_record
from services.weight_sync.records import PolicyVersion
from tests.weight_sync_fleet import Fleet, Process, start

ENGINE = "services.rollout_gateway.engine"
ENGINE_START_S, PUBLISH_S = 420.0, 60.0
LOG_LINES = 60
BAR_GB_PER_S = 221.0
"""Of two H200: 60 % of what NCCL send and receive reach."""
ENGINE_ENVIRONMENT = {
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
Shapes = dict[str, tuple[int, ...]]
PHASES = ["write", "read_quantise", "connect", "wire", "load", "pause", "total"]


def shapes_of(config: dict[str, Any]) -> Shapes:
    """HF names and shapes of a Qwen3 model, sorted by name as an engine's manifest is."""
    hidden, ffn, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    layer: Shapes = {
        "input_layernorm": (hidden,),
        "mlp.down_proj": (hidden, ffn),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "post_attention_layernorm": (hidden,),
        "self_attn.k_norm": (head,),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (head,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.v_proj": (keys, hidden),
    }
    shapes: Shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for number in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return dict(sorted(shapes.items()))


def write_checkpoint(folder: Path, config: dict[str, Any], shapes: Shapes) -> None:
    """A checkpoint of zeros that takes no room on disk: the header of its safetensors file, and a hole."""
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)


async def measure(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """One row for each version."""
    config = QWEN3[args.model]
    shapes = shapes_of(config)
    write_checkpoint(folder, config, shapes)
    trainer_gpus, engine_gpus = visible(args)
    sections = {
        "weight_sync": {"quantization": "fp8_block_128" if args.dtype == "fp8" else "none"},
        "engine": {"gpu_memory_utilization": args.memory, "max_model_len": 4096, "max_num_seqs": 64},
    }
    os.environ.update({name: value for name, value in ENGINE_ENVIRONMENT.items() if name not in os.environ})
    async with Fleet(folder, shapes, trainer_gpus=trainer_gpus, engine_gpus=engine_gpus, **sections) as fleet:
        engine = await start(engine_gpus, ENGINE, "--run", str(fleet.run_file), log=folder / "engine.log")
        try:
            trainer = await fleet.trainer()
            await engine_ready(fleet, engine)
            return [await publish(fleet, trainer, step) for step in range(args.versions)]
        finally:
            await engine.end()


def visible(args: argparse.Namespace) -> tuple[str, str]:
    """CUDA_VISIBLE_DEVICES of trainer and engine."""
    if args.gpus == 1:
        return "0", "0"
    return ("0", "1") if args.visible == "own" else ("0,1", "1,0")


async def engine_ready(fleet: Fleet, engine: Process) -> None:
    """Wait until it has registered."""
    begun = time.monotonic()
    async with asyncio.timeout(ENGINE_START_S):
        while not fleet.gateway.engines:
            if engine.process.returncode is not None:
                raise RuntimeError(f"the engine ended with {engine.process.returncode}")
            await asyncio.sleep(0.1)
    print(f"engine started in {time.monotonic() - begun:.0f} s", flush=True)


async def publish(fleet: Fleet, trainer: Process, step: int) -> dict[str, Any]:
    """Publish a version and wait until it is live."""
    async with asyncio.timeout(PUBLISH_S):
        said = await trainer.ask(step)
        row = await fleet.until_live(PolicyVersion(1, step))
    return {**row, "write_seconds": said["write_seconds"], "publish_seconds": said["seconds"]}


def figures_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for each version, then the medians of those after the first; times in ms."""
    lines = [{phase: 1000 * row[f"{phase}_seconds"] for phase in PHASES} for row in rows]
    for line, row in zip(lines, rows, strict=True):
        line |= {"GB": row["wire_bytes"] / 1e9, "GB/s": row["wire_bytes"] / row["wire_seconds"] / 1e9}
    later = lines[1:] or lines
    lines.append({key: statistics.median(line[key] for line in later) for key in lines[0]})
    names = [*(f"{row['run_epoch']}/{row['step']}" for row in rows), "median"]
    return [{"version": name, **rename(line)} for name, line in zip(names, lines, strict=True)]


def rename(line: dict[str, float]) -> dict[str, float]:
    """With units."""
    return {f"{key} ms" if key in PHASES else key: value for key, value in line.items()}


def report(figures: list[dict[str, Any]], gpus: int) -> None:
    """Print the table, and whether the bar is reached."""
    print(table(figures))
    if gpus == 2:
        reached = figures[-1]["GB/s"] >= BAR_GB_PER_S
        print(f"bar: {BAR_GB_PER_S:.0f} GB/s on the wire, {'reached' if reached else 'missed'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, choices=[1, 2], default=2)
    parser.add_argument("--model", choices=sorted(QWEN3), default="8b")
    parser.add_argument(
        "--dtype", choices=["fp8", "bf16"], default="fp8", help="what travels and what the engine serves"
    )
    parser.add_argument("--versions", type=int, default=5)
    parser.add_argument("--memory", type=float, default=0.5, help="share of a GPU's memory for the engine")
    parser.add_argument("--visible", choices=["own", "all"], default="own", help="GPUs that each process sees")
    parser.add_argument("--out", type=Path, help="where to write the figures, as JSON")
    args = parser.parse_args()
    need_gpus(parser, args.gpus)
    with tempfile.TemporaryDirectory() as name:
        log = Path(name) / "engine.log"
        try:
            rows = asyncio.run(measure(args, Path(name)))
        except Exception:
            lines = log.read_text(errors="replace").splitlines() if log.exists() else ["the engine was not started"]
            print("\n".join(["--- last lines of the engine's log", *lines[-LOG_LINES:]]), file=sys.stderr, flush=True)
            raise
    figures = figures_of(rows)
    report(figures, args.gpus)
    if args.out:
        write_record(args.out, f"weight_sync_{args.model}_{args.dtype}_{args.gpus}_gpus", figures)


if __name__ == "__main__":
    main()
