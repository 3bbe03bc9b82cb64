"""`python -m services.rollout_gateway.engine --run RUN.toml --index 0`.

Runs `main` as the main module: multiprocessing imports a main module in the processes that it spawns, but never a
package's `__main__` (`_fixup_main_from_name` in multiprocessing/spawn.py), and vLLM's must learn to die with us.
"""

from __future__ import annotations

import runpy

if __name__ == "__main__":
    runpy.run_module(f"{__package__}.main", run_name="__main__", alter_sys=True)
