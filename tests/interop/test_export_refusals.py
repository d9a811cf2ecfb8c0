"""Whatever a family of decoders cannot express is refused by name, all of it at once."""

import pytest

from allyouneed.config import override, parse, preset_tree, tree_of
from allyouneed.errors import UserError
from allyouneed.interop.families import FAMILIES, matching_families
from allyouneed.nn.models.base import Model
from shrink import shrink

REFUSED = [
    ("llama", "llama-15m", ["decoder[0].mixer.positions=alibi"], "'alibi' in decoder.mixer.positions has none"),
    ("llama", "llama-15m", ["decoder[0].wiring=sandwich"], r"decoder\[0\].wiring.kind: 'sandwich' cannot be expressed"),
    ("llama", "llama-15m", ["norm=layer"], r"norm.kind: 'layer' cannot be expressed \(only 'rms'\)"),
    (
        "llama",
        "llama-15m",
        ["decoder[0].mixer.bias={out: false}"],
        "decoder.mixer.bias: .* differs between projections",
    ),
    (
        "llama",
        "llama-15m",
        ["decoder[0].channel.activation=elu"],
        "decoder.channel.activation: 'elu' has no counterpart",
    ),
    ("llama", "llama-15m", ["decoder[0].mixer.positions.fraction=0.5"], "positions.fraction: 0.5 cannot be expressed"),
    ("llama", "llama-15m", ["decoder[0].mixer.positions.scaling={kind: ntk, factor: 2}"], "rope_type: 'ntk' is not"),
    ("llama", "mistral-7b", [], r"decoder\[0\].mixer.pattern: 'causal & window\(\d+\)' cannot be expressed"),
    ("llama", "gpt2", [], "'none' in decoder.mixer.positions has none"),
    ("llama", "bert-base", [], "decoder.mixer.heads: required, but this encoder has none"),
    ("gpt2", "gpt2", ["decoder[0].mixer.kv_heads=1"], r"decoder\[0\].mixer.kv_heads: 1 cannot be expressed"),
    ("gpt2", "gpt2", ["embed.positions=sinusoidal"], "embed.positions.length: required, but 'sinusoidal'"),
    ("gpt2", "gpt2", ["head.bias=true"], "head.bias: True cannot be expressed"),
    ("bloom", "bloom-560m", ["decoder[0].channel.hidden=60"], r"decoder\[0\].channel.hidden: 60 cannot be expressed"),
    ("mistral", "retnet-1.3b", [], "'retention' in decoder.mixer has none"),
    ("gpt_neo", "gpt2", [], r"decoder\[0\].mixer.scores"),
    ("reformer", "reformer", [], r"decoder\[1\].mixer.whole: 0 cannot be expressed"),
]


def changed(preset, changes):
    config = shrink(parse(Model, preset_tree(preset), preset))
    return parse(Model, override(tree_of(config), changes), "changed")


@pytest.mark.parametrize("family, preset, changes, told", REFUSED)
def test_what_a_family_cannot_express_is_refused_by_name(family, preset, changes, told):
    config = changed(preset, changes)
    with pytest.raises(UserError, match=told) as refusal:
        FAMILIES[family].write(config.build())
    assert str(refusal.value).startswith(f"{family}: the family cannot express this model\n")
    assert FAMILIES[family] not in matching_families(config)


def test_all_refusals_are_listed_at_once():
    changes = ["norm.offset=1", "decoder[0].wiring=sandwich", "head.bias=true", "embed.scale=sqrt-width"]
    with pytest.raises(UserError) as refusal:
        FAMILIES["llama"].write_config(changed("llama-15m", changes))
    for told in ("norm.offset", "decoder[0].wiring.kind", "head.bias", "embed.scale"):
        assert f"  {told}: " in str(refusal.value)
