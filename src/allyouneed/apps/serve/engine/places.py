"""The places of a model's queue, shared by its clients."""

from __future__ import annotations

from collections import Counter

from allyouneed.apps.serve.errors import ApiError

SHARE = 3  # a client may have this many times as many places as are still free for all


def refusal(limit: int, taken: Counter[str], client: str, count: int, what: str) -> ApiError | None:
    """Why a client, who has `taken[client]` of `limit` places, cannot have `count` more now; None: it can. The more
    clients there are, the less each may have, and there is always room for another (Choudhury and Hahne 1998, "Dynamic
    queue length thresholds"). `what` takes the places: "sequences"."""
    left, own = limit - taken.total(), taken[client]
    if count > left:
        there, most = f"{limit - left} {what} are running or waiting", f"the limit is {limit}"
    elif own + count > SHARE * left:
        there, most = f"{own} {what} of yours are running or waiting", f"your share is {SHARE * left} now"
    else:
        return None
    return ApiError(f"{there} and {count} are new, {most}; try again", 429, code="queue_full", retry_after=1)
