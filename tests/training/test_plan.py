"""The plan of a large run, from the config's own counts."""

from itertools import pairwise
from pathlib import Path

import pytest

from allyouneed.training.planning.plan import GPUS, SIZES, largest_unit, model_of, plan, table

PAGE = Path(__file__).parent.parent.parent / "docs" / "scaling.md"


def test_the_docs_page_matches_the_plan():
    assert "\n".join(table()) in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("size", SIZES)
def test_flops_are_close_to_6ND(size: str):
    model = model_of(size)
    plans = [plan(model, gpus) for gpus in GPUS]
    assert float(size.removesuffix("B")) * 0.9 < plans[0].parameters / 1e9 < float(size.removesuffix("B")) * 1.1
    for one in plans:
        assert one.flops == pytest.approx(one.rule, rel=0.1)
        assert one.parameters == model.cost().parameters and largest_unit(model) < one.parameters / 4
    assert [a.seconds >= 7 * b.seconds for a, b in pairwise(plans)] == [True, True]


def test_the_simplest_layout_that_fits_is_chosen():
    assert plan(model_of("1B"), 8).kind == "ddp" and plan(model_of("7B"), 8).kind == "fsdp"
    tight = plan(model_of("70B"), 8)
    assert tight.checkpointed and not tight.fits and plan(model_of("70B"), 64).fits
