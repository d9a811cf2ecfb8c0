"""BART (Lewis et al. 2020), and what mBART, M2M-100, Marian and PEGASUS share with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from allyouneed.interop.hf.config_reader import ConfigReader, Tree, strict_config
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.transforms import ROW, is_headless, untie_if_different
from allyouneed.interop.hf.weight_table import CheckpointTransform, EquivalentModel, Family, HfConfig, Weights

# used only in training, generation or other tasks, or redundant
IGNORED_KEYS = (
    "*_layerdrop", "_num_labels", "bad_words_ids", "classif_dropout", "classifier_dropout", "early_stopping",
    "extra_pos_embeddings", "force_bos_token_to_be_generated", "init_std", "is_encoder_decoder", "length_penalty",
    "min_length", "no_repeat_ngram_size", "num_beams", "num_hidden_layers", "output_past", "prefix", "save_step",
)  # fmt: skip
DEFAULTS = {
    "vocab_size": 50265,
    "max_position_embeddings": 1024,
    "encoder_layers": 12,
    "encoder_ffn_dim": 4096,
    "encoder_attention_heads": 16,
    "decoder_layers": 12,
    "decoder_ffn_dim": 4096,
    "decoder_attention_heads": 16,
    "activation_function": "gelu",
    "d_model": 1024,
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "scale_embedding": False,
    "tie_word_embeddings": True,
}


def build_tree(config: ConfigReader, positions: Tree, wiring: str | Tree, norm: bool) -> Tree:
    """An encoder-decoder with these positions on each side and this wiring; `norm`: normalise the sum of embeddings."""
    config.require_architecture("ForConditionalGeneration", "Model")
    embed = {
        "positions": positions,
        "scale": "sqrt-width" if config["scale_embedding"] else "none",
        "tied": config["tie_word_embeddings"],
        "norm": {"kind": "layer"} if norm else None,
    }
    vocab: Any = config["vocab_size"]
    target = config.get("decoder_vocab_size") or vocab
    if config.get("two_vocabularies", not config.get("share_encoder_decoder_embeddings", True)):
        vocab = {"source": vocab, "target": target}
    elif target != vocab:
        config.problems.append(f"decoder_vocab_size: {target} differs from vocab_size, but the sides share one matrix")
    return {
        "kind": "encoder-decoder",
        "vocab": vocab,
        "width": config["d_model"],
        "dropout": config["dropout"],
        "embed": embed,
        # a position table, or a norm, per side
        "source_embed": embed if norm or positions["kind"] == "learned" else None,
        **{side: _layers(config, side, wiring) for side in ("encoder", "decoder")},
        "head": {"bias": config.get("logits_bias", False)},
    }


def _layers(config: ConfigReader, side: str, wiring: str | Tree) -> list[Tree]:
    attention = {
        "kind": "attention",
        "heads": config[f"{side}_attention_heads"],
        "dropout": config["attention_dropout"],
    }
    layer = {
        "repeat": config[f"{side}_layers"],
        "wiring": wiring,
        "mixer": attention,
        "channel": {
            "kind": "ffn",
            "hidden": config[f"{side}_ffn_dim"],
            "activation": config.activation("activation_function"),
            "dropout": config["activation_dropout"],
        },
    }
    return [layer if side == "encoder" else layer | {"mixer": attention | {"pattern": "causal"}, "cross": attention}]


def config_fields(ours: ModelTree, name: str) -> Tree:
    """BART's config for our encoder-decoder; `name`: the class."""
    vocab = ours["vocab"]
    apart = isinstance(vocab, dict)
    found: Tree = {
        "vocab_size": vocab["source"] if apart else vocab,
        "activation_function": ours.activation("encoder.channel.activation"),
        "d_model": ours["width"],
        "dropout": ours.get("dropout", 0.0),
        "attention_dropout": ours.get("encoder.mixer.dropout", 0.0),
        "activation_dropout": ours.get("encoder.channel.dropout", 0.0),
        "scale_embedding": ours["embed.scale"] == "sqrt-width",
        "tie_word_embeddings": ours.get("embed.tied", True),
        "two_vocabularies": apart,
        "logits_bias": ours.get("head.bias", False),
        "architectures": [name],
        "is_encoder_decoder": True,
    }
    for side in ("encoder", "decoder"):
        found |= {
            f"{side}_layers": ours.depth(side),
            f"{side}_attention_heads": ours[f"{side}.mixer.heads"],
            f"{side}_ffn_dim": ours[f"{side}.channel.hidden"],
        }
    return found


