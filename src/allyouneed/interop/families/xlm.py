"""XLM (Lample, Conneau 2019, "Cross-lingual Language Model Pretraining"): BERT's body, a language vector added to each
token vector (figure 1) in place of BERT's segments, and a head without transform.

`langs` are our `types`. Without `langs`, their model adds no language vector, ours that of language 0.
"""

from __future__ import annotations

from allyouneed.interop.hf.config_reader import ConfigReader
from allyouneed.interop.hf.config_table import ConfigTable, Conversion, Line
from allyouneed.interop.hf.transforms import add_prefix, chain, remove_prefix, untie_head
from allyouneed.interop.hf.weight_table import Family
from allyouneed.nn.models.base import Model

FIELDS = """
causal in [false]
asm in [false]
is_encoder in [true]
summary_type in [first]
summary_use_proj in [true]
summary_activation in [null]
summary_proj_to_labels in [true]
kind: encoder
vocab = vocab_size ?? 30145
width = emb_dim ?? 2048
dropout = dropout ?? 0.1
norm: {kind: layer}
norm.eps = layer_norm_eps ?? 1.0e-12
embed: {scale: none, positions: {kind: learned}, norm: {kind: layer}}
embed.positions.length = max_position_embeddings ?? 512
embed.tied = tie_word_embeddings ?? true
embed.types = n_langs, use_lang_emb |languages
embed.norm.eps <- layer_norm_eps
encoder.repeat = n_layers ?? 12
encoder.mixer: {kind: attention}
encoder.mixer.heads = n_heads ?? 16
encoder.mixer.dropout = attention_dropout ?? 0.1
encoder.channel: {kind: ffn}
encoder.channel.hidden <- 4 * emb_dim
encoder.channel.activation = gelu_activation ?? true |gelu
head.kind = architectures |class [XLM, {WithLMHeadModel: vocabulary, ForMaskedLM: vocabulary,
    ForSequenceClassification: classes, ForTokenClassification: tags, Model: none}]
head<vocabulary>: {bias: true}
head<classes>.hidden: null
head<classes>.labels = id2label, label2id |labels
head<classes>.dropout = summary_first_dropout ?? 0.1 |optional
head<tags>.labels = id2label, label2id |labels
?? {n_langs: 1, use_lang_emb: true}
ignore *_index, *init_std, *_n_top, lang_id, lang2id, id2lang, max_vocab, min_count, sinusoidal_embeddings, n_words,
    encoder_only, attention_setting, share_inout_emb
"""


def languages(config: ConfigReader, line: Line) -> int | None:
    count, used = config["n_langs"], config["use_lang_emb"]
    return count if count > 1 and used else None


CONVERSIONS = {
    "gelu": Conversion(
        lambda config, line: "gelu" if config[line.key] else "relu",
        lambda ours, line: ours.activation(line.path) == "gelu",
    ),
    "languages": Conversion(languages, lambda ours, line: {"n_langs": ours.get(line.path, 1)}),
}
LINES = """
embed.tokens.weight = transformer.embeddings.weight
embed.positions.weight = transformer.position_embeddings.weight
embed.types.weight = transformer.lang_embeddings.weight
embed.norm.* = transformer.layer_norm_emb.*
encoder.blocks.{n}.sublayers.mixer.qkv.* = HEADS.q_lin.* + HEADS.k_lin.* + HEADS.v_lin.*
encoder.blocks.{n}.sublayers.mixer.out.* = HEADS.out_lin.*
encoder.blocks.{n}.sublayers.channel.up.* = transformer.ffns.{n}.lin1.*
encoder.blocks.{n}.sublayers.channel.down.* = transformer.ffns.{n}.lin2.*
encoder.blocks.{n}.wiring.norms.0.* = transformer.layer_norm1.{n}.*
encoder.blocks.{n}.wiring.norms.1.* = transformer.layer_norm2.{n}.*
head.weight = pred_layer.proj.weight
head.bias = pred_layer.proj.bias
head.classes.* = sequence_summary.summary.*
head.tags.* = classifier.*
""".replace("HEADS", "transformer.attentions.{n}")


def lacks(config: Model) -> str:
    types = config.embed.types  # type: ignore[attr-defined]
    if not types:
        return ""
    return (
        f"embed.types: {types}: its models add a language's vector only where a call names it (langs), ours always "
        "adds one; train with embed.types: null"
    )


PREPARE = chain(add_prefix("transformer."), untie_head("pred_layer.proj.weight", "transformer.embeddings.weight"))
FAMILY = Family(
    "xlm",
    ConfigTable(FIELDS, CONVERSIONS),
    LINES,
    ("*.position_ids", "pred_layer.proj.weight"),
    prepare=PREPARE,
    finish=remove_prefix("transformer."),
    lacks=lacks,
)
