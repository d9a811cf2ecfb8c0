"""StarCoder and SantaCoder (Li et al. 2023; Ben Allal et al. 2023): GPT-2 with multi-query attention."""

from __future__ import annotations

from allyouneed.interop.families import gpt2
from allyouneed.interop.hf.config_table import Conversion
from allyouneed.interop.hf.decoders import decoder_family
from allyouneed.interop.hf.transforms import grouped_qkv
from allyouneed.interop.hf.weight_table import HfConfig

# ignored are speed options of half precision; multi_query sets the number of key-value heads
FIELDS = gpt2.MODEL + gpt2.POSITIONS + """
decoder.mixer.kv_heads = multi_query ?? true |multi_query
decoder.mixer.scores = scale_attn_weights |scores
decoder.channel.activation = activation_function |activation gelu_pytorch_tanh
head.kind = architectures |decoder GPTBigCodeForCausalLM
ignore *softmax_in_fp32, max_*, num_key_value_heads, pad_key_length, pre_*, validate_runner_input
"""  # fmt: skip


def counts(config: HfConfig) -> tuple[int, int]:
    """(heads, groups): one group with multi-query attention, else one per head."""
    return config["n_head"], 1 if config.get("multi_query", True) else config["n_head"]


CONVERSIONS = {
    "multi_query": Conversion(lambda config, line: counts(config)[1], lambda ours, line: ours.get(line.path) == 1),
    "scores": Conversion(gpt2.read_scores, lambda ours, line: gpt2.write_scores(ours, line)[line.key]),
}
LINES = gpt2.LINES.replace(" |T", "").replace("attn.c_attn.*", "attn.c_attn.* |apart")
FAMILY = decoder_family(
    "gpt_bigcode",
    FIELDS,
    LINES,
    gpt2.TOKENS,
    CONVERSIONS,
    ignore=gpt2.IGNORED,
    transforms={"apart": grouped_qkv(counts)},
)
