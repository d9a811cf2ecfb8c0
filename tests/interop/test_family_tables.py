"""The table of a family says the same in both directions, and each of its keys changes what is read."""

import json
from functools import cache
from itertools import combinations

import pytest

import hf_models as foreign
from allyouneed.config import parse, preset_names, preset_tree
from allyouneed.errors import UserError
from allyouneed.interop.families import FAMILIES, matching_families
from allyouneed.interop.hf.config_writer import canonical_tree
from allyouneed.nn.models.base import Model

WRITTEN_ONLY = {"label2id"}  # the labels of `id2label` once more
UNREAD = "may change what the model computes"
VALUES = (None, True, False, 0, 3, 0.25, "other")
SCALED = {"rope_type": "yarn", "factor": 2.0}  # by the length that the model was trained with


@cache
def exported_presets():
    """For each family, the presets that it can express, as its configs."""
    found = {name: [] for name in FAMILIES}
    for preset in preset_names():
        model = parse(Model, preset_tree(preset))
        for table in matching_families(model):
            found[table.name].append(table.write_config(model))
    return found


def configs(table):
    """The small models of theirs, with each head that the table knows, and the presets."""
    for family, name in foreign.CASES:
        if family == table.name:
            model = foreign.theirs(family, name)
            config = json.loads(model.config.to_json_string()) | {"architectures": [type(model).__name__]}
            config = config if table.prepare is None else dict(table.prepare(config, model.state_dict())[0])
            yield config
            for prefix, kinds in (line.argument for line in table.fields.lines if line.conversion == "class"):
                yield from (config | {"architectures": [prefix + end]} for end in kinds)
    yield from exported_presets()[table.name]


@pytest.fixture(scope="module", params=FAMILIES)
def cases(request):
    """A table, and configs with what it reads in them."""
    table = FAMILIES[request.param]
    return table, [(config, table.tree(config)) for config in configs(table)]


def test_a_config_written_and_read_again_is_the_same_model(cases):
    table, read = cases
    for _, tree in read:
        ours = parse(Model, tree)
        written = table.write_config(ours)
        again = parse(Model, table.tree(written))
        assert canonical_tree(again) == canonical_tree(ours)
        assert table.write_config(again) == written


def test_every_key_of_a_table_changes_what_is_read(cases):
    """In some config, or in one without some other keys: a key may be another name, or count only where one is off."""
    table, read = cases
    configs = [config for config, _ in read] + [table.write_config(parse(Model, tree)) for _, tree in read]
    lines = [line for line in table.fields.lines if line.kind in ("=", "<-", "in")]
    tried = {key: [base for config in configs for base in without(config, line)] for line in lines for key in line.keys}
    assert not [key for key in tried if not any(matters(table, config, key) for config in tried[key])]


def without(config, line):
    """The config, and the config without some of the other keys of a line, or without any one key."""
    yield config
    if "rope_parameters" in line.keys:
        yield config | {"rope_parameters": SCALED}
    for count in range(1, len(line.keys) + 1):
        yield from (omit(config, keys) for keys in combinations(line.keys, count))
    yield from (omit(config, [key]) for key in config)


def omit(config, keys):
    return {key: value for key, value in config.items() if key not in keys}


def matters(table, config, key):
    """Whether another value gives another tree, or a refusal, but not that of a key that nothing reads."""
    found = (outcome(table, changed(config, key, value)) for value in VALUES)
    return key in WRITTEN_ONLY or any(one != outcome(table, config) and UNREAD not in str(one) for one in found)


def changed(config, key, value):
    outer, _, inner = key.rpartition(".")
    return config | ({outer: (config.get(outer) or {}) | {inner: value}} if outer else {key: value})


def outcome(table, config):
    """The tree, or the reason why there is none."""
    try:
        return table.tree(config)
    except (UserError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        return str(error)
