"""What all tests share: few threads, little garbage collection, signals that are heard, property tests with the same
examples on every run."""

import gc
import os
import signal

import hypothesis
import pytest

hypothesis.settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    max_examples=20,
    database=None,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate, hypothesis.Phase.shrink],  # explaining takes minutes
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.differing_executors],
)
hypothesis.settings.register_profile("thorough", parent=hypothesis.settings.get_profile("ci"), max_examples=100)
hypothesis.settings.register_profile("search", parent=hypothesis.settings.get_profile("ci"), derandomize=False)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_configure(config: pytest.Config) -> None:
    """Not at import: the process that only hands out tests (`pytest -n`) does without torch, which takes seconds."""
    # A shell starts a background job with SIGINT ignored, and every process that a test starts would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("dist", "no") == "no":
        import torch

        import infer_fixtures
        from allyouneed import plugins

        torch.set_num_threads(1)  # xdist runs a worker per core; the sizes here are too small to share out
        config.pluginmanager.register(infer_fixtures)
        plugins.import_all_parts()  # tests are parametrized over every part there is
        gc.disable()  # until all tests are collected


def pytest_collection_finish() -> None:
    """Modules and tests stay until the end. To look for garbage among them again and again would take a seventh of the
    time of all tests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()
