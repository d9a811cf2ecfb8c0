"""mBART (Liu et al. 2020): BART with pre-norm and a final norm in each stack."""

from __future__ import annotations

from allyouneed.interop.families import bart

FIELDS = bart.MODEL + bart.EMBEDDINGS + """
add_final_layer_norm in [true]
normalize_before in [true]
"""  # fmt: skip
FAMILY = bart.family("mbart", "MBart", FIELDS)
