"""BigBird (Zaheer et al. 2020): BERT with block-sparse attention. The imported model computes what transformers
computes in eval mode; nn/mixers/attention/big_bird.py explains how that differs from the paper."""

from __future__ import annotations

from allyouneed.interop.families import bert

FIELDS = bert.MODEL.replace(bert.ANSWERS, "") + bert.HEADS + bert.LEARNED + """
embed.scale = rescale_embeddings ?? false |{true: sqrt-width, false: none}
encoder.mixer.kind = attention_type |{block_sparse: big-bird, original_full: attention}
encoder.mixer<big-bird>.block = block_size ?? 64
encoder.mixer<big-bird>.random = num_random_blocks ?? 3
encoder.mixer<big-bird>.bias = use_bias ?? true
encoder.mixer<attention>.bias = use_bias |{true: {q: true, k: true, v: true}, false: {q: false, k: false, v: false}}
head<classes>.hidden <- hidden_act |activation
?? {vocab_size: 50358, hidden_act: gelu_new, max_position_embeddings: 4096}
"""  # fmt: skip
LINES = bert.untied_bias(bert.BODY + bert.HEAD + bert.CLASSES, "cls.predictions")
POOLERS = {"": "bert.pooler"}  # all of their classes have one
FAMILY = bert.family("big_bird", "BigBird", FIELDS, LINES, poolers=POOLERS)
