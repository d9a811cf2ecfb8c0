"""`logits` and `hidden` of every preset: inputs by name, of unequal lengths, batched or alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import allyouneed as ayn
from allyouneed.config import preset_names
from allyouneed.errors import UserError
from allyouneed.infer.predictors.forward import INPUTS, NamedForward, model_inputs
from shrink import shrink

LENGTHS = (7, 3, 5)


def inputs(config: Any, number: int | None = None) -> dict[str, Any]:
    """A value for each input of a model; for one text only if its `number` is given."""
    dice = torch.Generator().manual_seed(0)
    found: dict[str, Any] = {}
    accepted = model_inputs(config)
    if "tokens" in accepted:
        found["tokens"] = [torch.randint(1, 40, (n,), generator=dice).tolist() for n in LENGTHS]
    if "targets" in accepted and config.kind == "encoder-decoder":
        found["targets"] = [torch.randint(1, 40, (n,), generator=dice).tolist() for n in reversed(LENGTHS)]
    if "types" in accepted:
        kinds = config.embed.types or 2
        found["types"] = [[n % kinds for n in range(length)] for length in LENGTHS]
    if "global_positions" in accepted:
        found["global_positions"] = [[0], [], [2, 4]]
    if "order" in accepted:
        found["order"] = [[n % 3 for n in range(length)] for length in LENGTHS]
        found["targets"] = [[1], [2, 1], []]
    if "pixels" in accepted:
        reader = config.image if config.kind == "two-towers" else config
        embed = getattr(reader, "source_embed", None) or reader.embed
        found["pixels"] = torch.randn(3, embed.channels, 12, 12, generator=dice)
    if "features" in accepted:
        embed = getattr(config, "source_embed", None) or config.embed
        channels, step = (1, 320) if embed.kind == "waveform" else (embed.mels, 1)
        found["features"] = [torch.randn(channels, n * step, generator=dice) for n in (24, 16, 20)]
    assert set(found) == set(accepted) - {"lengths"}
    if number is not None:
        found = {name: value[number : number + 1] for name, value in found.items()}
    return found


@pytest.mark.parametrize("name", preset_names())
def test_a_batch_gives_what_each_text_gives_alone(name: str) -> None:
    torch.manual_seed(0)
    config: Any = shrink(ayn.model_config(name))
    call = NamedForward(config.build().eval())
    together = call.logits(inputs(config))
    assert together.isfinite().all() and not together.requires_grad
    for number in range(len(LENGTHS)):
        alone = call.logits(inputs(config, number))
        if config.kind == "two-towers":
            found = together[number : number + 1, number : number + 1]
        elif alone.dim() <= 2:
            found = together[number : number + 1]
        else:
            found = together[number : number + 1, : alone.shape[1]]
        torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", preset_names())
def test_the_last_layer_is_the_input_of_the_head(name: str) -> None:
    torch.manual_seed(0)
    config: Any = shrink(ayn.model_config(name))
    call = NamedForward(config.build().eval())
    given = inputs(config)
    if config.kind == "two-towers":
        given = {"pixels": given["pixels"]}
    last = call.hidden(given)
    assert last.shape[0] == len(LENGTHS) and last.dim() == 3 and last.isfinite().all()
    try:
        layers = call.hidden(given, "all")
    except UserError as error:
        assert "only the last layer is available" in str(error) and name in (
            "residual",
            "reformer",
            "universal-transformer",
            "rmt",
        )
        return
    assert len(layers) > 1 and torch.equal(layers[-1], last)
    assert all(layer.shape[:2] == last.shape[:2] for layer in layers)
    assert not torch.equal(layers[0], layers[1])


def test_every_input_is_described() -> None:
    named = {name for preset in preset_names() for name in model_inputs(ayn.model_config(preset))}
    assert named == set(INPUTS)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tokens": [[5, 1]], "targets": [[0], [0]]}, "targets: 2 rows for 1 sources"),
        ({"tokens": [[5, 1], [4]], "targets": [[0]]}, "targets: 1 rows for 2 sources"),
        ({"tokens": [[1.5]], "targets": [[0]]}, "tokens: token ids"),
    ],
)
def test_mismatched_rows_are_refused(given: dict[str, Any], said: str) -> None:
    config: Any = shrink(ayn.model_config("transformer-base"))
    with pytest.raises(UserError, match=said):
        NamedForward(config.build().eval()).logits(given)


def test_an_empty_sound_is_refused() -> None:
    config: Any = shrink(ayn.model_config("whisper-tiny"))
    with pytest.raises(UserError, match="the input is empty"):
        NamedForward(config.build().eval()).logits(
            {"features": [torch.rand(config.source_embed.mels, 0)], "targets": [[0]]}
        )
