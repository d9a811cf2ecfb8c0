"""Config is data: valid trees round-trip without loss; all problems are reported at once, by path."""

from typing import ClassVar, Literal

import pytest
import torch
import yaml
from torch import Tensor

from allyouneed.config import Config, ConfigError, Part, override, parse, preset_tree, read_tree, to_yaml, tree_of
from allyouneed.errors import UserError
from allyouneed.nn.batch import Rows
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context
from allyouneed.nn.cost import Cost
from allyouneed.nn.models.base import Model
from allyouneed.nn.patterns.core import Causal, Window
from allyouneed.nn.states.base import State
from allyouneed.nn.sublayer import Mixer, SubLayer
from any_part import CASES, build, reference_logits, tree

DESIGN_EXAMPLE = "decoder[0].mixer.patern: unknown; did you mean 'pattern'?"


def problems(*assignments, start="transformer-tiny"):
    with pytest.raises(ConfigError) as caught:
        parse(Model, override(preset_tree(start), assignments))
    return caught.value.problems


# --- reading and writing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_every_part_is_written_and_read_back(name):
    config = parse(Model, CASES[name])
    for full in (True, False):
        assert parse(Model, yaml.safe_load(to_yaml(config, full))) == config


def test_full_writes_every_default_and_short_none():
    config = parse(Model, tree())
    assert tree_of(config)["encoder"][0]["mixer"]["bias"] is True
    assert "bias" not in tree_of(config, full=False)["encoder"][0]["mixer"]
    assert tree_of(config)["decoder"][0]["mixer"]["pattern"] == "causal"
    assert tree_of(config, full=False)["decoder"][0]["mixer"]["pattern"] == "causal"


def test_a_bare_kind_is_a_part_with_its_defaults():
    short, long = tree(norm="rms"), tree(norm={"kind": "rms"})
    assert parse(Model, short) == parse(Model, long)
    assert tree_of(parse(Model, short), full=False)["norm"] == "rms"


def test_configs_are_frozen_and_hashable():
    config = parse(Model, tree())
    with pytest.raises(ValueError, match="frozen"):
        config.width = 13
    with pytest.raises(ValueError, match="frozen"):
        config.encoder[0].mixer.heads = 13
    assert hash(config) == hash(parse(Model, tree()))
    assert len({config, parse(Model, tree()), parse(Model, tree(dropout=0.5))}) == 2
    assert Causal() & Window(size=3) == Causal() & Window(size=3) != Causal() & Window(size=4)


# --- messages -------------------------------------------------------------------------------------------------------


def test_a_typo_gets_the_message_of_the_design_page():
    (problem,) = problems("decoder[0].mixer.patern=causal")
    assert problem.startswith(DESIGN_EXAMPLE)
    allowed = "bias, cache, dropout, head_width, heads, kind, kv_heads, pattern, positions, qk_norm, scores, soft_cap, "
    allowed += "sub_norm"
    assert f"(allowed: {allowed})" in problem


def test_the_error_is_a_user_error_whose_text_is_the_problems():
    with pytest.raises(UserError) as caught:
        parse(Model, override(preset_tree("transformer-tiny"), ["wdith=3", "dropout=2"]), "my.yaml")
    lines = str(caught.value).splitlines()
    assert lines[0] == "my.yaml: 2 problems"
    assert {line.strip().split(":")[0] for line in lines[1:]} == {"wdith", "dropout"}


