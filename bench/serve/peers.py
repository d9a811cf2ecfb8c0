"""Translation servers as people build them, with LibreTranslate's route: `python bench/serve/peers.py KIND FOLDER`.

ct2: CTranslate2, one request after another, as argos-translate calls it for LibreTranslate. ct2-pool: requests in
parallel, by CTranslate2's own workers (`inter_threads`). ct2-batched: a queue in front of it, whose waiting requests
form the next batch. hf: `generate` of Hugging Face transformers, one request after another. All use beam search of
width 4 and FastAPI with uvicorn; a sentence of more than 40 tokens is split at commas, as our server does, and its
parts form a batch.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

BEAM, LONGEST, MOST = 4, 40, 32
KINDS = ("ct2", "ct2-pool", "ct2-batched", "hf")
Translate = Callable[[list[list[str]]], list[list[str]]]  # tokens to tokens


class Query(BaseModel):
    q: str
    source: str
    target: str


class Text:
    """Tokens of sentences, with the special tokens that the model reads, and back."""

    def __init__(self, folder: Path) -> None:
        import tokenizers

        self.words = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.words.encode_special_tokens = True

    def encode(self, text: str, target: str) -> list[list[str]]:
        return [[f"<2{target}>", *part, "</s>"] for part in self.split(text)]

    def split(self, text: str) -> list[list[str]]:
        tokens = self.words.encode(text, add_special_tokens=False).tokens
        commas = [place for place in range(1, len(text) - 1) if text[place] in ",;，；" or text[place - 1] in ".。"]
        if len(tokens) + 2 <= LONGEST or not commas:
            return [tokens]
        middle = min(commas, key=lambda place: abs(place - len(text) // 2)) + 1
        return self.split(text[:middle].strip()) + self.split(text[middle:].strip())

    def decode(self, parts: list[list[str]]) -> str:
        ids = [[self.words.token_to_id(token) for token in part] for part in parts]
        return " ".join(self.words.decode(part) for part in ids)


def ctranslate2_of(folder: Path, workers: int, threads: int) -> Translate:
    import ctranslate2

    model = ctranslate2.Translator(str(folder), compute_type="int8", inter_threads=workers, intra_threads=threads)
    banned = [[token] for token in ("<pad>", "<s>", "<2de>", "<2en>", "<2fr>", "<2zh>")]

    def translate(sources: list[list[str]]) -> list[list[str]]:
        found = model.translate_batch(
            sources, beam_size=BEAM, max_batch_size=MOST, suppress_sequences=banned, max_decoding_length=90
        )
        return [one.hypotheses[0] for one in found]

    return translate


def transformers_of(folder: Path, threads: int) -> Translate:
    import torch
    import transformers

    torch.set_num_threads(threads)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    words = transformers.AutoTokenizer.from_pretrained(folder)

    def translate(sources: list[list[str]]) -> list[list[str]]:
        longest = max(map(len, sources))
        rows = [words.convert_tokens_to_ids(one) + [0] * (longest - len(one)) for one in sources]
        ids = torch.tensor(rows)
        with torch.inference_mode():
            found = model.generate(input_ids=ids, attention_mask=(ids != 0).long(), max_new_tokens=90)
        return [words.convert_ids_to_tokens([n for n in row if n > 2]) for row in found.tolist()]

    return translate


def one_by_one(app: FastAPI, text: Text, translate: Translate, parallel: bool) -> None:
    lock = threading.Lock()

    @app.post("/translate")
    def route(query: Query) -> dict[str, Any]:
        sources = text.encode(query.q, query.target)
        if parallel:
            found = translate(sources)
        else:
            with lock:
                found = translate(sources)
        return {"translatedText": text.decode(found)}


def batched(app: FastAPI, text: Text, translate: Translate) -> None:
    waiting: list[tuple[list[list[str]], asyncio.Future[list[list[str]]]]] = []
    arrived = asyncio.Event()

    async def work() -> None:
        while True:
            await arrived.wait()
            batch = waiting[:MOST]
            del waiting[:MOST]
            if not waiting:
                arrived.clear()
            sources = [source for sources, _ in batch for source in sources]
            found = iter(await asyncio.to_thread(translate, sources))
            for sources, future in batch:
                parts = [next(found) for _ in sources]
                if not future.done():
                    future.set_result(parts)

    @app.post("/translate")
    async def route(query: Query) -> dict[str, Any]:
        if not hasattr(app.state, "task"):
            app.state.task = asyncio.create_task(work())
        future: asyncio.Future[list[list[str]]] = asyncio.get_running_loop().create_future()
        waiting.append((text.encode(query.q, query.target), future))
        arrived.set()
        return {"translatedText": text.decode(await future)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    app, text = FastAPI(), Text(given.folder)
    if given.kind == "hf":
        one_by_one(app, text, transformers_of(given.folder, given.threads), parallel=False)
    elif given.kind == "ct2":
        one_by_one(app, text, ctranslate2_of(given.folder, 1, given.threads), parallel=False)
    elif given.kind == "ct2-pool":
        one_by_one(app, text, ctranslate2_of(given.folder, given.threads, 1), parallel=True)
    else:
        batched(app, text, ctranslate2_of(given.folder, 1, given.threads))
    uvicorn.run(app, port=given.port, log_level="warning")


if __name__ == "__main__":
    main()
