"""mBART (Liu et al. 2020): BART with pre-norm and a final norm in each stack."""

from __future__ import annotations

from allyouneed.interop.families.bart import Variant, learned

FAMILY = Variant(
    "mbart",
    "MBartForConditionalGeneration",
    learned,
    "pre-norm",
    norm=True,
    required={"add_final_layer_norm": True, "normalize_before": True, "normalize_embedding": True},
).family()