def test_all_problems_are_reported_at_once_and_nothing_else():
    found = problems(
        "width=wide",
        "dropuot=0.1",
        "encoder[0].mixer.heads=-1",
        "encoder[0].channel.activation=rellu",
        "decoder[0].mixer.kind=atention",
        "decoder[0].cross.pattern=casual",
    )
    assert sorted(problem.split(": ")[0] for problem in found) == [
        "decoder[0].cross.pattern",
        "decoder[0].mixer.kind",
        "dropuot",
        "encoder[0].channel.activation",
        "encoder[0].mixer.heads",
        "width",
    ]


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("width=wide", "width: expected an integer, not 'wide'"),
        ("width=0", "width: must be greater than 0, not 0"),
        ("dropout=1", "dropout: must be less than 1, not 1"),
        ("encoder=5", "encoder: "),
        ("encoder[0].mixer=5", "encoder[0].mixer: expected the name of a token mixer or keys with 'kind', not 5"),
        (
            "encoder[0].mixer=[attention]",
            "encoder[0].mixer: expected the name of a token mixer or keys with 'kind', not [",
        ),
        ("encoder[0].mixer={}", "encoder[0].mixer.kind: 'kind' is missing (allowed: attention"),
        (
            "encoder[0].mixer.kind=atention",
            "encoder[0].mixer.kind: unknown token mixer 'atention'; did you mean 'attention'?",
        ),
        ("encoder[0].mixer.kind=[attention]", "encoder[0].mixer.kind: "),
        ("encoder[0].mixer=attention", "encoder[0].mixer.heads: is required"),
        ("encoder[0].wiring=postnorm", "encoder[0].wiring.kind: unknown wiring 'postnorm'; did you mean 'post-norm'?"),
        ("norm=lyer", "norm.kind: unknown norm 'lyer'; did you mean 'layer'?"),
        ("embed.positions=sinus", "embed.positions.kind: unknown positions 'sinus'; did you mean 'sinusoidal'?"),
        ("embed.positions={kind: sinusoidal, order: odd}", "embed.positions.order: 'odd' is not allowed; expected "),
        ("kind=encoder-decodr", "kind: unknown model 'encoder-decodr'; did you mean 'encoder-decoder'?"),
        ("decoder[0].mixer.pattern={kind: window}", "decoder[0].mixer.pattern.size: is required"),
        (
            "encoder[0].channel.activation=rellu",
            "encoder[0].channel.activation: 'rellu' is not allowed; expected",
        ),
    ],
)
def test_one_mistake_is_one_message_at_its_path(assignment, said):
    (problem,) = problems(assignment)
    assert problem.startswith(said)


@pytest.mark.parametrize(
    ("value", "path"),
    [("-5", "vocab"), ("many", "vocab"), ("{source: 5}", "vocab.target"), ("{source: 5, target: 0}", "vocab.target")],
)
def test_a_wrong_vocabulary_is_named_by_the_key_a_person_wrote(value, path):
    (problem,) = problems(f"vocab={value}")
    assert problem.split(": ")[0] == path


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_an_empty_stack_is_refused(side):
    (problem,) = [problem for problem in problems(f"{side}=[]") if problem.startswith(f"{side}: ")]
    assert "at least 1" in problem


def test_a_model_without_a_width_says_so():
    broken = preset_tree("transformer-tiny")
    del broken["width"]
    with pytest.raises(ConfigError) as caught:
        parse(Model, broken)
    assert caught.value.problems == ["width: is required"]


@pytest.mark.parametrize(
    ("assignments", "expected"),
    [
        (
            ["encoder[0].mixer.heads=7"],
            ["encoder[0].mixer.heads: width 128 is not divisible by 7 heads; set head_width or change one"],
        ),
        (
            ["decoder[0].mixer.pattern=full"],
            [
                "decoder[0].mixer: a decoder must not attend to later tokens, but full attends to later tokens; "
                "set a causal pattern"
            ],
        ),
        (
            ["decoder[0].mixer.pattern=causal | window(2)"],
            [
                "decoder[0].mixer: a decoder must not attend to later tokens, but window(2) attends to later tokens; "
                "set a causal pattern"
            ],
        ),
        (
            ["encoder[0].cross={kind: attention, heads: 4}"],
            ["encoder[0].cross: this stack has no source to attend to; remove cross"],
        ),
        (["decoder[0].cross=null"], ["decoder: no layer has a cross, so the decoder would ignore the source; add one"]),
        (
            ["encoder[0].mixer=null", "encoder[0].channel=null"],
            ["encoder[0]: empty layer; set mixer, cross or channel"],
        ),
        (
            ["decoder[0].mixer.pattern=full", "decoder[0].cross.heads=3"],
            [
                "decoder[0].cross.heads: width 128 is not divisible by 3 heads; set head_width or change one",
                "decoder[0].mixer: a decoder must not attend to later tokens, but full attends to later tokens; "
                "set a causal pattern",
            ],
        ),
    ],
)
def test_impossible_combinations_are_refused_by_path(assignments, expected):
    assert sorted(problems(*assignments)) == expected


def test_head_width_makes_any_number_of_heads_possible():
    assert parse(
        Model, override(preset_tree("transformer-tiny"), ["encoder[0].mixer.heads=7", "encoder[0].mixer.head_width=5"])
    )


# --- overrides and files --------------------------------------------------------------------------------------------


