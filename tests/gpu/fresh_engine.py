"""A vLLM that knows nothing of weight updates: starts from a checkpoint, answers greedily, and is gone.

As a program: `python -m tests.gpu.fresh_engine CHECKPOINT PROMPTS MAX_TOKENS OUT`, JSON lists of token ids.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from demo.warm_start import Recipe, warm_start
from services.weight_sync.checkpoints.convert import convert
from services.weight_sync.checkpoints.plan import plan_fp8
from services.weight_sync.checkpoints.weights import open_directory
from services.weight_sync.layout import BLOCK_128, Scaling

Tokens = list[list[int]]
KV_CACHE_BYTES = 1 << 30
START_S = 240.0


def demo_model(folder: Path) -> Path:
    """The demo's warm start: what FLOTILLA_DEMO_MODEL names, else `folder`/model, which takes minutes to make."""
    model = Path(os.environ.get("FLOTILLA_DEMO_MODEL") or folder / "model").resolve()
    if not model.exists():
        warm_start(model, Recipe(), lambda _stage, _step: None)
    return model


def write_bf16_checkpoint(source: Path, target: Path) -> None:
    """The same checkpoint in bfloat16, as a trainer holds it."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def write_fp8_checkpoint(source: Path, target: Path, scaling: Scaling = BLOCK_128) -> None:
    """What `flotilla convert hf-to-fp8` makes of a checkpoint."""
    convert(plan_fp8(open_directory(source), scaling), target, 1, lambda _: None)


def start_greedy(checkpoint: Path, prompts: Tokens, max_tokens: int, gpu: int) -> subprocess.Popen[bytes]:
    """Start answering; `greedy_answers` waits for it."""
    asked, out = checkpoint / "asked.json", checkpoint / "answers.json"
    asked.write_text(json.dumps(prompts))
    argv = [sys.executable, "-m", "tests.gpu.fresh_engine", str(checkpoint), str(asked), str(max_tokens), str(out)]
    with (checkpoint / "engine.log").open("wb") as log:
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu)}
        return subprocess.Popen(argv, env=environment, stdout=log, stderr=log)


def greedy_answers(checkpoint: Path, process: subprocess.Popen[bytes]) -> Tokens:
    """Greedy continuations of the prompts, up to the end of sequence, which they include."""
    try:
        code = process.wait(START_S)
    finally:
        process.kill()
    assert code == 0, (checkpoint / "engine.log").read_text()[-3000:]
    return json.loads((checkpoint / "answers.json").read_text())


def main(checkpoint: str, asked: str, max_tokens: str, out: str) -> None:
    from vllm import LLM, SamplingParams

    engine = LLM(
        checkpoint,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=256,
        gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        skip_tokenizer_init=True,
    )
    end = json.loads((Path(checkpoint) / "config.json").read_text())["eos_token_id"]
    sampling = SamplingParams(temperature=0, max_tokens=int(max_tokens), stop_token_ids=[end], detokenize=False)
    prompts: Any = [{"prompt_token_ids": one} for one in json.loads(Path(asked).read_text())]
    answers = engine.generate(prompts, sampling, use_tqdm=False)
    Path(out).write_text(json.dumps([list(one.outputs[0].token_ids) for one in answers]))


if __name__ == "__main__":
    main(*sys.argv[1:])
