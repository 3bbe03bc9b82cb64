"""Asking a server about one item; runs in workers, which are killed at their deadline."""

from __future__ import annotations

import json
import math
import urllib.request
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit

from services.common.spec import MAX_CUSTOM_TIMEOUT_S
from services.reward.verdicts import Graded, Item, Reason, Verdict

MAX_ANSWER_BYTES = 1 << 20
MAX_SAID_BYTES = 300
"""Of an error's body, kept for the log."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an error: it would turn the POST into a GET without the item."""

    def redirect_request(self, *_: Any, **__: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """None: go nowhere."""


def post(url: str, item: Item) -> Any:
    """What a server answers to a POST of JSON {prompt, response, label, metadata}. Raises OSError and ValueError.

    Proxies that the environment names are not asked: graders stand in the cluster.
    """
    about = {name: getattr(item, name) for name in ("prompt", "response", "label", "metadata")}
    body = json.dumps(about).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})  # noqa: S310  a run spec allows http(s) only
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())
    try:
        with opener.open(request, timeout=MAX_CUSTOM_TIMEOUT_S) as answer:
            return json.loads(answer.read(MAX_ANSWER_BYTES))
    except HTTPError as error:
        said = error.read(MAX_SAID_BYTES).decode(errors="replace")
        raise ValueError(f"{error.code} {error.reason}: {said}") from None


def ask_service(url: str, item: Item) -> Graded:
    """The verdict of a service that speaks flotilla.reward.v1, at `grpc://host:port/grader`. Raises OSError."""
    import grpc  # here, because it must not be used before the fork

    from flotilla.reward.v1 import reward_pb2 as pb
    from flotilla.reward.v1 import reward_pb2_grpc as pb_grpc
    from services.common.rpc import CHANNEL_OPTIONS

    where = urlsplit(url)
    asked = pb.GradeItem(
        response=item.response,
        label=item.label,
        truncated=item.truncated,
        metadata=json.dumps(dict(item.metadata)),
        prompt=item.prompt,
        group_id=item.group_id,
    )
    request = pb.GradeRequest(grader=where.path.strip("/"), items=[asked])
    with grpc.insecure_channel(where.netloc, options=CHANNEL_OPTIONS) as channel:
        try:
            (found,) = pb_grpc.RewardServiceStub(channel).Grade(request, timeout=MAX_CUSTOM_TIMEOUT_S).items
        except grpc.RpcError as error:
            assert isinstance(error, grpc.Call)
            raise OSError(f"{error.code().name}: {error.details()}") from None
    verdict = Verdict[pb.Verdict.Name(found.verdict).removeprefix("VERDICT_")]
    reason = Reason[pb.VerdictReason.Name(found.reason).removeprefix("VERDICT_REASON_")]
    if verdict is Verdict.SCORED and not math.isfinite(found.value):
        raise ValueError(f"the reward is {found.value}")
    return Graded(verdict, reason, value=found.value if verdict is Verdict.SCORED else None)
