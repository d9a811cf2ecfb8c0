"""How many examples a property test draws: few in `make test`, more in `make test-all`."""

import os

from hypothesis import Phase, settings

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") in ("thorough", "search")


def examples(few: int, thorough: int) -> settings:
    return settings(max_examples=thorough if THOROUGH else few)


def explicit(thorough: int) -> settings:
    """`make test` runs the `@example`s of a test that has hundreds of cases; `make test-all` draws others as well."""
    return settings(max_examples=thorough) if THOROUGH else settings(phases=[Phase.explicit])
