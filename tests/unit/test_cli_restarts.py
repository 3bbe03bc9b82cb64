"""When a dead process is started again; pure, with invented times."""

from __future__ import annotations

from services.cli.restarts import GiveUp, RestartPolicy, StartAgain


def test_pauses_double_up_to_ten_seconds():
    policy = RestartPolicy()
    pauses = []
    for death in range(7):
        verdict = policy.died(death * 100.0, 5.0, -9, started=True)
        assert isinstance(verdict, StartAgain)
        pauses.append(verdict.pause_s)
    assert pauses == [0.5, 1, 2, 4, 8, 10, 10]


def test_a_long_life_starts_over():
    policy = RestartPolicy()
    for death in range(4):
        policy.died(death * 100.0, 1.0, 1, started=True)
    assert policy.died(1000.0, 30.0, 1, started=True) == StartAgain(0.5)


def test_bad_input_ends_the_run_at_once():
    verdict = RestartPolicy().died(0.0, 100.0, 2, started=True)
    assert isinstance(verdict, GiveUp) and "exit code 2" in verdict.why


def test_the_eighth_death_within_a_minute_ends_the_run():
    policy = RestartPolicy()
    verdicts = [policy.died(8.0 * death, 1.0, -11, started=True) for death in range(8)]
    assert all(isinstance(one, StartAgain) for one in verdicts[:7])
    assert isinstance(verdicts[7], GiveUp)
    assert "8 times within 60 s" in verdicts[7].why and "signal 11" in verdicts[7].why


def test_eight_deaths_spread_over_more_than_a_minute_do_not():
    policy = RestartPolicy()
    assert all(isinstance(policy.died(9.0 * death, 1.0, -9, started=True), StartAgain) for death in range(50))


def test_something_that_never_finishes_its_start_ends_the_run():
    policy = RestartPolicy()
    verdicts = [policy.died(100.0 * death, 90.0, 1, started=False) for death in range(5)]
    assert all(isinstance(one, StartAgain) for one in verdicts[:4])
    assert isinstance(verdicts[4], GiveUp) and "while starting" in verdicts[4].why


def test_one_good_start_clears_the_failed_ones():
    policy = RestartPolicy()
    for death in range(4):
        policy.died(100.0 * death, 5.0, 1, started=False)
    policy.died(500.0, 5.0, 1, started=True)
    assert isinstance(policy.died(600.0, 5.0, 1, started=False), StartAgain)
