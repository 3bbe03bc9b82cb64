"""One rank of several on gloo, as torchrun starts it: steps of supervised fine-tuning, without saving.

    RANK=.. WORLD_SIZE=.. MASTER_ADDR=.. MASTER_PORT=.. python -m tests.sft_ranks SFT.toml

Rank 0 leaves the metrics in the directory of the run.
"""

from __future__ import annotations

import sys
from pathlib import Path

from services.common.sft_spec import load_sft
from services.trainer import megatron
from services.trainer.model_config import read_config
from services.trainer.sft.data import load_data
from services.trainer.sft.run import SftRun


def main() -> None:
    spec = load_sft(Path(sys.argv[1]), environ={})
    model = read_config(spec.model.hf_checkpoint)
    data = load_data(spec.data, spec.model.hf_checkpoint, model.vocabulary)
    megatron.initialize(spec.trainer.seed, spec.parallel)
    SftRun(spec, model, data).train_steps()
    megatron.destroy()


if __name__ == "__main__":
    main()