def test_overrides_reach_every_place_and_leave_the_original_alone():
    original = preset_tree("transformer-tiny")
    before = yaml.safe_dump(original)
    changed = override(
        original,
        ["width=64", "encoder[0].mixer.heads=2", "decoder[0].mixer.pattern=causal & window(3)", "norm.kind=rms"],
    )
    config = parse(Model, changed)
    assert (config.width, config.encoder[0].mixer.heads) == (64, 2)
    assert config.decoder[0].mixer.pattern == Causal() & Window(size=3)
    assert config.norm.kind == "rms"
    assert yaml.safe_dump(original) == before


def test_an_override_may_say_more_about_a_bare_word():
    changed = override({"embed": {"positions": "sinusoidal"}}, ["embed.positions.order=halves"])
    assert changed == {"embed": {"positions": {"kind": "sinusoidal", "order": "halves"}}}


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("width", "--set 'width': expected key=value, e.g. width=256 or encoder[0].mixer.heads=4"),
        ("=3", "--set '=3': expected key=value"),
        ("width={", "--set 'width={': '{' is not a valid YAML value"),
        ("encoder[3].repeat=1", "--set 'encoder[3].repeat=1': encoder has entries 0 to 0, not '3'"),
        ("encoder.mixer.heads=1", "--set 'encoder.mixer.heads=1': encoder has entries 0 to 0, not 'mixer'"),
        ("width.x=1", "--set 'width.x=1': width is a value and has no keys"),
    ],
)
def test_a_bad_override_is_named(assignment, said):
    with pytest.raises(UserError) as caught:
        override(preset_tree("transformer-tiny"), [assignment])
    assert str(caught.value).startswith(said)


def test_an_override_of_an_unknown_key_is_refused_when_parsed():
    (problem,) = problems("encoder[0].mixer.haeds=4")
    assert problem.startswith("encoder[0].mixer.haeds: unknown; did you mean 'heads'?")


def test_an_unknown_preset_gets_a_suggestion():
    with pytest.raises(
        UserError, match=r"'transformer-bas': unknown preset, and not a YAML file; did you mean 'transformer-base'\?"
    ):
        preset_tree("transformer-bas")


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.yaml: cannot read: No such file"):
        preset_tree(str(tmp_path / "nowhere.yaml"))
    (tmp_path / "latin.yaml").write_bytes(b"width: \xff")
    with pytest.raises(UserError, match=r"latin\.yaml: cannot read: not UTF-8 text"):
        read_tree(tmp_path / "latin.yaml")
    (tmp_path / "broken.yaml").write_text("a: [1,")
    with pytest.raises(UserError, match=r"broken\.yaml: not valid YAML"):
        read_tree(tmp_path / "broken.yaml")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(UserError, match=r"broken\.json: not valid JSON"):
        read_tree(tmp_path / "broken.json")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(UserError, match=r"list\.yaml: expected a mapping of keys, got list"):
        preset_tree(str(tmp_path / "list.yaml"))


