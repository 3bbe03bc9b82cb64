"""When a process that died is started again, and when the run ends instead. No clock and no processes in here."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.common.service import EXIT_BAD_INPUT

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0
HEALTHY_LIFE_S = 30.0
"""A process that lived so long starts with the first pause again."""
MOST_DEATHS = 8
DEATHS_WINDOW_S = 60.0
MOST_FAILED_STARTS = 5
"""Deaths in a row before the start was over: something that takes a minute to load never dies 8 times in 60 s."""


@dataclass(frozen=True, slots=True)
class StartAgain:
    """Start the process after a pause."""

    pause_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End the run."""

    why: str


@dataclass(slots=True)
class RestartPolicy:
    """The memory of one process's deaths."""

    deaths: list[float] = field(default_factory=list)
    """Times in seconds, of the last window only."""
    failed_starts: int = 0
    pause_s: float = FIRST_PAUSE_S

    def died(self, now_s: float, lived_s: float, exit_code: int, *, started: bool) -> StartAgain | GiveUp:
        """What to do about a death.

        Args:
            now_s: Monotonic time in seconds.
            lived_s: How long the process lived.
            exit_code: As subprocess has it; negative for a signal.
            started: Whether it finished its start.
        """
        if exit_code == EXIT_BAD_INPUT:
            return GiveUp("it refused its input (exit code 2)")
        self.deaths = [at for at in self.deaths if now_s - at < DEATHS_WINDOW_S] + [now_s]
        if len(self.deaths) >= MOST_DEATHS:
            return GiveUp(
                f"it died {MOST_DEATHS} times within {DEATHS_WINDOW_S:.0f} s, last {describe_exit(exit_code)}"
            )
        self.failed_starts = 0 if started else self.failed_starts + 1
        if self.failed_starts >= MOST_FAILED_STARTS:
            return GiveUp(
                f"it died {MOST_FAILED_STARTS} times in a row while starting, last {describe_exit(exit_code)}"
            )
        if lived_s >= HEALTHY_LIFE_S:
            self.pause_s = FIRST_PAUSE_S
        pause_s, self.pause_s = self.pause_s, min(2 * self.pause_s, LONGEST_PAUSE_S)
        return StartAgain(pause_s)


def describe_exit(exit_code: int) -> str:
    """An exit code in words."""
    return f"by signal {-exit_code}" if exit_code < 0 else f"with exit code {exit_code}"
