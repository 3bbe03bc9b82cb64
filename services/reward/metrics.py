"""Counters of the reward service."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

ITEMS = Counter("flotilla_reward_items", "Items graded.", ["grader", "verdict", "reason"])
SECONDS = Histogram(
    "flotilla_reward_seconds",
    "Time of a question in workers.",
    buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 600.0),
)
QUEUE = Gauge("flotilla_reward_queue", "Items that wait for a worker or are in one.")
WORKER_REPLACEMENTS = Counter("flotilla_reward_worker_replacements", "Workers killed and replaced.", ["cause"])
QUESTIONS = Counter("flotilla_reward_questions", "Questions for workers, by what the cache holds of them.", ["cache"])
