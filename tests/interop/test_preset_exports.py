"""Models built from presets and exported: transformers computes what ours compute. What no family of theirs can express
is refused by name."""

import pytest
import torch
import transformers

import hf_models as foreign
import parity
from allyouneed.config import override, parse, preset_names, preset_tree, tree_of
from allyouneed.errors import UserError
from allyouneed.interop.families import FAMILIES, matching_families
from allyouneed.nn.batch import Batch, Rows, Signal
from allyouneed.nn.models.base import Model
from shrink import shrink

# preset -> the families that can say it; the first is the one it is named after
THEIRS = {
    "albert-base": ["albert"],
    "bart-base": ["bart"],
    "bert-base": ["bert", "big_bird", "electra"],
    "bert-large": ["bert", "big_bird", "electra"],
    "bitnet-b1.58-2b": ["bitnet"],
    "bloom-560m": ["bloom"],
    "clip-vit-b-32": ["clip"],
    "deepseek-v2-lite": ["deepseek_v2"],
    "gpt2": ["gpt2", "gpt_bigcode"],
    "gpt2-large": ["gpt2", "gpt_bigcode"],
    "gpt2-medium": ["gpt2", "gpt_bigcode"],
    "gpt2-xl": ["gpt2", "gpt_bigcode"],
    "instructgpt-1.3b": ["gpt2", "gpt_bigcode"],
    "llama-15m": ["llama", "mistral"],
    "llama-7b": ["llama", "mistral"],
    "longformer-base": ["longformer"],
    "mamba-130m": ["mamba"],
    "mamba2-130m": ["mamba2"],
    "marian": ["marian"],
    "mistral-7b": ["mistral"],
    "mixtral-8x7b": ["mixtral"],
    "roberta-base": ["bert", "roberta"],
    "roformer-base": ["roformer"],
    "rwkv-4-169m": ["rwkv"],
    "switch-base-8": ["switch_transformers"],
    "t5-base": ["t5"],
    "t5-small": ["t5"],
    "transformer-base": ["marian"],
    "transformer-big": ["marian"],
    "transformer-small": ["marian"],
    "transformer-tiny": ["marian"],
    "vit-base-16": ["vit"],
    "webgpt-760m": ["gpt2", "gpt_bigcode"],
    "whisper-base": ["whisper"],
    "whisper-tiny": ["whisper"],
    "xlm-15": ["xlm"],
    "xlnet-base": ["xlnet"],
}
# sizes of others of the list, and one that transformers cannot load without another library
AGAIN = (
    "instructgpt-1.3b",
    "webgpt-760m",
    "bert-large",
    "gpt2-large",
    "gpt2-medium",
    "gpt2-xl",
    "llama-7b",
    "t5-base",
    "transformer-big",
    "whisper-base",
)
COMPARED = [(n, f) for n, all_of_them in THEIRS.items() for f in all_of_them if n not in AGAIN and f != "bitnet"]
PAD, END = 1, 2
NUMBERS = dict(pad_token_id=PAD, bos_token_id=0, eos_token_id=END, decoder_start_token_id=0)


def whole(name):
    return parse(Model, preset_tree(name))


@pytest.mark.parametrize("name", preset_names())
def test_the_families_that_can_express_a_preset(name):
    assert [family.name for family in matching_families(whole(name))] == THEIRS.get(name, [])


def changed(name, *changes):
    """That preset, small, with other words in it and every weight random."""
    model = parse(Model, override(tree_of(shrink(whole(name))), changes)).build().eval()
    parity.randomise(model)
    return model


