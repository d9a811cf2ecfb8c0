"""mT5 (Xue et al. 2021): T5 1.1 for many languages; the input of its head is never scaled."""

from __future__ import annotations

from allyouneed.interop.families import t5

FIELDS = t5.MODEL + t5.CHANNELS + """
head.scale: none
-> {scale_decoder_outputs: false}
?? {vocab_size: 250112, d_ff: 1024, num_layers: 8, num_heads: 6, feed_forward_proj: gated-gelu}
ignore scale_decoder_outputs
"""  # fmt: skip
FAMILY = t5.family("mt5", "MT5", FIELDS)
