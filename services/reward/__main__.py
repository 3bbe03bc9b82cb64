"""`python -m services.reward --run RUN.toml`."""

from __future__ import annotations

from services.common.service import run_service
from services.reward.servicer import set_up

if __name__ == "__main__":
    run_service("reward", set_up, lambda spec: spec.services.reward)
