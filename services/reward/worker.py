"""What runs in a grader's process: one question at a time, as lines of JSON over a socket, within hard limits.

The parent keeps the deadline and kills. The limits here hold even if the parent cannot: memory, CPU time, and an end
with the end of the parent or of the socket.
"""

from __future__ import annotations

import json
import math
import resource
import signal
import socket
from dataclasses import asdict

from services.common.service import set_parent_death_signal
from services.reward.graders import GRADERS
from services.reward.verdicts import Question, Reason

MEMORY_BYTES = 2 << 30
"""Address space; the libraries take about a third of it."""


def work(sock: socket.socket, timeout_s: float) -> None:
    """Answer questions until the socket closes."""
    set_parent_death_signal(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service, which ends its workers
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    with sock, sock.makefile("rwb") as stream:
        for line in stream:
            _limit_cpu(timeout_s)
            stream.write(_answer(line))
            stream.flush()


def encode_question(grader: str, question: Question) -> bytes:
    """The line that asks a worker."""
    return json.dumps({"grader": grader, **asdict(question)}).encode() + b"\n"


def decode_answer(line: bytes) -> Reason:
    """The reason in a worker's answer; UNSPECIFIED if it ran out of memory."""
    return Reason(json.loads(line))


def _answer(line: bytes) -> bytes:
    content = json.loads(line)
    grader = GRADERS[content.pop("grader")]
    try:
        reason = grader.decide(Question(**content))
    except MemoryError:
        reason = Reason.UNSPECIFIED
    return json.dumps(reason.value).encode() + b"\n"


def _limit_cpu(timeout_s: float) -> None:
    """Let the kernel end the process soon after this question's deadline, counted in CPU time."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    limit_s = math.ceil(usage.ru_utime + usage.ru_stime + timeout_s) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, resource.RLIM_INFINITY))
