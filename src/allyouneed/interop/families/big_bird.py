"""BigBird (Zaheer et al. 2020): BERT with block-sparse attention. The imported model computes what transformers
computes in eval mode; nn/mixers/attention/big_bird.py explains how that differs from the paper."""

from __future__ import annotations

from allyouneed.interop.families import bert
from allyouneed.interop.hf.config_table import Conversion, Line
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.weight_table import Family

FIELDS = bert.MODEL + bert.HEADS + bert.LEARNED + """
embed.scale = rescale_embeddings ?? false |{true: sqrt-width, false: none}
encoder.mixer.kind = attention_type |{block_sparse: big-bird, original_full: attention}
encoder.mixer<big-bird>.block = block_size ?? 64
encoder.mixer<big-bird>.random = num_random_blocks ?? 3
encoder.mixer<big-bird>.bias = use_bias ?? true
encoder.mixer<attention>.bias = use_bias |bias
head<classes>.hidden <- hidden_act |activation
?? {vocab_size: 50358, hidden_act: gelu_new, max_position_embeddings: 4096}
"""  # fmt: skip


def write_bias(ours: ModelTree, line: Line) -> bool:
    bias = ours["encoder.mixer.bias"]
    return bool(bias["q"] if isinstance(bias, dict) else bias)


BIAS = Conversion(lambda config, line: dict.fromkeys("qkv", config[line.key]), write_bias)
FINISH = bert.restore_names({"": "bert.pooler"})  # all of their classes have a pooler
FAMILY = Family(
    "big_bird",
    bert.table("BigBird", FIELDS, {"bias": BIAS}),
    bert.untied_bias(bert.BODY + bert.HEAD + bert.CLASSES, "cls.predictions"),
    bert.IGNORED_WEIGHTS,
    prepare=bert.normalize_names,
    preserve=bert.PRESERVED_WEIGHTS,
    finish=FINISH,
)
