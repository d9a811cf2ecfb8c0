"""What a server is configured by: where it listens, who may ask, and a limit on every size."""

from __future__ import annotations

from pathlib import Path

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from allyouneed.config import Config

MIB = 1 << 20


class Limits(Config):
    """A request beyond a limit is refused with a 4xx status and one message that contains the number."""

    body_bytes: PositiveInt = 4 * MIB
    upload_bytes: PositiveInt = 32 * MIB  # of a multipart body: sounds and documents
    buffered_bytes: PositiveInt = 512 * MIB  # bodies of all requests in progress together
    body_fields: PositiveInt = 50_000  # fields, lists and objects in a JSON body, at all depths
    header_bytes: PositiveInt = 64 * 1024
    texts: PositiveInt = 2048  # texts or prompts per request
    choices: PositiveInt = 64  # n, best_of and beams of one prompt
    sequences: PositiveInt = 256  # prompts times choices of one request
    stop_words: PositiveInt = 16
    stop_characters: PositiveInt = 256
    logit_bias: PositiveInt = 1024  # entries
    logprobs: PositiveInt = 20
    messages: PositiveInt = 1024
    prompt_characters: PositiveInt = 1_000_000
    upload_seconds: PositiveFloat = 3600  # of sound
    image_pixels: PositiveInt = 50_000_000
    concurrent: PositiveInt = 1024  # requests in progress
    keyless: PositiveInt = 64  # of them, those whose key, if any, is in a body that has not been read
    keyless_bytes: PositiveInt = 256 * 1024  # of such a body
    queue: PositiveInt = 4096  # sequences of one model that are running or waiting
    header_seconds: PositiveFloat = 10  # until the header of a request is complete
    body_seconds: PositiveFloat = 60  # until its body is
    request_seconds: PositiveFloat = 600  # until its answer is
    step_seconds: PositiveFloat = 120  # of a step of an engine, before the server says that it is not ready
    template_seconds: PositiveFloat = 2  # to render a chat template, and to encode what it writes
    template_characters: PositiveInt = 1_000_000
    glossaries: PositiveInt = 1000  # stored ones
    glossary_entries: PositiveInt = 10_000
    glossary_bytes: PositiveInt = MIB
    term_characters: PositiveInt = 1024  # of a term of a glossary


class Settings(Config):
    """`keys`: API keys; empty: no authentication. `hosts`: names allowed in the Host header besides localhost and IP
    addresses ("*": any). `origins`: of web pages that may send requests ("*": any). `rows`, `budget`: of the scheduler.
    `memory`: the most bytes of weights loaded at once. `paged`: models whose prompts can share a prefix keep keys and
    values in blocks; `kv_memory`: bytes of their blocks; `prefix_memory`: bytes of those that cached prefixes may hold
    and no request uses. `glossaries`: folder of stored glossaries; without it they are kept in memory. `runs`: folder
    of training runs that the page may replay. `exact`: every request in exact mode, not only those that ask for it.
    `log_texts`: write request bodies to the log. `open_probes`: /healthz, /readyz and /metrics need no key."""

    host: str = "127.0.0.1"
    port: NonNegativeInt = 8000
    keys: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    device: str = "auto"
    dtype: str | None = None
    rows: PositiveInt = 64
    budget: PositiveInt | None = None  # None: by the device
    memory: PositiveInt | None = None
    paged: bool = True
    kv_memory: PositiveInt | None = None
    prefix_memory: NonNegativeInt | None = None
    glossaries: Path | None = None
    runs: Path | None = None
    exact: bool = False
    grace_seconds: PositiveFloat = 60  # after SIGTERM, until requests in progress are cut off
    log_texts: bool = False
    open_probes: bool = True
    limits: Limits = Limits()
