"""How long a run takes to get over the kill -9 of each of its processes, and whether the laws hold afterwards.

`python -m benchmarks.chaos --seed 1` prints a Markdown table. The run is that of tests/chaos: real Redis, vLLM and
Megatron-core on this machine, a tiny random model, 24 rollout steps.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from random import Random

from tests.chaos.laws import check_all
from tests.chaos.rounds import END_S, as_table, kill_each_once
from tests.chaos.stack import make_case, running


def main() -> None:
    """Kill each process once, print what it cost, check the laws."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="order and moments of the kills")
    seed = parser.parse_args().seed
    with tempfile.TemporaryDirectory() as folder:
        case = make_case(Path(folder), num_rollout=24, save_interval=3)
        with running(case) as stack:
            print(as_table(kill_each_once(stack, Random(seed))))
            assert stack.process.wait(END_S) == 0, stack.output.read_text()
            check_all(stack)
    print("\nconservation law, one commit for every batch, equal digests, nothing left behind: all hold")


if __name__ == "__main__":
    main()
