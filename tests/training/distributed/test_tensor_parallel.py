"""Tensor parallelism: the same run, and checkpoints that any number of processes can resume."""

from pathlib import Path
from typing import Any

import pytest
from test_data_parallel import assert_same_run, run

from allyouneed.config import parse
from allyouneed.errors import UserError
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.weights import meta_model
from allyouneed.training import train
from allyouneed.training.distributed.tensor_parallel import row_orders
from micro_run import MODEL, Make

GROUPED = {"kind": "attention", "heads": 4, "kv_heads": 2, "positions": "rotary", "qk_norm": "rms", "bias": False}
GATED = {"kind": "glu", "hidden": 24}
PLAIN = {"kind": "ffn", "hidden": 32}
SPLIT: dict[str, Any] = MODEL | {
    "dropout": 0.0,
    "encoder": [{"mixer": GROUPED, "channel": GATED}],
    "decoder": [
        {
            "wiring": "pre-norm",
            "mixer": {"kind": "attention", "heads": 4, "pattern": "causal"},
            "cross": {"kind": "attention", "heads": 4, "kv_heads": 2},
            "channel": PLAIN,
        }
    ],
}


def test_two_tensor_parallel_processes_equal_one(make: Make, tmp_path: Path):
    """With dropout, which those who read the same rows draw alike."""
    recipe = make(valid=True, model=SPLIT | {"dropout": 0.1}, steps=8, accumulate=2)
    one = run(recipe, tmp_path / "one", 1)
    assert_same_run(one, run(recipe, tmp_path / "two", 2, "parallel.tensor=2"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_four_processes_are_two_groups_of_two(make: Make, tmp_path: Path, kind: str):
    recipe = make(valid=True, model=SPLIT, steps=8, accumulate=2, checkpoint_activations=kind == "fsdp")
    one = run(recipe, tmp_path / "one", 1)
    assert_same_run(one, run(recipe, tmp_path / "four", 4, f"parallel={{kind: {kind}, tensor: 2}}"))


@pytest.mark.slow
def test_split_in_two_then_whole_then_two_groups_of_two(make: Make, tmp_path: Path):
    recipe = make(model=SPLIT, steps=9)
    straight = run(recipe, tmp_path / "straight", 1)
    changed = run(recipe, tmp_path / "changed", 2, "parallel.tensor=2", "steps=3")
    assert (changed / "checkpoints" / "step-00000003" / "training" / "shards" / "layout.json").exists()
    run(recipe, changed, 1, "steps=6")
    run(recipe, changed, 4, "parallel={kind: fsdp, tensor: 2}")
    assert_same_run(straight, changed)


# --- without starting any -------------------------------------------------------------------------------------------


def test_each_process_has_whole_heads_of_queries_keys_and_values():
    model = meta_model(parse(Model, SPLIT | {"vocab": 9}))  # type: ignore[type-abstract]
    orders = row_orders(model, 2)
    of_one = [*range(8), *range(16, 20), *range(24, 28)]  # two heads of four queries, one of two keys and values
    assert orders["encoder.blocks.0.sublayers.mixer.qkv.weight"].tolist() == of_one + [
        n + (8 if n < 16 else 4) for n in of_one
    ]
    gates = [*range(12), *range(24, 36), *range(12, 24), *range(36, 48)]
    assert orders["encoder.blocks.0.sublayers.channel.gate_up.weight"].tolist() == gates
    assert "decoder.blocks.0.sublayers.mixer.qkv.bias" in orders and not row_orders(model, 1)


CAUSAL = {"kind": "attention", "heads": 4, "pattern": "causal"}


@pytest.mark.parametrize(
    ("slot", "part", "words"),
    [
        ("mixer", CAUSAL | {"heads": 1, "kv_heads": 1}, "model.decoder[0].mixer.heads: 1 cannot be split 2 ways"),
        ("mixer", CAUSAL | {"kv_heads": 1}, "model.decoder[0].mixer.kv_heads: 1 cannot be split"),
        ("mixer", CAUSAL | {"positions": "alibi"}, "model.decoder[0].mixer.positions: differ by head"),
        ("mixer", CAUSAL | {"scores": "additive"}, "model.decoder[0].mixer.scores: have weights across heads"),
        ("mixer", CAUSAL | {"sub_norm": "layer"}, "model.decoder[0].mixer.sub_norm: normalises across heads"),
        ("mixer", {"kind": "retention", "heads": 2}, "model.decoder[0].mixer: retention cannot be split"),
        ("channel", {"kind": "ffn", "hidden": 31}, "model.decoder[0].channel.hidden: 31 cannot be split"),
        ("channel", {"kind": "glu", "hidden": 32, "norm": True}, "model.decoder[0].channel.norm: normalises the whole"),
    ],
)
def test_parts_that_cannot_be_split_are_refused_by_name(
    make: Make, monkeypatch: pytest.MonkeyPatch, slot: str, part: Any, words: str
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = SPLIT | {"decoder": [SPLIT["decoder"][0] | {slot: part}]}
    with pytest.raises(UserError) as refused:
        train(make(model=model, parallel={"tensor": 2}))
    assert words in str(refused.value)


def test_ternary_maps_and_odd_numbers_of_processes_are_refused(make: Make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UserError) as refused:
        train(make(model=SPLIT | {"linear": "bit"}, parallel={"tensor": 2}))
    assert "parallel.tensor: 3 processes are not divisible by 2" in str(refused.value)
    assert "model.linear: bit cannot be split" in str(refused.value)
