"""`python -m services.weight_sync.agent --run RUN.toml --rank 0`: the agent beside one trainer rank."""

from __future__ import annotations

from services.common.service import load_spec_or_exit, run_process, service_parser
from services.weight_sync.agent.service import setup_agent


def main() -> None:
    """Serve until a signal."""
    parser = service_parser("weight_sync.agent")
    parser.add_argument("--rank", type=int, default=0, help="the trainer rank that it serves")
    args = parser.parse_args()
    spec = load_spec_or_exit(args)
    agents = spec.services.weight_agents
    if not 0 <= args.rank < len(agents):
        parser.error(f"--rank {args.rank}: the run spec has {len(agents)} weight agents")
    run_process("weight_sync_agent", spec, setup_agent, agents[args.rank])


if __name__ == "__main__":
    main()
