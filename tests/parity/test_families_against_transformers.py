"""Every family there is: it reads what transformers writes, and refuses a key it has not heard of."""

import pytest
from transformers import CONFIG_MAPPING

from allyouneed.errors import UserError
from allyouneed.interop.families import FAMILIES


@pytest.mark.parametrize("name", FAMILIES)
def test_a_new_key_is_refused_by_name(name):
    config = CONFIG_MAPPING[name]().to_dict()
    if config.get("num_experts_per_tok", 1) is None:  # DeepSeek-V2's default is no model
        config["num_experts_per_tok"] = 6
    assert FAMILIES[name].tree(config)["kind"]
    with pytest.raises(UserError, match="trick_of_tomorrow: 1"):
        FAMILIES[name].tree(config | {"trick_of_tomorrow": 1})
