"""One way to call any model: `logits` and `hidden` with inputs by name give what theirs give, at unequal lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    CLIPConfig,
    CLIPModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LongformerConfig,
    LongformerForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
    XLNetConfig,
    XLNetLMHeadModel,
)

import allyouneed as ayn
import parity
from allyouneed.errors import UserError
from allyouneed.folder import Folder
from allyouneed.infer.predictors.forward import NamedForward, model_inputs

TEXTS = [[5, 7, 9, 3, 8, 4], [6, 2, 11], [10]]
LENGTHS = [6, 3, 1]
REAL = torch.arange(6)[None] < torch.tensor(LENGTHS)[:, None]
PADDED = torch.tensor([text + [0] * (6 - len(text)) for text in TEXTS])
SIZES = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40)
DRY = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def both(theirs: Any, folder: Path) -> tuple[Any, NamedForward]:
    parity.randomise(theirs.eval())
    return theirs, NamedForward(parity.ours(theirs, folder))


def near(found: torch.Tensor, expected: torch.Tensor, real: torch.Tensor | None = None) -> None:
    assert found.shape == expected.shape
    if real is not None:
        found, expected = found[real], expected[real]
    assert parity.difference(found, expected) < parity.TOLERANCE


def layers_are(call: NamedForward, inputs: dict[str, Any], expected: Any, real: torch.Tensor | None = None) -> None:
    found = call.hidden(inputs, "all")
    assert len(found) == len(expected)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        near(one, other, real)
        assert torch.equal(call.hidden(inputs, number), one)
    assert torch.equal(call.hidden(inputs, -1), call.hidden(inputs))


def test_an_encoder_with_types(tmp_path: Path) -> None:
    config = BertConfig(**SIZES, **DRY, vocab_size=31, max_position_embeddings=9, type_vocab_size=3)
    theirs, call = both(BertForMaskedLM(config), tmp_path)
    types = [[0, 0, 1, 1, 2, 2], [1, 0, 2], [2]]
    padded = torch.tensor([row + [0] * (6 - len(row)) for row in types])
    expected = theirs(PADDED, attention_mask=REAL.long(), token_type_ids=padded, output_hidden_states=True)
    near(call.logits({"tokens": TEXTS, "types": types}), expected.logits, REAL)
    near(call.logits({"tokens": PADDED, "lengths": LENGTHS, "types": padded}), expected.logits, REAL)
    layers_are(call, {"tokens": TEXTS, "types": types}, expected.hidden_states, REAL)
    plain = theirs(PADDED, attention_mask=REAL.long()).logits
    near(call.logits({"tokens": TEXTS}), plain, REAL)
    assert parity.difference(plain[REAL], expected.logits[REAL]) > 0.01, "types matter here"


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_decoder(name: str, tmp_path: Path) -> None:
    small = GPT2Config(n_embd=24, n_layer=2, n_head=3, vocab_size=31, n_positions=9)
    model = GPT2LMHeadModel(small) if name == "gpt2" else LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=31))
    theirs, call = both(model, tmp_path)
    expected = theirs(PADDED, attention_mask=REAL.long(), output_hidden_states=True)
    near(call.logits({"tokens": TEXTS}), expected.logits, REAL)
    layers_are(call, {"tokens": TEXTS}, expected.hidden_states, REAL)
    alone = call.logits({"tokens": TEXTS[1:2]})
    near(alone, call.logits({"tokens": TEXTS})[1:2, :3])


def test_an_encoder_decoder(tmp_path: Path) -> None:
    config = T5Config(d_model=24, d_kv=5, d_ff=40, num_layers=2, num_heads=3, vocab_size=31, dropout_rate=0.0)
    theirs, call = both(T5ForConditionalGeneration(config), tmp_path)
    targets = [[0, 4, 5], [0, 9, 8, 7], [0]]
    padded = torch.tensor([row + [0] * (4 - len(row)) for row in targets])
    inside = torch.arange(4)[None] < torch.tensor([3, 4, 1])[:, None]
    expected = theirs(input_ids=PADDED, attention_mask=REAL.long(), decoder_input_ids=padded, output_hidden_states=True)
    near(call.logits({"tokens": TEXTS, "targets": targets}), expected.logits, inside)
    layers_are(call, {"tokens": TEXTS, "targets": targets}, expected.decoder_hidden_states, inside)
    layers_are(call, {"tokens": TEXTS}, expected.encoder_hidden_states, REAL)
    with pytest.raises(UserError, match="targets is missing"):
        call.logits({"tokens": TEXTS})


def test_images(tmp_path: Path) -> None:
    config = ViTConfig(**SIZES, **DRY, image_size=8, patch_size=4, num_labels=5)
    theirs, call = both(ViTForImageClassification(config), tmp_path)
    pixels = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    expected = theirs(pixels, output_hidden_states=True)
    near(call.logits({"pixels": pixels}), expected.logits)
    near(call.logits({"pixels": list(pixels)}), expected.logits)
    near(call.hidden({"pixels": pixels}, 1), expected.hidden_states[1])
    near(call.hidden({"pixels": pixels}), theirs.vit(pixels).last_hidden_state)
    with pytest.raises(UserError, match="does not match the model's input 3×8×8"):
        call.logits({"pixels": pixels[:, :, :4]})


def test_images_and_texts(tmp_path: Path) -> None:
    text = dict(SIZES, vocab_size=31, max_position_embeddings=9, eos_token_id=30, bos_token_id=29, pad_token_id=0)
    vision = dict(SIZES, image_size=8, patch_size=4)
    theirs, call = both(CLIPModel(CLIPConfig(projection_dim=14, text_config=text, vision_config=vision)), tmp_path)
    texts = [[29, 7, 9, 3, 8, 30], [29, 2, 30], [29, 30]]
    tokens = torch.tensor([row + [0] * (6 - len(row)) for row in texts])
    real = torch.arange(6)[None] < torch.tensor([6, 3, 2])[:, None]
    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    expected = theirs(input_ids=tokens, attention_mask=real.long(), pixel_values=pixels)
    near(call.logits({"tokens": texts, "pixels": pixels}), expected.logits_per_image)
    near(call.logits({"tokens": texts, "pixels": pixels}).T, expected.logits_per_text)
    near(call.hidden({"tokens": texts}), expected.text_model_output.last_hidden_state, real)
    seen = theirs.vision_model.post_layernorm(expected.vision_model_output.last_hidden_state)
    near(call.hidden({"pixels": pixels}), seen)
    with pytest.raises(UserError, match="give one of them"):
        call.hidden({"tokens": texts, "pixels": pixels})
    with pytest.raises(UserError, match="pixels is missing"):
        call.logits({"tokens": texts})


def test_audio_of_unequal_lengths(tmp_path: Path) -> None:
    config = WhisperConfig(
        d_model=24, encoder_layers=2, decoder_layers=2, encoder_attention_heads=3, decoder_attention_heads=3,
        encoder_ffn_dim=40, decoder_ffn_dim=40, vocab_size=31, max_source_positions=6, max_target_positions=8,
        num_mel_bins=7, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    theirs, call = both(WhisperForConditionalGeneration(config), tmp_path)
    dice = torch.Generator().manual_seed(0)
    sounds = torch.randn(2, 7, 12, generator=dice)
    targets = [[1, 4, 5, 6], [1, 9]]
    padded = torch.tensor([[1, 4, 5, 6], [1, 9, 0, 0]])
    inside = torch.arange(4)[None] < torch.tensor([4, 2])[:, None]
    expected = theirs(input_features=sounds, decoder_input_ids=padded, output_hidden_states=True)
    near(call.logits({"features": sounds, "targets": targets}), expected.logits, inside)
    layers_are(call, {"features": sounds}, expected.encoder_hidden_states)
    # theirs takes sounds of one length only; ours gives each what it gets alone
    uneven = [sounds[0], torch.randn(7, 8, generator=dice)]
    found = call.logits({"features": uneven, "targets": targets})
    near(found[:1], call.logits({"features": uneven[:1], "targets": targets[:1]}))
    near(found[1:, :2], call.logits({"features": uneven[1:], "targets": targets[1:]}))
    heard = call.hidden({"features": uneven})
    assert heard.shape == (2, 6, 24) and not heard[1, 4:].any()
    near(call.hidden({"features": uneven}, "all")[1][:1], call.hidden({"features": uneven[:1]}, 1))


def test_global_positions(tmp_path: Path) -> None:
    config = LongformerConfig(**SIZES, **DRY, vocab_size=31, max_position_embeddings=40, attention_window=4)
    theirs, call = both(LongformerForMaskedLM(config), tmp_path)
    dice = torch.Generator().manual_seed(1)
    texts = [torch.randint(3, 31, (length,), generator=dice).tolist() for length in (16, 9)]
    tokens = torch.tensor([row + [1] * (16 - len(row)) for row in texts])
    real = torch.arange(16)[None] < torch.tensor([16, 9])[:, None]
    places = [[0, 11], [3]]
    marks = torch.zeros_like(tokens)
    marks[0, [0, 11]] = marks[1, 3] = 1
    expected = theirs(tokens, attention_mask=real.long(), global_attention_mask=marks).logits
    near(call.logits({"tokens": texts, "global_positions": places}), expected, real)
    near(call.logits({"tokens": texts, "global_positions": marks.bool()}), expected, real)
    assert parity.difference(call.logits({"tokens": texts})[real], expected[real]) > 0.01
    with pytest.raises(UserError, match="expected 2 lists of positions from 0 to 15"):
        call.logits({"tokens": texts, "global_positions": [[16], []]})


def test_permutation_order_and_query_stream(tmp_path: Path) -> None:
    config = XLNetConfig(d_model=24, n_head=3, n_layer=2, d_inner=40, vocab_size=31, dropout=0.0, use_mems_eval=False)
    theirs, call = both(XLNetLMHeadModel(config), tmp_path)
    order = [[2, 0, 0, 0, 1, 0], [0, 1, 0], [0]]
    targets = [[4, 0], [1], []]
    said = torch.tensor([row + [0] * (6 - len(row)) for row in order])
    mask = (said[:, None, :] > said[:, :, None]).float()
    mapping = torch.zeros(3, 2, 6)
    for row, asked in enumerate(targets):
        mask[row, asked, asked] = 1
        for number, place in enumerate(asked):
            mapping[row, number, place] = 1
    expected = theirs(PADDED, attention_mask=REAL.float(), perm_mask=mask, target_mapping=mapping).logits
    found = call.logits({"tokens": TEXTS, "order": order, "targets": targets})
    asked_for = torch.tensor([[True, True], [True, False], [False, False]])
    near(found, expected, asked_for)
    assert call.hidden({"tokens": TEXTS, "order": order, "targets": targets}).shape == (3, 2, 24)
    without = theirs(PADDED, attention_mask=REAL.float()).logits
    near(call.logits({"tokens": TEXTS}), without, REAL)
    with pytest.raises(UserError, match="targets requires order"):
        call.logits({"tokens": TEXTS, "targets": targets})
    with pytest.raises(UserError, match="each inside the text"):
        call.logits({"tokens": TEXTS, "order": order, "targets": [[4], [3], []]})


def test_their_folders_can_be_called_directly(tmp_path: Path) -> None:
    config = BertConfig(**SIZES, **DRY, vocab_size=31, max_position_embeddings=9)
    theirs = BertForMaskedLM(config).eval()
    theirs.save_pretrained(tmp_path)
    model = ayn.load(tmp_path)
    expected = theirs(PADDED, attention_mask=REAL.long(), output_hidden_states=True)
    near(model.logits(tokens=TEXTS), expected.logits, REAL)
    near(model.hidden(1, tokens=TEXTS), expected.hidden_states[1], REAL)
    assert isinstance(model.folder, Folder) and not model.logits(tokens=TEXTS).requires_grad


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "tokens is missing: token ids: a list per text"),
    ({"tokens": TEXTS, "pixels": torch.zeros(1)}, "this model does not read the input 'pixels'; it takes tokens"),
    ({"tokns": TEXTS}, "unknown input 'tokns'; it takes tokens"),
    ({"tokens": ["a text"]}, r"not text; use model.tokenizer.encode\(text\)"),
    ({"tokens": "a text"}, "not text"),
    ({"tokens": [3, 4]}, r"write \[\[…\]\] for a single text"),
    ({"tokens": [[3], []]}, "none of them empty"),
    ({"tokens": []}, "at least one text"),
    ({"tokens": [[31]]}, "ids must be 0 to 30 in this model"),
    ({"tokens": torch.tensor([[-1]])}, "ids must be 0 to 30"),
    ({"tokens": torch.rand(2, 3)}, "expected an integer tensor"),
    ({"tokens": TEXTS, "lengths": [6, 3, 1]}, "lengths is for a padded tensor"),
    ({"tokens": PADDED, "lengths": [6, 3]}, "expected 3 numbers from 1 to 6, one per row"),
    ({"tokens": PADDED, "lengths": [6, 0, 7]}, "numbers from 1 to 6"),
    ({"tokens": TEXTS, "types": [[0], [0], [0]]}, "types: expected one value per token"),
    ({"tokens": [[3]], "types": [[2]]}, "types: ids must be 0 to 1 in this model"),
    ({"tokens": TEXTS, "order": TEXTS}, "this model does not read the input 'order'"),
]


@pytest.mark.parametrize(("inputs", "said"), WRONG)
def test_unreadable_files_are_reported(inputs: dict[str, Any], said: str) -> None:
    tree = {
        "kind": "encoder", "vocab": 31, "width": 8, "embed": {"types": 2},
        "encoder": [{"mixer": {"kind": "attention", "heads": 2}, "channel": {"kind": "ffn", "hidden": 8}}],
    }  # fmt: skip
    call = NamedForward(ayn.build(tree))
    for ask in (call.logits, call.hidden):
        with pytest.raises(UserError, match=said):
            ask(inputs)


def test_missing_layers() -> None:
    layer = {"mixer": {"kind": "attention", "heads": 2, "pattern": "causal"}, "channel": {"kind": "ffn", "hidden": 8}}
    call = NamedForward(ayn.build({"kind": "decoder", "vocab": 31, "width": 8, "decoder": [layer | {"repeat": 2}]}))
    assert len(call.hidden({"tokens": TEXTS}, "all")) == 3
    for number in (3, -4, "last"):
        with pytest.raises(UserError, match=r"expected 0 \(the input\) to 2, or 'all'"):
            call.hidden({"tokens": TEXTS}, number)
    wide = NamedForward(
        ayn.build({"kind": "decoder", "vocab": 31, "width": 8, "decoder": [layer | {"wiring": "resi-dual"}]})
    )
    wide.hidden({"tokens": TEXTS})
    with pytest.raises(UserError, match="only the last layer is available"):
        wide.hidden({"tokens": TEXTS}, 0)


@pytest.mark.parametrize(
    "name", ["transformer-tiny", "bert-base", "vit-base-16", "clip-vit-b-32", "whisper-tiny", "retro"]
)
def test_every_predictor_names_its_inputs(name: str) -> None:
    expected = {
        "transformer-tiny": {"tokens", "lengths", "targets"},
        "bert-base": {"tokens", "lengths", "types"},
        "vit-base-16": {"pixels"},
        "clip-vit-b-32": {"pixels", "tokens", "lengths"},
        "whisper-tiny": {"features", "targets"},
        "retro": {"tokens", "lengths"},
    }
    assert set(model_inputs(ayn.model_config(name))) == expected[name]
