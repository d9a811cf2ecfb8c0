"""Models written for CTranslate2: it gives the same tokens and probabilities, or the export is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ctranslate2
import numpy
import pytest
import soundfile
import torch
import transformers
from tokenizers import Tokenizer as Inner
from tokenizers import models

import allyouneed as ayn
import hf_models as foreign
import parity
import tiny_whisper as whisperlet
import tokenizer_files as originals
from allyouneed.cli import main
from allyouneed.config import override, parse, preset_tree, tree_of
from allyouneed.data.tokenizers.base import Tokenizer, TokenizerConfig, Vocabularies, train
from allyouneed.data.tokenizers.special_tokens import Template
from allyouneed.errors import UserError
from allyouneed.errors.extras import install_hint
from allyouneed.folder import Folder
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.predictors.forward import NamedForward
from allyouneed.interop import export as interop_export
from allyouneed.interop.ctranslate2 import write as writer
from allyouneed.interop.ctranslate2.readme import readme
from allyouneed.interop.families import FAMILIES
from allyouneed.interop.load import load
from allyouneed.lab.selfcheck_ctranslate2 import against_ctranslate2
from allyouneed.nn.models.base import Model
from shrink import shrink

Ask = Callable[..., tuple[int, str, str]]
WIDE = {"kind": "attention", "heads": 2}
READS = {"repeat": 2, "mixer": {**WIDE}, "channel": {"kind": "ffn", "hidden": 22}}
LOOKS = {"repeat": 2, "mixer": WIDE | {"pattern": "causal"}, "channel": {"kind": "ffn", "hidden": 22}}
PAPER: dict[str, Any] = {
    "kind": "encoder-decoder",
    "vocab": 40,
    "width": 16,
    "embed": {"positions": "sinusoidal", "tied": False},
    "encoder": [READS],
    "decoder": [LOOKS | {"cross": {**WIDE}}],
}
WRITER: dict[str, Any] = {
    "kind": "decoder",
    "vocab": 40,
    "width": 16,
    "embed": {"positions": "none", "scale": "none"},
    "decoder": [LOOKS | {"wiring": "pre-norm", "mixer": LOOKS["mixer"] | {"positions": "rotary"}}],
}
READER: dict[str, Any] = {
    "kind": "encoder",
    "vocab": 40,
    "width": 16,
    "embed": {"positions": {"kind": "learned", "length": 30}, "norm": "layer", "types": 2},
    "encoder": [READS],
    "head": {"kind": "none"},
}
NOT_ADDED = "embed.positions=none"


def both(*changes: str) -> list[str]:
    return [f"{side}.0.{change}" for side in ("encoder", "decoder") for change in changes]


def own(*changes: str) -> list[str]:
    return [f"decoder.0.{change}" for change in changes]


def crossing(*changes: str) -> list[str]:
    return both(*(f"mixer.{change}" for change in changes)) + own(*(f"cross.{change}" for change in changes))


TRANSLATORS = {
    "the paper's": ["embed.tied=true"],
    "sines first, counted from 2": ["embed.positions={kind: sinusoidal, order: halves, closed: true, offset: 2}"],
    "learned places": ["embed.positions={kind: learned, length: 40, offset: 2}"],
    "no places": [NOT_ADDED],
    "norms before": both("wiring=pre-norm"),
    "no last norm": both("wiring={kind: pre-norm, final: false}"),
    "gelu": both("channel.activation=gelu"),
    "silu": both("channel.activation=silu"),
    "quick gelu": both("channel.activation=quick-gelu"),
    "gated": both("channel={kind: glu, hidden: 22, activation: gelu-tanh}"),
    "tied, not scaled, a bias": ["embed.tied=true", "embed.scale=none", "head.bias=true"],
    "some biases": crossing("bias={k: false, out: false}"),
    "no biases": crossing("bias=false") + both("channel.bias=false"),
    "normed embeddings": ["embed.norm=layer"],
    "RMS norms": ["norm={kind: rms, offset: 1}", *both("wiring=pre-norm")],
    "norms without weights": ["norm={kind: layer, eps: 0.001, weight: false, bias: false}"],
    "two vocabularies": ["vocab={source: 40, target: 45}"],
    "a source's own places": ["source_embed={positions: {kind: learned, length: 40}}"],
    "T5": [
        *[NOT_ADDED, "embed.scale=none", "embed.tied=true", "head.scale=inverse-sqrt-width", "norm=rms"],
        *both("wiring=pre-norm", "mixer.positions={kind: buckets, buckets: 8, distance: 6}"),
        *crossing("bias=false", "scores=dot"),
    ],
    "Shaw's distances": [NOT_ADDED, *both("mixer.positions={kind: shaw, distance: 3}")],
    "distances of keys only": [NOT_ADDED, *both("mixer.positions={kind: shaw, distance: 3, values: false}")],
    "turned": [NOT_ADDED, *both("mixer.positions=rotary")],
    "groups of heads": crossing("heads=4", "kv_heads=2"),
    "wide heads": crossing("head_width=6"),
    "normed queries": ["norm=rms", *both("mixer.qk_norm=rms")],
    "shared layers, unlike depths": ["encoder.0.share=true", "decoder.0.repeat=1"],
}
WRITERS = {
    "GPT-2": ["embed.positions={kind: learned, length: 40}", *own("mixer.positions=none")],
    "norms behind": own("wiring=post-norm"),
    "Llama": ["norm=rms", "embed.tied=false", *own("channel={kind: glu, hidden: 22}", "mixer.bias=false")],
    "pairs side by side, a part": own("mixer.positions={kind: rotary, order: interleaved, fraction: 0.5}"),
    "a third turned": own("mixer.head_width=6", "mixer.positions.fraction=0.3333333333333333333"),
    "scaled evenly": own("mixer.positions={kind: rotary, base: 500.0, scaling: {kind: linear, factor: 2.0}}"),
    "scaled as Llama 3": own("mixer.positions.scaling={kind: llama3, factor: 4.0, original: 16}"),
    "YaRN": own("mixer.positions.scaling={kind: yarn, factor: 4.0, original: 16}"),
    "groups": own("mixer.heads=4", "mixer.kv_heads=2"),
    "one key for all": own("mixer.heads=4", "mixer.kv_heads=1"),
    "ALiBi, three heads": ["width=18", *own("mixer.heads=3", "mixer.positions=alibi")],
    "side by side": own("wiring=parallel"),
    "side by side, two norms": own("wiring={kind: parallel, norms: each}"),
    "side by side, RMS": ["norm=rms", *own("wiring=parallel")],
    "sandwich": ["norm={kind: rms, offset: 1}", *own("wiring=sandwich")],
    "capped": ["head.soft_cap=2.0"],
    "normed queries": own("mixer.qk_norm=layer"),
}
KINDS = {name: (PAPER, changes) for name, changes in TRANSLATORS.items()}
KINDS |= {f"writer: {name}": (WRITER, changes) for name, changes in WRITERS.items()}
KINDS |= {"reader": (READER, []), "reader, places before": (READER, ["encoder.0.wiring=pre-norm", "embed.norm=null"])}
ROWS = [[4, 9, 30, 11, 7], [5, 33], [22, 23, 24, 25, 26, 27, 28, 39, 38], [6, 7, 8]]
STEPS = 12


def words(size: int = 40) -> Tokenizer:
    names = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{number}" for number in range(4, size))]
    inner = Inner(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    inner.add_special_tokens(names[:4])
    return Tokenizer(inner)


def built(tree: dict[str, Any], *changes: str) -> Any:
    """Every weight is random, norms and biases too; the source counts more than the tokens generated so far."""
    config = parse(Model, override(tree, list(changes)))
    model, dice = config.build().eval(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 3.0 if "cross.out" in name else 0.5 if parameter.dim() > 1 and "embed" not in name else 0.3
            noise = spread * torch.randn(parameter.shape, generator=dice)
            parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)
    return model


def written(model: Any, out: Path, **more: Any) -> Folder:
    sizes = model.config.vocabs
    source = words(sizes.source)
    target = source if sizes.source == sizes.target else words(sizes.target)
    folder = Folder(model, Vocabularies(source, target), **{"task": {"kind": "causal-lm"}, **more})
    out.mkdir()
    writer.write(folder, out)
    return folder


def names(rows: list[list[int]]) -> list[list[str]]:
    tokens = words(200)
    return [tokens.tokens(row) for row in rows]


# --- the same model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_ctranslate2_gives_the_same_tokens_and_probabilities(name: str, tmp_path: Path) -> None:
    tree, changes = KINDS[name]
    folder = written(built(tree, *changes), tmp_path / "out")
    if tree is READER:
        reads_alike(folder, tmp_path / "out")
    elif tree is WRITER:
        writes_alike(folder, tmp_path / "out")
    else:
        translates_alike(folder, tmp_path / "out")
    reads_back(folder, tmp_path / "out", types=tree is READER)


def reads_back(folder: Folder, out: Path, types: bool) -> None:
    """The folder is imported again: the same logits, the same tokenizers, the same parts."""
    again, sizes = load(out), folder.model.config.vocabs
    rows = [[number % min(sizes.source, sizes.target) for number in row[:6]] for row in ROWS]
    given: dict[str, Any] = {"tokens": rows}
    if types:
        given["types"] = [[number % 2 for number in range(len(row))] for row in rows]
    elif folder.model.config.kind == "encoder-decoder":
        given["targets"] = [[1, *row] for row in rows[::-1]]
    made = [NamedForward(one.model).logits(given) for one in (folder, again)]
    assert parity.difference(made[1], made[0]) < 1e-5
    assert again.tokenizers.hash == folder.tokenizers.hash
    assert again.task["kind"] == ("translation" if "targets" in given else "similarity" if types else "causal-lm")


def translates_alike(folder: Folder, out: Path) -> None:
    theirs = ctranslate2.Translator(str(out), intra_threads=1)
    engine = Engine(folder.model, 1, 2, 0)
    options = {"max_decoding_length": STEPS, "min_decoding_length": 0}
    for beam in (1, 3):
        decoding = Decoding(beam=beam, penalty="power", length_penalty=1.0, early=True, max_length=STEPS)
        ours = names([list(answer[0].tokens) for answer in engine.generate(ROWS, decoding)])
        found = theirs.translate_batch(names(ROWS), beam_size=beam, **options)
        assert [result.hypotheses[0] for result in found] == ours
        assert any(ours)
    targets = ROWS[::-1]
    logits = NamedForward(folder.model).logits({"tokens": ROWS, "targets": [[1, *row] for row in targets]})
    for row, expected, found in zip(targets, logits, theirs.score_batch(names(ROWS), names(targets)), strict=True):
        chances = expected.log_softmax(-1)[range(len(row) + 1), [*row, 2]]
        assert torch.allclose(torch.tensor(found.log_probs), chances, atol=1e-4)


def writes_alike(folder: Folder, out: Path) -> None:
    theirs = ctranslate2.Generator(str(out), intra_threads=1)
    answers = Engine(folder.model, 1, 2, 0).complete(ROWS, Decoding(method="greedy", max_length=STEPS))
    options = {"max_length": STEPS, "include_prompt_in_result": False}
    found = theirs.generate_batch(names(ROWS), sampling_topk=1, **options)
    assert [result.sequences_ids[0] for result in found] == [list(answer[0].tokens) for answer in answers]
    assert len({tuple(result.sequences_ids[0]) for result in found}) > 1
    expected = NamedForward(folder.model).logits({"tokens": ROWS})
    logits = torch.as_tensor(numpy.array(theirs.forward_batch(names(ROWS))))
    for row, one, other in zip(ROWS, expected, logits, strict=True):
        assert torch.allclose(one[: len(row)], other[: len(row)], atol=1e-4)


def reads_alike(folder: Folder, out: Path) -> None:
    theirs = ctranslate2.Encoder(str(out), intra_threads=1)
    types = [[number % 2 for number in range(len(row))] for row in ROWS]
    expected = NamedForward(folder.model).hidden({"tokens": ROWS, "types": types})
    found = theirs.forward_batch(names(ROWS), token_type_ids=types).last_hidden_state
    for row, one, other in zip(ROWS, expected, torch.as_tensor(numpy.array(found)), strict=True):
        assert torch.allclose(one[: len(row)], other[: len(row)], atol=1e-4)


# families of transformers that CTranslate2 runs, one of their small models each
FAMILY = {
    "bart": "odd, unlike sides, relu, scaled",
    "mbart": "small",
    "marian": "two vocabularies",
    "m2m_100": "small",
    "t5": "heads wider than the model, few buckets",
    "mt5": "gated",
    "gpt2": "each layer its scale",
    "opt": "no biases, no last norm",
    "llama": "yarn",
    "mistral": "no window, odd sizes",
    "qwen2": "tied, odd sizes",
    "gemma": "one key for all heads",
    "gpt_neox": "a quarter turned",
    "gptj": "a plane turned, relu",
    "phi": "normalised queries and keys",
    "falcon": "groups of heads, two norms (40B)",
    "bloom": "6 heads, whose slopes are no power of 2",
    "mpt": "7 heads, odd sizes, narrower",
}


@pytest.mark.parametrize("family", FAMILY)
def test_imported_models_are_written_and_read_back(family: str, tmp_path: Path) -> None:
    config, weights = parity.saved(foreign.theirs(family, FAMILY[family]), tmp_path / "theirs")
    folder = written(FAMILIES[family].convert(config, weights), tmp_path / "out")
    folder.save(tmp_path / "ours")
    check = against_ctranslate2(tmp_path / "ours", tmp_path / "out")
    assert check.agreed, check.lines
    assert check.lines[1] == "generated tokens the same 5 of 5 times"
    reads_back(folder, tmp_path / "out", types=False)


@pytest.mark.parametrize("multilingual", [True, False])
def test_a_whisper_transcribes_the_same(
    multilingual: bool, tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = whisperlet.ours(whisperlet.theirs(2, multilingual), tmp_path / "theirs")
    code, out, err = ask(tmp_path / "theirs", tmp_path / "out")
    assert code == 0 and "generated tokens the same 5 of 5 times" in out, (out, err)
    about, speech = json.loads((tmp_path / "out" / "config.json").read_bytes()), model.speech
    assert about["suppress_ids"] == list(speech.suppress) and about["lang_ids"] == sorted(speech.languages.values())
    assert about["suppress_ids_begin"] == list(speech.begin_suppress) and about["alignment_heads"][0] == [1, 0]
    soundfile.write(tmp_path / "out" / "speech.wav", whisperlet.sound(1.0).numpy(), 16_000)
    languages = {"language": next(iter(speech.languages))} if multilingual else {}
    options = {"beam": 5, "temperatures": (0.0,), "silence": None}
    expected = model.transcribe(tmp_path / "out" / "speech.wav", **languages, **options)
    assert run_example(tmp_path / "out", monkeypatch, capsys).strip() == expected != ""
    for ours in (True, False):  # a folder that another converter wrote has no keys of ours
        if not ours:
            del about["allyouneed"]
            (tmp_path / "out" / "config.json").write_text(json.dumps(about))
        again = ayn.load(tmp_path / "out")
        assert again.transcribe(tmp_path / "out" / "speech.wav", **languages, **options) == expected


def test_unsupported_options_of_an_audio_encoder_are_refused(tmp_path: Path) -> None:
    tree = override(tree_of(shrink(parse(Model, preset_tree("whisper-tiny")))), ["encoder.0.channel.activation=relu"])
    with pytest.raises(
        UserError, match=re.escape("encoder[0].channel.activation: 'relu' is not supported (only gelu)")
    ):
        written(parse(Model, override(tree, ["vocab=40"])).build(), tmp_path / "out")
    tree = override(tree, ["encoder.0.channel.activation=gelu", "encoder.0.mixer.head_width=5", "vocab=40"])
    with pytest.raises(
        UserError, match=re.escape("encoder[0].mixer.head_width: 5 is not supported in an audio encoder")
    ):
        written(parse(Model, tree).build(), tmp_path / "other")


# --- the folder and the command ---------------------------------------------------------------------------------------


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """Export a folder: the exit code, and what was printed."""

    def run(*args: Any) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            main(["export", *map(str, args), "--to", "ctranslate2"])
        shown = capsys.readouterr()
        return int(stopped.value.code or 0), shown.out, shown.err

    return run


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """Our model for two languages, over bytes, with short answers; its vocabulary has rows without a token."""
    bytes_ = train(
        TokenizerConfig(vocab=280), ["a small text for a small tokenizer", "and another one"] * 3, ["de", "zh"]
    )
    model = built(PAPER, "vocab=290", "head.bias=true")
    with torch.no_grad():
        model.head.bias[2] += 8.0
    folder = Folder(model, Vocabularies(bytes_, bytes_), directions=[("en", "de"), ("en", "zh")])
    folder.save(tmp_path / "trained")
    return tmp_path / "trained"


def example(out: Path) -> str:
    found = re.search("```python\n(.*)```", (out / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return found[1]


def run_example(out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.chdir(out)
    exec(example(out), {})
    return capsys.readouterr().out.rstrip("\n")


def test_a_model_of_ours_is_written_and_compared(trained: Path, tmp_path: Path, ask: Ask) -> None:
    code, out, err = ask(trained, tmp_path / "out")
    assert code == 0 and "generated tokens the same 5 of 5 times" in out, (out, err)
    assert re.search(r"largest difference of log-probabilities \d\.\de-0\d \(allowed 1e-04\)", out)
    assert "note: position encodings are stored for 1024 tokens" in err
    tokens = json.loads((tmp_path / "out" / "shared_vocabulary.json").read_text(encoding="utf-8"))
    assert len(tokens) == len(set(tokens)) == 290 and tokens[:3] == ["<pad>", "<s>", "</s>"]
    about = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert about["decoder_start_token"] == about["bos_token"] == "<s>" and about["eos_token"] == "</s>"
    assert about["unk_token"] in tokens and about["layer_norm_epsilon"] == 1e-5


def test_the_readme_example_runs(
    trained: Path, tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(trained, tmp_path / "out", "--no-check")[0] == 0
    assert "tokens = ['<2de>', *words.encode(" in example(tmp_path / "out")
    way = {
        "penalty": "power",
        "length_penalty": 1.0,
        "early": True,
        "min_length": 1,
        "loops": None,
        "extra": 300,
        "max_length": 256,
        "protect": False,  # a text without letters is copied
    }
    ours = ayn.load(trained).translate("…", to="de", **way)
    assert run_example(tmp_path / "out", monkeypatch, capsys) == ours != ""


def test_two_tokenizers_and_original_files_come_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = built(PAPER, "vocab={source: 40, target: 45}", "head.bias=true")
    with torch.no_grad():
        model.head.bias[2] += 8.0
    kept = {"vocab.json": b"{}", "config.json": b"theirs", "README.md": b"theirs"}
    folder = written(model, tmp_path / "out", task={"kind": "translation"}, originals=kept)
    assert (tmp_path / "out" / "vocab.json").read_bytes() == b"{}"
    assert json.loads((tmp_path / "out" / "config.json").read_bytes())["eos_token"] == "</s>"
    sizes = [
        len(json.loads((tmp_path / "out" / f"{side}_vocabulary.json").read_bytes())) for side in ("source", "target")
    ]
    assert sizes == [40, 45]
    way = Decoding(penalty="power", length_penalty=1.0, early=True, min_length=1, loops=None, extra=300, max_length=256)
    answer = Engine(folder.model, 1, 2, 0, [0, 1, 3]).generate([[3, 2]], way)[0][0]  # the example's text is unknown
    assert run_example(tmp_path / "out", monkeypatch, capsys) == folder.tokenizers.target.decode(answer.tokens) != ""


def test_the_readme_shows_the_template_of_an_imported_model(tmp_path: Path) -> None:
    source, target = words(), words()
    source.languages = {"de": 4, "en": 5}
    source.template = Template(after=(2,), language="before", spoken=5)
    target.template = Template(opening=(2,), forced=(4,), never=(0,), stops=(7,))
    model = built(PAPER)
    for tokenizer in (source, target):
        tokenizer.foreign = True
    folder = Folder(model, Vocabularies(source, target), {"kind": "translation"}, {"beam": 5})
    writer.write(folder, tmp_path)
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "with these special tokens: `w5` the text `</s>`." in text and "one of de, en" in text
    assert "tokens = ['w5', *words.encode(\"…\", add_special_tokens=False).tokens, '</s>']" in text
    for option in (
        "beam_size=5",
        "target_prefix=[['w4']]",
        "suppress_sequences=[['<pad>']]",
        "end_token=['</s>', 'w7']",
    ):
        assert option in text
    assert json.loads((tmp_path / "config.json").read_bytes())["decoder_start_token"] == "</s>"
    target.template = Template(opening=(2,))
    assert "target_prefix=[['w4']]" in readme(folder, "encoder-decoder")  # one that the text is not in
    source.template, source.languages = Template(before=(1,), after=(2,)), {}
    assert "target_prefix" not in readme(folder, "encoder-decoder")


@pytest.mark.parametrize("tree", [WRITER, READER], ids=["writer", "reader"])
def test_readmes_of_models_with_one_stack(
    tree: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(built(tree), tmp_path / "out")
    said = run_example(tmp_path / "out", monkeypatch, capsys)
    if tree is WRITER:
        answers = Engine(folder.model, 1, 2, 0, [0, 1, 3]).complete([[1, 3]], Decoding(method="greedy", max_length=50))
        assert said == folder.tokenizers.target.decode(answers[0][0].tokens) != ""


def test_half_precision_stays_half(tmp_path: Path, ask: Ask) -> None:
    for name, dtype in (("whole", torch.float32), ("half", torch.bfloat16)):
        model = built(WRITER, "norm=rms").to(dtype)
        Folder(model, Vocabularies(words(), words()), {"kind": "causal-lm"}).save(tmp_path / name)
        code, out, _ = ask(tmp_path / name, tmp_path / f"{name}-out")
        assert code == 0 and "DISAGREE" not in out, out
    sizes = [(tmp_path / f"{name}-out" / "model.bin").stat().st_size for name in ("whole", "half")]
    assert sizes[1] < 0.75 * sizes[0]


def test_an_export_that_differs_is_refused(
    trained: Path, tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = writer.fill_head

    def wrong(spec: Any, head: Any) -> None:
        right(spec, head)
        spec.projection.weight = -spec.projection.weight

    monkeypatch.setattr(writer, "fill_head", wrong)
    code, _, err = ask(trained, tmp_path / "out")
    assert code == 2 and "the export would not be exact" in err and "outputs of a small batch would differ" in err
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(interop_export, "check_exported", lambda *_: None)  # a difference that only CTranslate2 shows
    code, out, _ = ask(trained, tmp_path / "out")
    assert code == 1 and "MISMATCH" in out and not (tmp_path / "out").exists()


def test_a_refused_export_leaves_no_files(tmp_path: Path, ask: Ask) -> None:
    Folder(built(WRITER, "head.maxout=16"), Vocabularies(words(), words()), {"kind": "causal-lm"}).save(tmp_path / "m")
    code, _, err = ask(tmp_path / "m", tmp_path / "out")
    assert code == 2 and "head.maxout: 16 is not supported" in err and not (tmp_path / "out").exists()


def test_pieces_without_an_id_are_unknown(tmp_path: Path) -> None:
    """A tokenizer over SentencePiece models whose vocabulary lacks some of their pieces, as OPUS-MT has them."""
    pad = originals.marian(tmp_path, without=("▁the",))
    ids = {"pad_token_id": pad, "eos_token_id": 0, "decoder_start_token_id": pad, "vocab_size": pad + 4}
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
    sizes |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 20, "decoder_ffn_dim": 20, "init_std": 0.6}
    transformers.MarianMTModel(transformers.MarianConfig(**ids, **sizes)).save_pretrained(tmp_path)
    folder = load(tmp_path, as_stored=True)
    (tmp_path / "out").mkdir()
    writer.write(folder, tmp_path / "out")
    assert (tmp_path / "out" / "source.spm").read_bytes() == (tmp_path / "source.spm").read_bytes()
    text, source = "see the fox", folder.tokenizers.source
    cut = Inner.from_file(str(tmp_path / "out" / "tokenizer.json")).encode(text, add_special_tokens=False).tokens
    numbers = source.encode(text)
    assert "▁the" in cut and numbers[cut.index("▁the")] == 1
    theirs = ctranslate2.Translator(str(tmp_path / "out"), intra_threads=1)
    said = json.loads((tmp_path / "out" / "shared_vocabulary.json").read_bytes())[7]
    scored = theirs.score_batch([[*cut, "</s>"]], [[said]])[0].log_probs
    logits = NamedForward(folder.model).logits({"tokens": [[*numbers, 0]], "targets": [[pad, 7]]})
    assert scored == pytest.approx(logits[0].log_softmax(-1)[[0, 1], [7, 0]].tolist(), abs=1e-4)


# --- unsupported models -----------------------------------------------------------------------------------------------

REFUSED = {
    "head.maxout: 16; decoder[0].mixer.pattern: 'causal & window(4)'; decoder[0].mixer.soft_cap: 3.0": (
        WRITER,
        ["head.maxout=16", *own("mixer.pattern='causal & window(4)'", "mixer.soft_cap=3.0")],
    ),
    "decoder[0].wiring.kind: 'deepnorm'; decoder[0].channel.kind: 'moe'": (
        WRITER,
        own("wiring=deepnorm", "channel={kind: moe, experts: 2, expert: {kind: ffn, hidden: 8}}"),
    ),
    "decoder[0].mixer.kind: 'retention'": (WRITER, own("mixer={kind: retention, heads: 2}")),
    "embed.positions: 'sinusoidal' is not supported beside 'rotary'": (WRITER, ["embed.positions=sinusoidal"]),
    "decoder[0].mixer.positions.xpos: 512.0": (WRITER, own("mixer.positions.xpos=512")),
    "decoder[0].mixer.positions.values: rotated values": (WRITER, own("mixer.positions.values=true")),
    "decoder[0].mixer.positions.octaves: 4.0": (WRITER, own("mixer.positions={kind: alibi, octaves: 4.0}")),
    "scaling: 'yarn' is not supported where only part": (
        WRITER,
        own("mixer.positions={kind: rotary, fraction: 0.5, scaling: {kind: yarn, factor: 4.0, original: 16}}"),
    ),
    "encoder[0].wiring.layer_scale: 0.1": (PAPER, ["encoder.0.wiring={kind: post-norm, layer_scale: 0.1}"]),
    "decoder[0].cross.heads: 4": (PAPER, own("cross.heads=4")),
    "decoder[0].cross.qk_norm.kind: 'layer'": (PAPER, own("cross.qk_norm=layer")),
    "embed.norm: 'rms' with eps 1e-06": (PAPER, ["embed.norm=rms"]),
    "embed.types: 2; embed.inner: 8": (PAPER, ["embed.types=2", "embed.inner=8", "head.transform={}"]),
    "linear.kind: 'bit'": (WRITER, ["linear=bit"]),
    "norm.kind: 'scale'": (PAPER, ["norm=scale"]),
    "encoder[0].coordinates.kind: 'sinusoidal'": (PAPER, ["encoder.0.coordinates=sinusoidal"]),
    "head.kind: 'vocabulary'": (READER, ["head.kind=vocabulary"]),
    "a model of kind two-towers": (tree_of(shrink(parse(Model, preset_tree("clip-vit-b-32")))), []),
}


@pytest.mark.parametrize("reasons", REFUSED)
def test_unsupported_options_are_listed_at_once(reasons: str, tmp_path: Path) -> None:
    tree, changes = REFUSED[reasons]
    with pytest.raises(UserError) as refused:
        written(parse(Model, override(tree, changes)).build(), tmp_path / "out")
    missing = [reason for reason in reasons.split("; ") if reason not in str(refused.value)]
    assert not missing, refused.value
    assert not list((tmp_path / "out").iterdir())


def test_layers_that_differ_in_a_per_stack_option_are_refused(tmp_path: Path) -> None:
    layer = WRITER["decoder"][0]
    mixed = [layer, layer | {"channel": {"kind": "ffn", "hidden": 30, "activation": "gelu"}}]
    with pytest.raises(UserError, match=re.escape("decoder[1].channel.activation: 'gelu'")) as refused:
        written(built(WRITER | {"decoder": mixed}), tmp_path / "out")
    assert "hidden" not in str(refused.value)  # which each layer may have its own


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no tokenizer"):
        writer.write(Folder(built(WRITER), None, {"kind": "causal-lm"}), tmp_path)


def test_a_missing_library_names_the_extra_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allyouneed.errors.extras.is_installed", lambda extra: False)
    with pytest.raises(UserError, match=re.escape(install_hint("ctranslate2"))):
        writer.write(Folder(built(WRITER), None, {"kind": "causal-lm"}), tmp_path)
