"""Configs of published models are understood: our parameter counts are those of their files."""

from pathlib import Path

import pytest
import yaml

from allyouneed.config import parse
from allyouneed.errors import UserError
from allyouneed.interop.families import FAMILIES
from allyouneed.nn.models.base import Model

PUBLISHED = yaml.safe_load((Path(__file__).parents[1] / "support" / "published.yaml").read_text(encoding="utf-8"))
PARAMETERS = {
    "Llama 3.1 8B": 8_030_261_248,
    "Mistral 7B v0.1": 7_241_732_096,
    "Mixtral 8x7B": 46_702_792_704,
    "Qwen2.5 0.5B": 494_032_768,
    "Qwen3 0.6B": 596_049_920,
    "Gemma 2B": 2_506_172_416,
    "Gemma 2 2B": 2_614_341_888,
    "Phi-2": 2_779_683_840,
    "Falcon 7B": 6_921_720_704,
    "Falcon 40B": 41_303_293_952,
    "BLOOM 560m": 559_214_592,
    "MPT 7B": 6_649_286_656,
    "OPT 125m": 125_239_296,
    "Pythia 70m": 70_426_624,
    "GPT-Neo 125m": 125_198_592,
    "GPT-J 6B": 6_050_882_784,
    "StarCoder": 15_517_456_384,
    "GPT-2": 124_439_808,
    "DeepSeek-V2 Lite": 15_706_484_224,
    "BitNet b1.58 2B4T": 2_412_820_480,
    "RWKV-4 169m": 169_342_464,
    "Mamba 130m": 129_135_360,
    "Mamba-2 130m": 128_989_632,
    "Reformer enwik8": 149_182_464,  # without the bias of its head, which is never added
    "Reformer Crime and Punishment": 2_747_904,
}
REFUSED = {"Falcon RW 1B": "alibi: True", "OPT 350m": "word_embed_proj_dim: 512"}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_published_config_round_trips(name):
    config = PUBLISHED[name]
    family = FAMILIES[config["model_type"]]
    ours = parse(Model, family.tree(config), name)
    assert ours.cost().parameters == PARAMETERS[name]
    assert parse(Model, family.tree(family.write_config(ours)), name).cost() == ours.cost()


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_configs_are_refused_by_name(name):
    with pytest.raises(UserError, match=REFUSED[name]):
        FAMILIES[PUBLISHED[name]["model_type"]].tree(PUBLISHED[name])


def test_every_published_config_is_counted_or_refused():
    assert PUBLISHED.keys() == PARAMETERS.keys() | REFUSED.keys()