SHARED, SOURCE, TARGET = (
    "model.shared.weight",
    "model.encoder.embed_tokens.weight",
    "model.decoder.embed_tokens.weight",
)
BIAS, OUTPUT = "final_logits_bias", "lm_head.weight"


def prepare(config: HfConfig, weights: Weights) -> tuple[HfConfig, Weights]:
    """Only the weights tell whether the two sides have separate token matrices, and whether the bias of the logits,
    which is never trained, is nonzero. Copies are dropped."""
    prefix = "" if any(name.startswith("model.") for name in weights) else "model."  # files of a headless model omit it
    found = {prefix + name: tensor for name, tensor in weights.items()}
    shared = found.get(SHARED)
    source, target = (found.pop(side, shared) for side in (SOURCE, TARGET))
    apart = source is not None and target is not None and not _same(source, target)
    if target is not None:
        found |= {TARGET: target, SOURCE: source} if apart and source is not None else {TARGET: target}
    if shared is not None and target is not None and _same(shared, target):
        del found[SHARED]
    bias = found.get(BIAS)
    full = {**config, "two_vocabularies": apart, "logits_bias": bias is not None and bool(bias.any())}
    if OUTPUT not in found and is_headless(config):
        full["tie_word_embeddings"] = True  # no head to tie
    if apart and OUTPUT in found and target is not None and _same(found[OUTPUT], target):
        full["tie_word_embeddings"] = True  # their flag only covers a single matrix
    return untie_if_different(full, found, OUTPUT, TARGET), found


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.equal(other)


def finish(config: HfConfig, weights: Weights, has_bias: bool = True) -> tuple[HfConfig, Weights]:
    """One matrix is called `shared`. Two come with a third, unused one, and the head is written even where it is a
    copy: they tie all or none. Only Marian has two matrices without a third. `has_bias`: their files have a bias of
    the logits, usually zeros."""
    found, written = (
        {**weights},
        {key: value for key, value in config.items() if key not in ("two_vocabularies", "logits_bias")},
    )
    target = found.pop(TARGET)
    if SHARED in found and "share_encoder_decoder_embeddings" in written:
        written["share_encoder_decoder_embeddings"] = True
    if SOURCE in found and written.get("share_encoder_decoder_embeddings", True):
        written["tie_word_embeddings"] = False
        found = {SHARED: found[SOURCE].clone(), OUTPUT: target.clone(), TARGET: target, **found}
    elif SOURCE in found:
        found = {TARGET: target, **found}
    elif written.get("tie_word_embeddings", True):
        found = {SHARED: target, **found}
    else:
        found = {SHARED: target, SOURCE: target.clone(), TARGET: target.clone(), **found}
    if is_headless(config):
        found = {name.removeprefix("model."): tensor for name, tensor in found.items() if name not in (OUTPUT, BIAS)}
    elif has_bias:
        found.setdefault(BIAS, target.new_zeros(1, len(target)))
    return written, found


