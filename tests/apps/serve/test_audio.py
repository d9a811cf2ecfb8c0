"""/v1/audio: transcripts are the library's; every format; uploads that are no sounds."""

from __future__ import annotations

import io
import json
import wave
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch

from allyouneed.apps.serve.settings import Limits
from allyouneed.infer.speech.words import token_positions, warp
from served import Running, served_client
from tiny_whisper import ours, sound, theirs
from waiting import until


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return ours(theirs(seed=1), tmp_path_factory.mktemp("whisper") / "tiny")


@pytest.fixture(scope="module")
def served(whisper: Any) -> Iterator[tuple[Running, httpx.Client]]:
    with served_client({"whisper-1": whisper.folder.path}, limits=Limits(upload_seconds=9)) as both:
        yield both


def wav(samples: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes((samples * 32767).short().numpy().tobytes())
    return buffer.getvalue()


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "speech.wav"
    path.write_bytes(wav(sound(2.3, seed=3)))
    return path


def test_the_openai_client_gets_every_format(served: Any, whisper: Any, speech: Path) -> None:
    client = openai.OpenAI(base_url=f"{served[0].url}/v1", api_key="none", max_retries=0)
    options: Any = {"model": "whisper-1", "language": "en"}
    (plain,) = whisper.transcribe_full([speech], language="en")
    assert plain.text
    assert client.audio.transcriptions.create(file=speech, **options).text == plain.text
    options |= {"temperature": 0.2}  # without falling back to others, as random weights always do
    once: Any = {"language": "en", "temperatures": (0.2,)}
    (plain,) = whisper.transcribe_full([speech], **once)
    assert client.audio.transcriptions.create(file=speech, response_format="text", **options) == plain.text + "\n"
    verbose = client.audio.transcriptions.create(
        file=speech, response_format="verbose_json", timestamp_granularities=["word", "segment"], **options
    )
    (timed,) = whisper.transcribe_full([speech], timestamps=True, **once)
    assert verbose.duration == pytest.approx(2.3, abs=0.01) and verbose.language == "en" and verbose.text == timed.text
    assert [(s.start, s.end, s.text) for s in verbose.segments or []] == [
        (s.start, s.end, s.text) for s in timed.segments
    ]
    assert all(s.tokens and s.avg_logprob < 0 and 0 <= s.no_speech_prob <= 1 for s in verbose.segments or [])
    words = verbose.words or []
    assert "".join(word.word for word in words) == "".join(timed.text.split())
    assert all(0 <= word.start <= word.end <= 2.3 for word in words)
    srt = client.audio.transcriptions.create(file=speech, response_format="srt", **options)
    first = timed.segments[0]
    assert str(srt).startswith("1\n00:00:0") and " --> " in str(srt) and first.text in str(srt)
    vtt = client.audio.transcriptions.create(file=speech, response_format="vtt", **options)
    assert str(vtt).startswith("WEBVTT\n\n00:00:0")
    events = list(client.audio.transcriptions.create(file=speech, stream=True, **options))
    assert "".join(event.delta for event in events if event.type == "transcript.text.delta") == plain.text
    assert events[-1].type == "transcript.text.done" and events[-1].text == plain.text
    (english,) = whisper.transcribe_full([speech], task="translate", temperatures=(0.2,))
    assert client.audio.translations.create(file=speech, model="whisper-1", temperature=0.2).text == english.text


def test_sounds_of_several_clients_are_decoded_together(
    served: Any, whisper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, client = served
    sounds = [sound(seconds, seed) for seed, seconds in enumerate((0.7, 1.9, 2.6, 1.2))]
    files = [wav(one) for one in sounds]
    expected = [whisper.transcribe(torch.from_numpy(np.frombuffer(f[44:], "<i2").astype("f4") / 32768)) for f in files]
    client.post("/v1/audio/transcriptions", files={"file": files[0]})
    predictor, sizes = running.model("whisper-1").predictor, []
    decode = predictor.decode_window
    monkeypatch.setattr(
        predictor, "decode_window", lambda tracks, *more: sizes.append(len(tracks)) or decode(tracks, *more)
    )
    with ThreadPoolExecutor(8) as pool:
        found = list(
            pool.map(
                lambda file: client.post("/v1/audio/transcriptions", files={"file": file}).json()["text"], files * 2
            )
        )
    assert found == expected * 2
    assert max(sizes) > 1


@pytest.mark.parametrize(
    ("content", "fields", "message"),
    [
        (b"", {}, "empty"),
        (b"no sound", {}, "sound"),
        (b"RIFF\xff\xff\xff\xffWAVEfmt \xff\xff\xff\x7f", {}, "damaged"),
        (wav(sound(9.5)), {}, "9 s"),
        (wav(sound(0.5)), {"language": "klingon"}, "klingon"),
        (wav(sound(0.5)), {"response_format": "xml"}, "response_format"),
        (wav(sound(0.5)), {"temperature": "nan"}, "temperature"),
        (wav(sound(0.5)), {"temperature": "2"}, "temperature"),
        (wav(sound(0.5)), {"timestamp_granularities[]": "letter"}, "timestamp_granularities"),
        (wav(sound(0.5)), {"url": "http://127.0.0.1/"}, "url"),
    ],
)
def test_uploads_that_are_refused(served: Any, content: bytes, fields: dict[str, str], message: str) -> None:
    answer = served[1].post("/v1/audio/transcriptions", files={"file": content}, data=fields)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text
    assert "/tmp" not in answer.text


def test_forms_without_a_file(served: Any) -> None:
    assert served[1].post("/v1/audio/transcriptions", json={"file": "/etc/passwd"}).status_code == 400
    assert served[1].post("/v1/audio/transcriptions", data={"file": "/etc/passwd"}).status_code == 400
    broken = served[1].post(
        "/v1/audio/transcriptions",
        content=b"--x\r\nnonsense",
        headers={"content-type": "multipart/form-data; boundary=x"},
    )
    assert broken.status_code == 400 and json.loads(broken.text)["error"]["type"] == "invalid_request_error"


def test_words_follow_the_attention() -> None:
    ramp = torch.full((2, 4, 40), 1e-3)
    for token in range(4):
        ramp[:, token, 10 * token : 10 * token + 10] = 1.0
    assert token_positions(ramp) == pytest.approx([0, 10, 20, 30], abs=1)
    assert warp(np.array([[0.0, 9, 9], [9, 0, 0]])) == [0, 1]


def test_tokens_of_transcripts_are_counted(served: Any, speech: Path) -> None:
    def metric(name: str) -> float:
        lines = served[1].get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    names = "vllm:prompt_tokens_total", "vllm:generation_tokens_total"
    before = [metric(name) for name in names]
    with speech.open("rb") as file:
        assert served[1].post("/v1/audio/transcriptions", files={"file": file}).status_code == 200
    until(lambda: all(metric(name) > old for name, old in zip(names, before, strict=True)))