def differs(model, family, folder):
    """How far transformers is from our model once it is written as one of that family."""
    config, weights = FAMILIES[family].write(model)
    kind = getattr(transformers, config["architectures"][0])
    text = {"text_config": NUMBERS | {"eos_token_id": model.config.vocabs.target - 1}} if family == "clip" else {}
    again = foreign.load(kind, folder, foreign.with_token_ids(config, NUMBERS | text), weights)
    batch = some(model.config)
    with torch.no_grad():
        result, expected = again(**as_they_want(batch, again)), model.logits(batch)
    found = result.logits_per_image if family == "clip" else result.logits
    if isinstance(batch.target, Rows) and expected.dim() == 3:
        found, expected = found[real(batch.target)], expected[real(batch.target)]
    return parity.difference(found, expected)


@pytest.mark.parametrize(("name", "family"), COMPARED)
def test_transformers_computes_the_same(name, family, tmp_path):
    assert differs(changed(name), family, tmp_path) < parity.TOLERANCE


@pytest.mark.parametrize("scale", ["none", "inverse-sqrt-width"])
@pytest.mark.parametrize("tied", ["true", "false"])
@pytest.mark.parametrize("vocab", ["31", "{source: 31, target: 31}"])
@pytest.mark.parametrize(
    ("name", "family"), [("t5-small", "t5"), ("t5-small", "mt5"), ("switch-base-8", "switch_transformers")]
)
def test_tied_and_untied_heads_of_t5_are_exported(name, family, vocab, tied, scale, tmp_path):
    """Their `tie_word_embeddings: false` means an unscaled input of the head; the weights tell what is tied."""
    model = changed(name, f"head.scale={scale}", f"embed.tied={tied}", f"vocab={vocab}")
    if family == "mt5" and scale != "none":
        with pytest.raises(UserError, match=r"head\.scale: 'inverse-sqrt-width' cannot be expressed"):
            FAMILIES[family].write(model)
    else:
        assert differs(model, family, tmp_path) < parity.TOLERANCE


@pytest.mark.parametrize("tied", ["true", "false"])
@pytest.mark.parametrize("vocab", ["31", "{source: 31, target: 31}"])
@pytest.mark.parametrize("bias", ["true", "false"])
@pytest.mark.parametrize("name", ["bart-base", "marian"])
def test_heads_of_bart_are_exported(name, vocab, tied, bias, tmp_path):
    model = changed(name, f"head.bias={bias}", f"embed.tied={tied}", f"vocab={vocab}")
    assert differs(model, name.removesuffix("-base"), tmp_path) < parity.TOLERANCE


