"""A process that hangs is noticed and named; the others wait for one that works alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml

from micro_run import Make
from processes import stop_one


def test_a_stopped_process_is_noticed_and_named(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(make().resolved()))
    with ThreadPoolExecutor() as pool:  # the runs mostly wait
        second = pool.submit(stop_one, path, 4, stopped=2, during="update 2")
        of_two = pool.submit(stop_one, path, 2, stopped=1, during="update 2")
        main = pool.submit(stop_one, path, 4, stopped=0, during="validation")
    for rank, report in second.result().items():
        assert "waited 0.1 minutes in update 2, but process 2 does not answer" in report, report
        others = ", ".join(f"{other} in update 2" for other in (0, 1, 3) if other != rank)
        assert f"(also waiting: {others})" in report, report
    assert "in update 2, but process 1 does not answer" in of_two.result()[0]
    for report in main.result().values():
        assert "in validation, but process 0 does not answer" in report, report