def test_a_yaml_file_is_as_good_as_a_preset(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("\ufeff" + to_yaml(parse(Model, tree())), encoding="utf-8")  # with the mark some editors write
    assert parse(Model, preset_tree(str(file))) == parse(Model, tree())


# --- registering is subclassing -------------------------------------------------------------------------------------


@pytest.fixture
def mean_mixer():
    """A part a contributor might write: each token gets the mean of all tokens so far, through one matrix."""

    class MeanState(State):
        def __init__(self) -> None:
            self.sums: list[Tensor] = []  # the running sum after each token, (batch, width) each

        def select(self, rows: Tensor) -> None:
            self.sums = [total[rows] for total in self.sums]

        def trim(self, length: int) -> None:
            self.sums = self.sums[:length]

        @property
        def bytes(self) -> int:
            return sum(total.numel() * total.itemsize for total in self.sums)

    class MeanModule(SubLayer):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.out = torch.nn.Linear(width, width)

        def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
            sums = x.cumsum(1)
            first = 0
            if isinstance(state, MeanState):
                first = len(state.sums)
                if state.sums:
                    sums = sums + state.sums[-1][:, None]
                state.sums += list(sums.unbind(1))
            counts = torch.arange(first + 1, first + 1 + x.shape[1], dtype=x.dtype)[:, None]
            return self.out(sums / counts)

        def new_state(self) -> State:
            return MeanState()

    class Mean(Mixer):
        kind: Literal["toy-mean"] = "toy-mean"
        causal: ClassVar[bool] = True  # type: ignore[misc]

        def build(self, common: Common) -> SubLayer:
            return MeanModule(common.width)

        def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
            return common.linear.cost(common.width, common.width, True) + Cost(state_per_token=common.width)

    yield Mean
    del Mixer.registry["toy-mean"]


def test_a_new_mixer_works_in_yaml_by_being_defined(mean_mixer):
    """Read, checked, counted, built, trained on and decoded stepwise; nothing else knows of it."""
    text = to_yaml(parse(Model, tree(mixer="toy-mean", encoder_mixer="toy-mean")))
    assert "toy-mean" in text
    config = parse(Model, yaml.safe_load(text))
    assert config.decoder[0].mixer == mean_mixer()
    assert config.cost().parameters == sum(p.numel() for p in config.build().parameters())
    model = build(config)
    source, target = [3, 4], [1, 2, 3, 4, 5]
    whole = reference_logits(model, (source, target))
    with torch.no_grad():
        states = model.start(Rows(torch.tensor([source])))
        states.repeat_rows(2)
        steps = [model.head(model.advance(Rows(torch.tensor([[token]] * 2)), states))[:, 0] for token in target]
        for row in range(2):
            torch.testing.assert_close(torch.stack([step[row] for step in steps]), whole)
        states.trim(2)
        again = model.head(model.advance(Rows(torch.tensor([target[2:]] * 2)), states))
        torch.testing.assert_close(again[1], whole[2:])
    assert sum(state.bytes for layer in states.layers for state in layer.values() if not state.shared) == (
        8 * 2 * len(target) * config.cost().state_per_token
    )


def test_a_mixer_that_cannot_cross_is_refused_as_cross(mean_mixer):
    with pytest.raises(ConfigError) as caught:
        parse(Model, tree(cross="toy-mean"))
    assert caught.value.problems == ["decoder[0].cross.kind: does not support cross-attention; use attention"]


def test_the_kind_of_a_new_part_is_suggested_until_it_is_removed(mean_mixer):
    with pytest.raises(ConfigError, match=r"unknown token mixer 'toy-maen'; did you mean 'toy-mean'\?"):
        parse(Model, tree(mixer="toy-maen"))


def test_two_parts_may_not_share_a_kind():
    class Toy(Part, slot="toy"):
        pass

    class First(Toy):
        kind: Literal["same"] = "same"

    with pytest.raises(TypeError, match="Second: the slot 'toy' already has a part of kind 'same'"):

        class Second(Toy):
            kind: Literal["same"] = "same"

    class Box(Config):
        toy: Toy

    assert parse(Box, {"toy": "same"}).toy == First()


MLA = "{kind: mla, heads: 4, kv_rank: 16, nope_width: 8, rope_width: 8, value_width: 8, pattern: causal, "
MLA += "scores: additive}"


@pytest.mark.parametrize(
    ("assignment", "path", "reason"),
    [
        (
            "encoder[0].mixer.positions=alibi",
            "encoder[0].mixer.positions.symmetric",
            "must be true for bidirectional attention",
        ),
        (
            "encoder[0].mixer.positions={kind: rotary, xpos: 512}",
            "encoder[0].mixer.positions.xpos",
            "requires a causal",
        ),
        (
            "decoder[0].mixer.positions={kind: buckets, bidirectional: true}",
            "decoder[0].mixer.positions.bidirectional",
            "half of the buckets would be unused",
        ),
        (
            "decoder[0].mixer.pattern=causal & window(64) | global(0)",
            "decoder[0].mixer",
            "global(0) lets position 0 attend to everything",
        ),
        ("decoder[0].mixer.pattern=permuted", "decoder[0].mixer", "permuted attends to tokens"),
        (f"decoder[0].mixer={MLA}", "decoder[0].mixer.scores", "needs a bilinear score"),
        (
            "decoder[0].cross.positions=rotary",
            "decoder[0].cross.positions",
            "distances between source and target are undefined",
        ),
        ("decoder[0].mixer.kv_heads=3", "decoder[0].mixer.kv_heads", "4 heads not divisible by 3 kv_heads"),
        (
            "decoder[0].mixer.qk_norm=batch",
            "decoder[0].mixer.qk_norm",
            "one token's features; this norm uses other tokens",
        ),
        (
            "encoder[0].channel={kind: moe, experts: 2, top: 3, expert: {kind: ffn, hidden: 8}}",
            "encoder[0].channel.top",
            "3 exceeds the number of experts (2)",
        ),
        (
            "encoder[0]={halt: act, wiring: resi-dual, channel: {kind: ffn, hidden: 8}}",
            "encoder[0].wiring",
            "one stream",
        ),
    ],
)
def test_parts_that_cannot_go_together_are_refused_with_the_reason(assignment, path, reason):
    (problem,) = problems(assignment)
    assert problem.startswith(f"{path}: ")
    assert reason in problem