ODD = [
    "width=15",
    *(f"{side}[0].{part}.heads=3" for side, part in (("encoder", "mixer"), ("decoder", "mixer"), ("decoder", "cross"))),
]
OTHERS = {
    "odd": ODD,
    "two vocabularies": [*ODD, "vocab={source: 31, target: 23}", "head.bias=true"],
    "untied": [
        "embed.tied=false",
        "embed.scale=none",
        "encoder[0].channel.activation=gelu-tanh",
        "decoder[0].channel.activation=gelu-tanh",
    ],
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_papers_sinusoids_in_the_order_of_marian(name, tmp_path):
    """Features change places, and nothing else."""
    model = changed("transformer-tiny", *OTHERS[name])
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    assert differs(model, "marian", tmp_path) < parity.TOLERANCE
    assert all(tensor.equal(before[key]) for key, tensor in model.state_dict().items()), "ours was changed"
    read, batch = FAMILIES["marian"].convert(*FAMILIES["marian"].write(model)), some(model.config)
    assert read.config.embed.positions.order == "halves"
    with torch.no_grad():
        assert parity.difference(read.logits(batch), model.logits(batch)) < parity.TOLERANCE


def some(config):
    """Texts of unequal lengths that have the mark of padding nowhere else, and end in the last token there is; images
    and sounds of the size they are made for."""
    dice, given = torch.Generator().manual_seed(1), []
    sides = {"two-towers": ("text", "image"), "encoder-decoder": ("embed", "source_embed")}.get(config.kind, ("embed",))
    for side in sides:
        part = getattr(config, side) or config.embed
        embed = getattr(part, "embed", part)
        vocab = (
            None if config.vocabs is None else config.vocabs.source if side == "source_embed" else config.vocabs.target
        )
        if embed.reads is Rows:
            texts = [torch.randint(3, vocab - 1, (length,), generator=dice).tolist() for length in (9, 4, 1)]
            given.append(Rows.of([[*text, vocab - 1] for text in texts], pad=PAD))
        elif embed.kind == "patches":
            given.append(Signal(torch.randn(3, embed.channels, embed.image, embed.image, generator=dice)))
        else:
            given.append(Signal(torch.randn(3, embed.mels, 3000, generator=dice)))  # of 30 seconds
    return Batch(*given)


def real(rows):
    return torch.arange(rows.tokens.shape[1])[None] < rows.lengths[:, None]


def as_they_want(batch, theirs):
    names = {"target": "decoder_" if theirs.config.is_encoder_decoder else "", "source": ""}
    given = {}
    for side, name in names.items():
        part = getattr(batch, side)
        if isinstance(part, Rows):
            given |= {f"{name}input_ids": part.tokens, f"{name}attention_mask": real(part).long()}
        elif part is not None:
            given["input_features" if theirs.config.is_encoder_decoder else "pixel_values"] = part.values
    if theirs.config.model_type == "xlm":  # it adds no language vector by default, ours that of the first
        given["langs"] = torch.zeros_like(given["input_ids"])
    return given


@pytest.mark.parametrize(
    ("preset", "family", "change", "said"),
    [
        (
            "bert-base",
            "bert",
            "encoder[0].wiring=pre-norm",
            r"encoder\[0\].wiring.kind: 'pre-norm' cannot be expressed \(only 'post-norm'",
        ),
        ("bert-base", "bert", "encoder[0].mixer.pattern=window(3)", r"encoder\[0\].mixer.pattern: 'window\(3\)'"),
        (
            "bert-base",
            "bert",
            "encoder[0].mixer={kind: linformer, heads: 2, length: 9, rank: 3}",
            r"encoder\[0\].mixer.kind: 'linformer'",
        ),
        (
            "bert-base",
            "bert",
            "encoder[0].channel.activation=elu",
            "encoder.channel.activation: 'elu' has no counterpart",
        ),
        ("bert-base", "roberta", "dropout=0.2", r"embed.positions.offset: 0 cannot be expressed"),
        ("t5-small", "t5", "norm=layer", "norm.kind: 'layer' cannot be expressed"),
        ("t5-small", "t5", "head.bias=true", "head.bias: True cannot be expressed"),
        ("switch-base-8", "switch_transformers", "encoder[0].channel={kind: ffn, hidden: 64}", "encoder"),
        (
            "transformer-base",
            "marian",
            "embed.positions.closed=true",
            "embed.positions.closed: True cannot be expressed",
        ),
        ("transformer-base", "marian", "encoder[0].wiring=deepnorm", "encoder"),
        ("transformer-base", "m2m_100", "width=32", "embed.positions"),
        ("vit-base-16", "vit", "embed.norm=layer", "embed.norm"),
        ("whisper-tiny", "whisper", "embed.tied=false", "embed.tied: False cannot be expressed"),
        ("xlnet-base", "xlnet", "encoder[0].mixer.bias=true", r"encoder\[0\].mixer.bias"),
        ("gpt2", "bert", "width=32", "encoder.mixer.heads: required, but this decoder has none"),
    ],
)
def test_options_without_counterpart_are_refused_by_name(preset, family, change, said):
    with pytest.raises(UserError, match=f"(?s)^{family}: the family cannot express this model.*{said}"):
        FAMILIES[family].write(changed(preset, change))


@pytest.mark.parametrize("name", ["bart-base", "roformer-base", "whisper-tiny"])
def test_added_tensors_have_the_dtype_of_the_weights(name):
    _, weights = FAMILIES[name.partition("-")[0]].write(changed(name).half())
    assert {tensor.dtype for tensor in weights.values()} == {torch.float16}
