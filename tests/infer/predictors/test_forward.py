"""`logits` and `hidden` of every preset: inputs by name, of unequal lengths, each as it would be alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import allyouneed as ayn
from allyouneed.config import preset_names
from allyouneed.errors import UserError
from allyouneed.infer.predictors.forward import MEANINGS, Called, takes
from shrink import shrink

LENGTHS = (7, 3, 5)


def inputs(config: Any, number: int | None = None) -> dict[str, Any]:
    """Something for each input of a model; of one text only, if its number is given."""
    dice = torch.Generator().manual_seed(0)
    found: dict[str, Any] = {}
    able = takes(config)
    if "tokens" in able:
        found["tokens"] = [torch.randint(1, 40, (n,), generator=dice).tolist() for n in LENGTHS]
    if "targets" in able and config.kind == "encoder-decoder":
        found["targets"] = [torch.randint(1, 40, (n,), generator=dice).tolist() for n in reversed(LENGTHS)]
    if "types" in able:
        kinds = config.embed.types or 2
        found["types"] = [[n % kinds for n in range(length)] for length in LENGTHS]
    if "global_positions" in able:
        found["global_positions"] = [[0], [], [2, 4]]
    if "order" in able:
        found["order"] = [[n % 3 for n in range(length)] for length in LENGTHS]
        found["targets"] = [[1], [2, 1], []]
    if "pixels" in able:
        embed = config.image.embed if config.kind == "two-towers" else config.embed
        found["pixels"] = torch.randn(3, embed.channels, 12, 12, generator=dice)
    if "features" in able:
        found["features"] = [torch.randn(config.source_embed.mels, n, generator=dice) for n in (24, 16, 20)]
    assert set(found) == set(able) - {"lengths"}
    if number is not None:
        found = {name: value[number : number + 1] for name, value in found.items()}
    return found


@pytest.mark.parametrize("name", preset_names())
def test_each_is_read_as_it_would_be_alone(name: str) -> None:
    torch.manual_seed(0)
    config: Any = shrink(ayn.model_config(name))
    call = Called(config.build().eval())
    together = call.logits(inputs(config))
    assert together.isfinite().all() and not together.requires_grad
    for number in range(len(LENGTHS)):
        alone = call.logits(inputs(config, number))
        if config.kind == "two-towers":
            found = together[number : number + 1, number : number + 1]
        elif alone.dim() == 2:
            found = together[number : number + 1]
        else:
            found = together[number : number + 1, : alone.shape[1]]
        torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", preset_names())
def test_the_last_layer_is_what_the_head_reads(name: str) -> None:
    torch.manual_seed(0)
    config: Any = shrink(ayn.model_config(name))
    call = Called(config.build().eval())
    given = inputs(config)
    if config.kind == "two-towers":
        given = {"pixels": given["pixels"]}
    last = call.hidden(given)
    assert last.shape[0] == len(LENGTHS) and last.dim() == 3 and last.isfinite().all()
    try:
        layers = call.hidden(given, "all")
    except UserError as error:
        assert "only the last are told" in str(error) and name in ("residual", "reformer", "universal-transformer")
        return
    assert len(layers) > 1 and torch.equal(layers[-1], last)
    assert all(layer.shape[:2] == last.shape[:2] for layer in layers)
    assert not torch.equal(layers[0], layers[1])


def test_every_input_has_a_meaning() -> None:
    named = {name for preset in preset_names() for name in takes(ayn.model_config(preset))}
    assert named == set(MEANINGS)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tokens": [[5, 1]], "targets": [[0], [0]]}, "targets: one row for each source; there are 2 and 1"),
        ({"tokens": [[5, 1], [4]], "targets": [[0]]}, "targets: one row for each source; there are 1 and 2"),
        ({"tokens": [[1.5]], "targets": [[0]]}, "tokens: token ids"),
    ],
)
def test_rows_that_do_not_belong_together_are_refused(given: dict[str, Any], said: str) -> None:
    config: Any = shrink(ayn.model_config("transformer-base"))
    with pytest.raises(UserError, match=said):
        Called(config.build().eval()).logits(given)


def test_a_sound_of_nothing_is_refused() -> None:
    config: Any = shrink(ayn.model_config("whisper-tiny"))
    with pytest.raises(UserError, match="nothing in what is given"):
        Called(config.build().eval()).logits({"features": [torch.rand(config.source_embed.mels, 0)], "targets": [[0]]})
