"""What all tests share: few threads, and property tests that draw the same examples on every run."""

import os

import hypothesis
import torch

torch.set_num_threads(1)  # xdist runs a worker per core; the sizes here are too small to share out

hypothesis.settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    max_examples=20,
    database=None,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate, hypothesis.Phase.shrink],  # explaining takes minutes
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.differing_executors],
)
hypothesis.settings.register_profile("search", parent=hypothesis.settings.get_profile("ci"), derandomize=False)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

pytest_plugins = ["infer_fixtures"]
