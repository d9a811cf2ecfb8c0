"""How many examples a property test draws: few in `make test`, more in `make test-all`."""

import os

from hypothesis import settings

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") in ("thorough", "search")


def examples(few: int, thorough: int) -> settings:
    return settings(max_examples=thorough if THOROUGH else few)
