"""A head that the config calls tied, and a file that has a matrix of its own for it: transformers takes the matrix, and
so does ours, both ways."""

import pytest
import torch

import hf_models as foreign
import parity
from allyouneed.interop.families import FAMILIES
from allyouneed.nn.batch import Batch, Rows

TOKENS = torch.tensor([[3, 5, 9, 1, 4]])
WRITERS = [family for family in FAMILIES if foreign.writes(family) and family != "reformer"]  # whose head is wider


@pytest.mark.parametrize("family", WRITERS)
@torch.no_grad()
def test_a_file_with_its_own_head_overrides_a_tied_config(family, tmp_path):
    theirs = foreign.theirs(family, next(name for one, name in foreign.CASES if one == family))
    config, weights = parity.saved(theirs, tmp_path / "saved")
    head = {"gpt_neox": "embed_out.weight", "rwkv": "head.weight"}.get(family, "lm_head.weight")
    own = torch.randn(theirs.get_input_embeddings().weight.shape, generator=torch.Generator().manual_seed(1))
    weights[head], config["tie_word_embeddings"] = own, True
    judged = foreign.load(type(theirs), tmp_path / "theirs", config, weights)
    assert judged.get_output_embeddings().weight.equal(own), "transformers has changed its mind"
    table = FAMILIES[family]
    model = table.convert(config, weights)
    assert model.head.weight.equal(own) and not model.config.embed.tied
    with torch.compiler.set_stance("force_eager"):  # BitNet compiles how it rounds
        expected = judged(input_ids=TOKENS, use_cache=False).logits
    assert parity.difference(model.logits(Batch(Rows(TOKENS))), expected) < parity.TOLERANCE
    found, written = table.write(model, config, table.unused(config, weights))
    assert found == config and written[head].equal(own) and written.keys() == weights.keys()
