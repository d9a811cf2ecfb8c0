"""Commands that generate text: translate, generate, chat, browse."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from allyouneed.cli.completion import document_formats
from allyouneed.cli.documents import DRAFTS, DocumentCommand, format_of_input, note_lines, translate_documents
from allyouneed.cli.loading import predictor_with, with_draft
from allyouneed.cli.messages import show_notes, show_status
from allyouneed.cli.options import (
    ComputeOptions,
    FileOptions,
    FromOption,
    GenerateOptions,
    JsonOption,
    ModelOption,
    SpecialsOption,
    TextFileOptions,
    ToOption,
    TranslateOptions,
    TranslatorOption,
    argument,
    option,
)
from allyouneed.cli.text.text_input import file_arguments, open_input
from allyouneed.cli.text_commands import Copied, LineHistory, TextCommand, one_line, process, ranked_lines, run
from allyouneed.errors import UserError
from allyouneed.errors.extras import require
from allyouneed.models import shipped

if TYPE_CHECKING:
    from allyouneed.apps.translate.translator import Translation
    from allyouneed.infer.predictors.generator import Generation


def translate(
    texts: Annotated[
        list[str] | None, argument("TEXT", "texts; or an input and an output file; default: standard input")
    ] = None,
    *,
    model: TranslatorOption = None,
    as_json: JsonOption = False,
    align: Annotated[bool, option("--align", help="show which source token each target token attends to most")] = False,
    protect: Annotated[
        bool | None,
        option("--protect/--no-protect", help="keep URLs, code, tags, … as they are; default: if languages are known"),
    ] = None,
    format: Annotated[
        str | None,
        option(
            metavar="FORMAT",
            autocompletion=document_formats,
            help="translate whole documents and keep their markup; auto: by the suffix of the file; or html, md, srt, "
            "vtt, po, xml, text, csv, tsv, docx, pptx, xlsx, odf, epub, xliff, tmx, ts, json, yaml, properties, "
            "strings, ipynb, tex, pdf",
        ),
    ] = None,
    glossary: Annotated[
        Path | None, option(metavar="FILE", help="lines of a term, a tab and its translation; or a term to keep")
    ] = None,
    keep: Annotated[list[str] | None, option(metavar="NAME", help="a name that is not translated; repeatable")] = None,
    memory: Annotated[
        Path | None, option(metavar="FILE", help="TMX of earlier translations: the same is taken, the like is noted")
    ] = None,
    save_memory: Annotated[
        Path | None,
        option("--save-memory", metavar="FILE", help="with --format: add passages and translations to a TMX"),
    ] = None,
    context: Annotated[
        int | None, option(metavar="N", help="read each sentence with the N before it, if the model was trained to")
    ] = None,
    every: Annotated[
        bool, option("--all", help="with PO, XLIFF and TS: translate entries again that have a translation")
    ] = False,
    column: Annotated[
        list[str] | None,
        option(metavar="NAME|N", help="with CSV and TSV: the column to translate, by name or number; repeatable"),
    ] = None,
    header: Annotated[
        bool | None,
        option("--header/--no-header", help="with CSV and TSV: the first row has the names of the columns (default)"),
    ] = None,
    to: ToOption = None,
    from_: FromOption = None,
    compute: ComputeOptions,
    files: FileOptions,
    decoding: TranslateOptions,
) -> None:
    """Translate texts, standard input or a file, line by line, or documents (`--format`).

    `allyouneed translate in.txt out.txt` translates a file into a file, as `--input` and `--output` do (`-`: standard
    input or output), and `allyouneed translate in out --format auto` the documents of a folder. After an interruption,
    run the same command again to resume.

    A multilingual model detects the language of each text. It translates into English, and English into the first
    language of its training data; `--to` selects another.
    """
    from allyouneed.apps.translate.glossary import Glossary
    from allyouneed.apps.translate.splitting.split import CodeFences
    from allyouneed.apps.translate.translator import copied

    texts, files = file_arguments(texts, files, documents=format is not None)
    format = format_of_input(format, column, header, files)
    options = with_draft(decoding, compute, "translate_full", "translate")
    if glossary is not None or keep:
        terms = {} if glossary is None else Glossary.read(glossary).terms
        options |= {"glossary": Glossary(terms | {name: name for name in keep or ()})}
    if memory is not None:
        from allyouneed.apps.translate.documents.memory import TranslationMemory

        options |= {"memory": TranslationMemory.read(memory)}
    if save_memory is not None and format is None:
        raise UserError("--save-memory is for documents; set --format, or remove it")
    if every and format not in (*DRAFTS, "auto"):
        raise UserError("--all is for PO, XLIFF and TS files; set --format po, or remove it")
    if format is not None and (align or protect is not None or decoding.best is not None):
        raise UserError("--align, --best and --protect are for lines; remove them, or --format")
    translator = predictor_with(model or shipped(), compute, "translate_full", "translate")
    if context is not None:
        options |= {"context": context}
    if format is not None:
        table = {"column": column or (), "header": header is not False}
        command = DocumentCommand(translator, format, to, from_, every, options, table, save_memory)
        translate_documents(command, texts, files, as_json)
        return
    note_lines(files)
    best = decoding.best

    keeps_code = getattr(translator, "protects", False) if protect is None else protect

    history = LineHistory(context or 0)

    def predict(texts: list[str], first: int) -> list[Translation]:
        words = ["" if isinstance(text, Copied) else str(text) for text in texts]
        if context:
            options["preceding"] = history.before(first)
            history.add(words, first)
        found = translator.translate_full(
            words, to, from_=from_, align=align, first=first, protect=protect, words=as_json, **options
        )
        return [
            copied(str(text), one) if isinstance(text, Copied) else one for text, one in zip(texts, found, strict=True)
        ]

    def plain(one: Translation) -> str:
        lines = [f"{c.score:.4f}\t{c.text}" if best is not None else c.text for c in one.candidates]
        links = [(link.target.strip() or "␣", link.source.strip() or "␣") for link in one.alignment or []]
        wide = max((len(target) for target, _ in links), default=0)
        lines += [f"  {target:<{wide}} ← {source}" for target, source in links]
        return "\n".join(lines) + ("\n\n" if best is not None or align else "\n")

    lines = TextCommand(
        "translating",
        predict,
        plain,
        lambda one: {"source": one.source, "translation": one.text, **asdict(one)},
        parse=lambda line: line,
        copies=(lambda: history.watch(CodeFences().is_code if keeps_code else None)) if keeps_code or context else None,
    )
    run(lines, texts, files, as_json)


def generate(
    prompts: Annotated[list[str] | None, argument("PROMPT", "texts to continue; default: standard input")] = None,
    *,
    model: ModelOption,
    as_json: JsonOption = False,
    echo: Annotated[bool, option("--echo", help="print the prompt before its continuation")] = False,
    specials: SpecialsOption = False,
    index: Annotated[
        Path | None, option(metavar="FOLDER", help="index to retrieve from (allyouneed index), for RETRO models")
    ] = None,
    image: Annotated[
        list[Path] | None, option(metavar="FILE", help="image in the place of `<image>` in the prompt; repeatable")
    ] = None,
    audio: Annotated[
        list[Path] | None, option(metavar="FILE", help="sound in the place of `<audio>` in the prompt; repeatable")
    ] = None,
    compute: ComputeOptions,
    files: TextFileOptions,
    decoding: GenerateOptions,
) -> None:
    r"""Continue a prompt, streamed; or many prompts.

    With many prompts, or a pipe that stays open, each continuation is one line, and its line breaks are written as
    `\n`; `--json` keeps them.

    Images and sounds, for models that read them, take the places of `<image>` and `<audio>` in every prompt, in order;
    where a prompt has no placeholder, they come first.
    """
    if index is not None:
        require("retrieval", "--index")
    prompts, files = file_arguments(prompts, files)
    source = open_input(prompts, files)
    options = with_draft(decoding, compute, "generate_full", "continue texts")
    options |= {"specials": True} if specials else {}
    generator = predictor_with(model, compute, "generate_full", "continue texts")
    if media := {name: found for name, found in (("images", image), ("audio", audio)) if found}:
        if not hasattr(generator, "read_prompt"):
            raise UserError(f"{model}: reads texts only; remove --image and --audio")
        options |= media
    best = decoding.best
    if index is not None:
        generator.retrieve(index)

    def plain(one: Generation) -> str:
        before = one.prompt if echo else ""
        return ranked_lines(best is not None, [(c.score, one_line(before + c.text)) for c in one.candidates])

    command = TextCommand(
        "writing",
        lambda texts, first: generator.generate_full(texts, first=first, **options),
        plain,
        lambda one: {"prompt": one.prompt, "text": one.text, **asdict(one)},
        blanks=False,
    )
    streams = files.output in (None, Path("-")) and best is None and not as_json
    held = list(islice(source.items, 1)) if streams and not source.interactive else []
    if held and source.ready():
        held += islice(source.items, 1)
        streams = len(held) == 1
    else:
        streams = streams and source.interactive  # of a pipe, more may follow
    if streams:
        for number, (_, prompt) in enumerate(chain(held, source.items)):
            _print_stream(generator.stream(prompt, first=number, **options), prompt if echo else "")
        return
    process(command, replace(source, items=chain(held, source.items)), files, as_json)


def _print_stream(stream: Any, before: str) -> str:
    """Print a continuation while it is generated; the text."""
    text = ""

    def pieces() -> Iterator[str]:
        if before:
            yield before
        nonlocal text
        full = yield from stream
        text = full.text
        yield "\n"
        show_notes([*full.notes, *([] if full.guesses is None else [f"draft: {full.guesses}"])])

    for piece in pieces():
        sys.stdout.write(piece)
        sys.stdout.flush()
    return text


@dataclass(frozen=True, kw_only=True)
class RewardOptions:
    best_of: Annotated[int | None, option("--best-of", min=2, help="draw N answers; needs --reward")] = None
    reward: Annotated[
        Path | None, option(metavar="FOLDER", help="reward model that chooses among the answers of --best-of")
    ] = None

    def check(self) -> None:
        if (self.best_of is None) != (self.reward is None):
            raise UserError("--best-of and --reward belong together; set both")


def _chatter(
    model: Path, compute: ComputeOptions, decoding: GenerateOptions, rewards: RewardOptions
) -> tuple[Any, dict[str, Any]]:
    """A model that chats, and the options of its answers."""
    options = with_draft(decoding, compute, "chat_full", "chat")
    if {"draft", "best"} & set(options):
        raise UserError("chat answers once and without a draft; remove --best and --draft")
    chatter = predictor_with(model, compute, "chat_full", "chat")
    _ = chatter.chat_template  # an error, before anything is typed
    if rewards.reward is not None:
        scorer = predictor_with(rewards.reward, compute, "score", "score answers")
        options |= {"best_of": rewards.best_of, "reward": scorer}
    return chatter, options


def chat(
    messages: Annotated[
        list[str] | None, argument("MESSAGE", "what you say, turn by turn; default: standard input, a line a turn")
    ] = None,
    *,
    model: ModelOption,
    system: Annotated[str | None, option(metavar="TEXT", help="system message at the start of the chat")] = None,
    rewards: RewardOptions,
    as_json: JsonOption = False,
    compute: ComputeOptions,
    decoding: GenerateOptions,
) -> None:
    """Chat with a model that has a chat template. `--json` prints the whole chat at its end, as training reads it."""
    rewards.check()
    chatter, options = _chatter(model, compute, decoding, rewards)
    conversation: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
    for number, (_, text) in enumerate(open_input(messages, TextFileOptions()).items):
        if not text.strip():
            continue
        conversation.append({"role": "user", "content": text})
        if as_json or rewards.reward is not None:
            full = chatter.chat_full(conversation, first=number, **options)
            answer = full.text
            if not as_json:
                print(answer, flush=True)
                show_status(f"reward {full.rewards[0]:.4f}, the best of {len(full.rewards)}")
        else:
            answer = _print_stream(chatter.stream_chat(conversation, first=number, **options), "")
        conversation.append({"role": "assistant", "content": answer})
    if as_json:
        print(json.dumps({"messages": conversation}, ensure_ascii=False))


def browse(
    question: Annotated[str, argument("QUESTION", "what to find out")],
    *,
    pages: Annotated[Path, option("--pages", metavar="FOLDER", help="the pages: .txt and .md files")],
    model: Annotated[
        Path | None, option("--model", "-m", metavar="FOLDER", help="a chat model; default: you type the commands")
    ] = None,
    index: Annotated[
        Path | None, option(metavar="FOLDER", help="search by an index (allyouneed index) instead of by words")
    ] = None,
    lines: Annotated[int, option(min=1, show_default=True, help="lines of a page shown at once")] = 10,
    results: Annotated[int, option(min=1, show_default=True, help="pages found by a search")] = 5,
    max_steps: Annotated[int, option("--max-steps", min=1, show_default=True, help="commands of the model")] = 20,
    rewards: RewardOptions,
    record: Annotated[Path | None, option(metavar="FILE", help="append the session, as `task: chat` reads it")] = None,
    as_json: JsonOption = False,
    compute: ComputeOptions,
    decoding: GenerateOptions,
) -> None:
    """Answer a question with a text browser over a folder of pages: the steps, the answer and its quotes."""
    from allyouneed.apps.browse.browser import HELP, Browser

    rewards.check()
    if model is None and (rewards.reward is not None or decoding.given()):
        raise UserError("--best-of, --reward and decoding options need --model")
    if index is not None:
        require("retrieval", "--index")
    browser = Browser(pages, index, lines, results)
    if model is None:
        session = browser.session(question)
        show_status(f"{question}\nCommands: {HELP}")
        for _, command in open_input(None, TextFileOptions()).items:
            if command.strip():
                _show_indented(session.step(command))
            if session.finished:
                break
    else:
        chatter, options = _chatter(model, compute, decoding, rewards)
        session = browser.ask(chatter, question, max_steps=max_steps, **options)
        for message in () if as_json else session.messages[1:]:
            if message["role"] == "assistant":
                print(f"> {message['content']}")
            else:
                _show_indented(message["content"])
    if record is not None:
        with record.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"messages": session.messages}, ensure_ascii=False) + "\n")
    quotes = [asdict(quote) | {"real": browser.is_real(quote)} for quote in session.quotes]
    if as_json:
        found = {"question": question, "answer": session.answer, "supported": session.supported, "quotes": quotes}
        print(json.dumps(found | {"reward": session.reward, "messages": session.messages}, ensure_ascii=False))
        return
    print(session.answer if session.finished else "no answer")
    for number, quote in enumerate(quotes, 1):
        print(f"[{number}] {quote['title']} ({quote['page']}): {quote['text']}")
    if session.finished and not session.supported:
        show_notes(["the answer cites no quote that stands on its page"])


def _show_indented(text: str) -> None:
    print("\n".join(f"  {line}" for line in text.split("\n")), flush=True)