LINES = """
embed.tokens.weight = model.decoder.embed_tokens.weight
embed.positions.weight = model.decoder.embed_positions.weight
embed.norm.* = model.decoder.layernorm_embedding.*
source_embed.tokens.weight = model.encoder.embed_tokens.weight
source_embed.positions.weight = model.encoder.embed_positions.weight
source_embed.norm.* = model.encoder.layernorm_embedding.*
encoder.blocks.{n}.sublayers.mixer.qkv.* = ENC.self_attn.q_proj.* + ENC.self_attn.k_proj.* + ENC.self_attn.v_proj.*
encoder.blocks.{n}.sublayers.mixer.out.* = ENC.self_attn.out_proj.*
encoder.blocks.{n}.sublayers.channel.up.* = ENC.fc1.*
encoder.blocks.{n}.sublayers.channel.down.* = ENC.fc2.*
encoder.blocks.{n}.wiring.norms.0.* = ENC.self_attn_layer_norm.*
encoder.blocks.{n}.wiring.norms.1.* = ENC.final_layer_norm.*
encoder.end.* = model.encoder.layer_norm.*
decoder.blocks.{n}.sublayers.mixer.qkv.* = DEC.self_attn.q_proj.* + DEC.self_attn.k_proj.* + DEC.self_attn.v_proj.*
decoder.blocks.{n}.sublayers.mixer.out.* = DEC.self_attn.out_proj.*
decoder.blocks.{n}.sublayers.cross.q.* = DEC.encoder_attn.q_proj.*
decoder.blocks.{n}.sublayers.cross.kv.* = DEC.encoder_attn.k_proj.* + DEC.encoder_attn.v_proj.*
decoder.blocks.{n}.sublayers.cross.out.* = DEC.encoder_attn.out_proj.*
decoder.blocks.{n}.sublayers.channel.up.* = DEC.fc1.*
decoder.blocks.{n}.sublayers.channel.down.* = DEC.fc2.*
decoder.blocks.{n}.wiring.norms.0.* = DEC.self_attn_layer_norm.*
decoder.blocks.{n}.wiring.norms.1.* = DEC.encoder_attn_layer_norm.*
decoder.blocks.{n}.wiring.norms.2.* = DEC.final_layer_norm.*
decoder.end.* = model.decoder.layer_norm.*
head.weight = lm_head.weight
head.bias = final_logits_bias |row
""".replace("ENC", "model.encoder.layers.{n}").replace("DEC", "model.decoder.layers.{n}")
PRESERVED_WEIGHTS = (SHARED, BIAS)
TRANSFORMS = {"row": ROW}
OFFSET = 2  # unused rows at the start of their position tables


def learned(config: ConfigReader) -> Tree:
    return {"kind": "learned", "length": config["max_position_embeddings"], "offset": OFFSET}


@dataclass(frozen=True)
class Variant:
    """What sets a family apart from the others of BART's kind.

    `architecture`: their class with a head. `positions`: those of our tree. `norm`: normalise the sum of embeddings.
    `required`: flags that must be as given, where present. `table`: rows of their position table, where ours is
    computed and has none. `fields`: further keys of their config. `has_bias`: see `finish`.
    """

    name: str
    architecture: str
    positions: Callable[[ConfigReader], Tree]
    wiring: str
    norm: bool = False
    defaults: Tree = field(default_factory=dict)
    required: Tree = field(default_factory=dict)
    table: int | None = None
    fields: Callable[[ModelTree], Tree] = lambda ours: {}
    ignored_keys: Sequence[str] = ()
    ignored_weights: Sequence[str] = ()
    preserved_weights: Sequence[str] = ()
    has_bias: bool = True
    finish: CheckpointTransform | None = None
    equivalent: EquivalentModel | None = None

    def family(self) -> Family:
        return Family(
            self.name,
            strict_config(*IGNORED_KEYS, *self.ignored_keys)(self.tree),
            LINES if self.has_bias else LINES.replace("head.bias = final_logits_bias |row", ""),
            ignore=(OUTPUT, *self.ignored_weights),
            transforms=TRANSFORMS,
            prepare=prepare,
            preserve=(*PRESERVED_WEIGHTS, *self.preserved_weights),
            hf_config=self.hf_config,
            finish=self.finish or partial(finish, has_bias=self.has_bias),
            equivalent=self.equivalent,
        )

    def tree(self, config: ConfigReader) -> Tree:
        config.set_defaults(DEFAULTS | self.defaults)
        for key, value in self.required.items():
            config.require(key, value)
        if self.table is not None:
            config.get("max_position_embeddings")  # no limit: positions are computed
        return build_tree(config, self.positions(config), self.wiring, self.norm)

    def hf_config(self, ours: ModelTree) -> Tree:
        rows = ours["embed.positions.length"] if self.table is None else self.table
        return config_fields(ours, self.architecture) | {"max_position_embeddings": rows} | self.fields(ours)


FAMILY = Variant(
    "bart",
    "BartForConditionalGeneration",
    learned,
    "post-norm",
    norm=True,
    required={"normalize_embedding": True},
).family()
