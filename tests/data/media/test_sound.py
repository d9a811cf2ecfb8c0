"""Log-mel frames, without a reference (with one: tests/parity/test_whisper_against_transformers.py)."""

import pytest
import torch

from allyouneed.data.media.sound import HOP, RATE, log_mel, mel_filters
from allyouneed.errors import UserError


def tone(hertz, seconds=1.0):
    return 0.5 * torch.sin(2 * torch.pi * hertz * torch.arange(int(seconds * RATE)) / RATE)


def test_a_frame_every_ten_milliseconds():
    assert log_mel(tone(440)).shape == (80, 100)
    assert log_mel(tone(440), mels=40, seconds=3).shape == (40, 300)
    assert log_mel(torch.stack([tone(440), tone(880)]).view(2, 1, -1)).shape == (2, 1, 80, 100)


def test_higher_tones_excite_higher_filters():
    loudest = [log_mel(tone(hertz)).mean(1).argmax().item() for hertz in (200, 400, 800, 1600, 3200, 6400)]
    assert loudest == sorted(set(loudest))


def test_each_filter_peaks_where_slaneys_scale_says():
    """Below 1000 Hz the filters are evenly spaced; each has area 1 on the frequency axis."""
    filters, step = mel_filters(40), RATE / 400
    assert (filters >= 0).all() and filters.shape == (40, 201)
    peaks = filters.argmax(1) * step
    low = peaks[peaks < 900]
    assert (low.diff() - low.diff().mean()).abs().max() <= step
    assert (peaks.diff()[-5:] > low.diff().mean()).all()
    torch.testing.assert_close((filters * step).sum(1)[5:], torch.ones(35), rtol=0.12, atol=0)


def test_frames_do_not_depend_on_the_batch_and_silence_is_the_floor():
    loud, quiet = tone(440), 0.01 * tone(3000)
    both = log_mel(torch.stack([loud, quiet]))
    torch.testing.assert_close(both[0], log_mel(loud))
    torch.testing.assert_close(both[1], log_mel(quiet))
    assert log_mel(torch.zeros(RATE)).unique().tolist() == [-1.5]
    assert both[0].max() - both[0].min() <= 2 + 1e-6, "eight powers of ten, divided by four"


def test_sounds_are_padded_with_silence_or_cut():
    sound = tone(440, 0.5)
    torch.testing.assert_close(log_mel(sound, seconds=1), log_mel(torch.cat([sound, torch.zeros(RATE // 2)])))
    torch.testing.assert_close(log_mel(sound, seconds=0.25), log_mel(sound[: RATE // 4]))


@pytest.mark.parametrize(
    ("sound", "more", "said"),
    [
        (torch.zeros(RATE), {"rate": 44100}, "44,100 samples per second; expected 16,000, resample"),
        (torch.zeros(RATE, dtype=torch.int16), {}, "between -1 and 1"),
        (torch.zeros(HOP), {}, "sound of 160 samples is too short; the first frame needs 201"),
    ],
)
def test_invalid_sound_is_rejected(sound, more, said):
    with pytest.raises(UserError, match=said):
        log_mel(sound, **more)
