"""`python -m services.trainer.sft --run SFT.toml`: supervised fine-tuning, one process for each rank.

Several ranks meet as the environment says: `torchrun --nproc-per-node 2 -m -- services.trainer.sft --run SFT.toml`.
"""

from __future__ import annotations

import sys

from services.common.errors import FailedPrecondition
from services.common.logs import get_logger, setup_logging
from services.common.service import EXIT_BAD_INPUT, load_spec_or_exit, service_parser
from services.common.spec import SpecError
from services.common.spec.sft import SftSpec, load_sft
from services.trainer.megatron import hush
from services.trainer.sft.run import train


def main(spec: SftSpec) -> int:
    """Train; returns the exit status, which is 2 if another start would not help."""
    setup_logging("sft", spec.run_id)
    hush()
    try:
        train(spec)
    except (SpecError, FailedPrecondition) as error:
        get_logger(__name__).error("the run cannot go on", error=str(error))
        return EXIT_BAD_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main(load_spec_or_exit(service_parser("trainer.sft").parse_args(), load_sft)))
