"""lab/mixer_sizes.py: mixers that are compared have as many weights as attention, or their row says why
not."""

import itertools
import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from allyouneed.config import parse
from allyouneed.nn.models.base import Model
from allyouneed.nn.sublayer import Mixer

ROOT = str(Path(__file__).parents[2])


@pytest.fixture(autouse=True)
def paths(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "bench"]:
        del sys.modules[name]


@pytest.mark.parametrize("place", ["gpu", "cpu"])
def test_weights_are_those_of_attention_or_the_row_says_why_not(place):
    from allyouneed.lab import mixer_sizes as family_sizes

    sizes = family_sizes.SkeletonSizes() if place == "gpu" else family_sizes.CPU
    found = {name: family_sizes.ratios(sizes, keys)[0] for name, keys in family_sizes.settings(sizes).items()}
    other = {name: ratio for name, ratio in found.items() if abs(ratio - 1) > family_sizes.EQUAL}
    assert set(other) == set(family_sizes.UNEQUAL), other


def test_every_mixer_that_decodes_has_sizes():
    from allyouneed.lab import mixer_sizes as family_sizes

    found = {mixer["kind"] for mixer in family_sizes.mixers(family_sizes.TINY).values()}
    assert set(Mixer.registry) == found | family_sizes.OTHERS
    assert not found & family_sizes.OTHERS


def test_the_ratios_are_those_of_the_built_models():
    from allyouneed.lab import mixer_sizes as family_sizes

    sizes, models = family_sizes.TINY, family_sizes.variants(family_sizes.TINY)
    for name in ("retention", "mamba2", "gau", "grouped-queries", "yoco"):
        counts = [sum(p.numel() for p in parse(Model, models[one]).build().parameters()) for one in (name, "attention")]
        assert family_sizes.ratios(sizes, models[name])[1] == pytest.approx(counts[0] / counts[1], rel=1e-6)


def test_a_page_gets_what_stands_between_its_marks(tmp_path):
    from bench.family_speed import page as family_page

    page = tmp_path / "page.md"
    page.write_text("before\n\n<!-- one -->\nold\n<!-- /one -->\n\nafter\n", "utf-8")
    for _ in range(2):  # again changes nothing
        family_page.fill(page, {"one": "| new |"})
        assert page.read_text("utf-8") == "before\n\n<!-- one -->\n\n| new |\n\n<!-- /one -->\n\nafter\n"
    with pytest.raises(SystemExit, match="two"):
        family_page.fill(page, {"two": "x"})
    found = {"attention": {1024: 900.0, 4096: 300.0}, "rwkv": {1024: 800.0}}
    table = family_page.curve_table(found, "tokens/s", {"attention": {4096: " (3 rows)"}})
    assert table.splitlines()[0] == "| tokens/s | 1k | 4k |"
    assert table.splitlines()[2:] == ["| attention | 900 | 300 (3 rows) |", "| rwkv | 800 | – |"]


def test_names_of_lines_keep_their_order_and_distance():
    from bench.family_speed import page as family_page

    wanted = [0.1, 0.5, 0.5, 0.51, 0.97, 1.0]
    found = family_page.spread(wanted, 0.04)
    assert all(after - before > 0.04 - 1e-9 for before, after in itertools.pairwise(found))
    assert found[0] == wanted[0] and found[2] == pytest.approx(sum(wanted[1:4]) / 3) and found[-1] <= 1


def test_rows_of_several_runs_are_compared_with_the_attention_of_their_own(tmp_path):
    pytest.importorskip("matplotlib")
    from allyouneed.lab import mixer_sizes as family_sizes
    from bench.family_speed import page as family_page

    def run(file, **speeds):
        kept = {"b64 state bytes": 2, "b64 state declared": 2, "captured": True, "b1 share": 0.2, "b64 share": 0.3}
        found = {name: kept | {"b1": speed, "b64": 10 * speed} for name, speed in speeds.items()}
        found["peer mla"] = {"b1": 100.0, "b1 ours": 450.0, "b64": 1000.0, "b64 ours": 2000.0}
        for name, speed in speeds.items():
            found[name] |= {
                "long": speed,
                "by context": {"32768": speed, "65536": speed / 2},
                "long rows": {"65536": 9},
            }
        path = tmp_path / file
        path.write_text(json.dumps({"sizes": asdict(family_sizes.SkeletonSizes()), "results": found}), "utf-8")
        return path

    files = [run("one.json", attention=1000.0, rwkv=600.0), run("two.json", attention=2000.0, lstm=3000.0)]
    page = tmp_path / "page.md"
    page.write_text("".join(f"<!-- gpu-{n} -->\n<!-- /gpu-{n} -->\n" for n in ("mixers", "long", "peers")), "utf-8")
    family_page.write_gpu(files, page)
    text = page.read_text("utf-8")
    assert "| attention | 2,000 | 1.00 | 20,000 | 1.00 | 20% | 30% | 1.00 | 1.00 / 1.00 |" in text
    assert "| rwkv | 600 | 0.60 ↓ | 6,000 | 0.60 ↓ |" in text and "| lstm ¹ | 3,000 | 1.50 | 30,000 | 1.50 |" in text
    assert "| rwkv | 600 | 300 (9 rows) | 0.6 |" in text and "lstm (four gates" in text
    assert "DeepSeek-V2 of Hugging Face, static cache, compiled | 100 | 450 | 4.5 | 1,000 | 2,000 | 2.0 |" in text
    assert (tmp_path / "family-speed-gpu.svg").stat().st_size > 1000
