"""Resampling preserves tones below the new Nyquist frequency and removes those above."""

import math

import pytest
import torch

from allyouneed.data.media.resampling import CROSSINGS, EDGE, STEEPNESS, resample


def tone(hertz, rate, seconds=0.4):
    return torch.sin(2 * torch.pi * hertz * torch.arange(int(seconds * rate), dtype=torch.float64) / rate + 0.3)


@pytest.mark.parametrize("old", [8_000, 11_025, 22_050, 32_000, 44_100, 48_000, 96_000])
@pytest.mark.parametrize("hertz", [50, 440.5, 3_300])
def test_a_tone_keeps_its_frequency(old, hertz):
    found, expected = resample(tone(hertz, old), old, 16_000), tone(hertz, 16_000)
    assert len(found) == len(expected)
    inside = slice(200, -200)  # outside, the sound begins and ends
    torch.testing.assert_close(found[inside], expected[inside].float(), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("hertz", "old"), [(8_300, 44_100), (12_000, 48_000), (21_000, 44_100)])
def test_tones_above_the_new_nyquist_frequency_are_removed(hertz, old):
    assert resample(tone(hertz, old), old, 16_000)[200:-200].abs().max() < 2e-5


def test_resampling_equals_its_definition():
    """Σ x[i] h(t − i), written out, at a rate without a common divisor."""
    old, new = 1_601, 1_000
    sound = torch.randn(300, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    edge = EDGE * new / old
    reach = math.ceil(CROSSINGS / edge)
    found = resample(sound, old, new)
    assert len(found) == math.ceil(300 * new / old)
    for n in (0, 1, 77, len(found) - 1):
        time = n * old / new
        weights = {}
        for i in range(math.floor(time) - reach, math.floor(time) + reach + 2):
            inside = max(0.0, 1 - ((i - time) / (reach + 1)) ** 2)
            window = torch.special.i0(torch.tensor(STEEPNESS * math.sqrt(inside))) if inside else torch.tensor(0.0)
            weights[i] = (torch.sinc(torch.tensor(edge * (i - time))) * window).item()
        wanted = sum(w * sound[i].item() for i, w in weights.items() if 0 <= i < 300) / sum(weights.values())
        assert found[n].item() == pytest.approx(wanted, abs=1e-5)


def test_the_same_rate_and_empty_sounds_change_nothing():
    sound = torch.randn(50)
    assert resample(sound, 16_000, 16_000) is sound
    assert resample(torch.zeros(0), 8_000, 16_000).shape == (0,)
    assert resample(torch.ones(1), 48_000, 16_000).shape == (1,)


def test_resampling_in_blocks_equals_resampling_at_once(monkeypatch):
    sound = torch.randn(9_000, generator=torch.Generator().manual_seed(0))
    whole = resample(sound, 44_100, 16_000)
    monkeypatch.setattr("allyouneed.data.media.resampling.BLOCK", 700)
    torch.testing.assert_close(resample(sound, 44_100, 16_000), whole, atol=1e-6, rtol=0)
