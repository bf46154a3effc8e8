"""The noise: reproducible, uniform, and independent along everything that keys it."""

import pytest
import torch

from softprune.errors import ConfigError
from softprune.rng import Clock, _mix, channel_words, logistic_noise, uniform_noise


def at(step=0, forward=0, seed=0):
    clock = Clock(seed)
    clock.load_state_dict({"seed": seed, "step": step, "forward": forward})
    return clock


def sequence(steps, width=64, seed=0, site=0):
    """[steps, width] uniforms, one row for each step."""
    words = channel_words(seed, site, width)
    clock = Clock(seed)
    rows = []
    for _ in range(steps):
        clock.begin_forward()
        rows.append(uniform_noise(clock, words))
        clock.end_step()
    return torch.stack(rows)


def test_the_hash_is_pinned():
    """Changing the noise would change every run that is resumed: the very bits are fixed."""
    u = uniform_noise(at(step=3, forward=1, seed=42), channel_words(42, 5, 4))
    assert (u * 2**23 - 0.5).to(torch.int64).tolist() == [2838912, 6672421, 3443329, 1315655]


def test_the_same_in_python_integers_and_tensors():
    words = [0, 1, 2**31, 2**32 - 1, 123456789]
    assert _mix(torch.tensor(words)).tolist() == [_mix(word) for word in words]
    assert all(0 <= _mix(word) < 2**32 for word in words)


def test_uniform_never_touches_its_ends_and_logistic_is_finite(monkeypatch):
    for bits, expected in [(0, 2.0**-24), (2**32 - 1, 1 - 2.0**-24)]:
        monkeypatch.setattr("softprune.rng._mix", lambda word, bits=bits: word * 0 + bits)
        words = torch.zeros(1, dtype=torch.int64)
        assert uniform_noise(Clock(), words).item() == expected
        assert logistic_noise(Clock(), words).item() == pytest.approx(16.6355 * (1 if bits else -1), abs=1e-3)
        assert uniform_noise(Clock(), words, torch.float64).item() == expected


def test_every_part_of_the_key_matters():
    base = uniform_noise(at(step=1, forward=1), channel_words(0, 0, 128))
    others = [
        uniform_noise(at(step=2, forward=1), channel_words(0, 0, 128)),
        uniform_noise(at(step=1, forward=2), channel_words(0, 0, 128)),
        uniform_noise(at(step=1, forward=1), channel_words(0, 1, 128)),
        uniform_noise(at(step=1, forward=1, seed=1), channel_words(1, 0, 128)),
        uniform_noise(at(step=1, forward=1, seed=2**40), channel_words(2**40, 0, 128)),
        uniform_noise(at(step=1, forward=1, seed=-1), channel_words(-1, 0, 128)),
    ]
    assert torch.equal(base, uniform_noise(at(step=1, forward=1), channel_words(0, 0, 128)))
    for other in others:
        assert (base == other).double().mean() < 0.01
        assert abs(torch.corrcoef(torch.stack([base, other]))[0, 1]) < 0.35


def test_pairs_are_independent():
    """Neighbours along steps, forwards, channels, sites and seeds fill the unit square evenly."""
    u = sequence(1500)
    forwards = []
    words = channel_words(0, 0, 64)
    clock = Clock()
    for _ in range(1500):
        clock.begin_forward()
        forwards.append(uniform_noise(clock, words))
    pairs = {
        "steps": (u[:-1], u[1:]),
        "far steps": (u[:-256], u[256:]),
        "channels": (u[:, :-1], u[:, 1:]),
        "far channels": (u[:, :-32], u[:, 32:]),
        "forwards": (torch.stack(forwards)[:-1], torch.stack(forwards)[1:]),
        "sites": (u, sequence(1500, site=1)),
        "seeds": (u, sequence(1500, seed=1)),
    }
    for name, (first, second) in pairs.items():
        cells = ((first * 8).long() * 8 + (second * 8).long()).flatten()
        counts = torch.bincount(cells, minlength=64).double()
        chi_square = ((counts - cells.numel() / 64) ** 2 / (cells.numel() / 64)).sum()
        assert chi_square < 120, (name, chi_square)  # 63 degrees of freedom: p = 2e-5


def test_counting_of_forwards_and_steps():
    clock = Clock()
    for _ in range(2):
        clock.begin_forward()
    assert clock.state_dict() == {"seed": 0, "step": 0, "forward": 2}
    clock.end_step()
    clock.begin_forward()
    assert clock.state_dict() == {"seed": 0, "step": 1, "forward": 1}


def test_counters_change_in_place_only():
    """A CUDA graph reads the counters at their address."""
    clock = Clock()
    step, forward = clock.step, clock.forward
    clock.begin_forward()
    clock.end_step()
    clock.load_state_dict({"seed": 7, "step": 5, "forward": 0})
    assert clock.step is step
    assert clock.forward is forward
    assert (step.item(), clock.seed) == (5, 7)
    assert clock.to("cpu") is clock


@pytest.mark.parametrize("seed", [1.5, "1", True])
def test_a_seed_is_an_integer(seed):
    with pytest.raises(ConfigError, match="seed of the masks must be an integer"):
        Clock(seed)


def test_compiled_noise_has_the_same_bits():
    words = channel_words(9, 1, 100)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(clock):
        clock.begin_forward()
        return uniform_noise(clock, words)

    eager_clock, compiled_clock = Clock(9), Clock(9)
    for _ in range(3):
        eager_clock.begin_forward()
        assert torch.equal(compiled(compiled_clock), uniform_noise(eager_clock, words))
        eager_clock.end_step()
        compiled_clock.end_step()
    assert compiled_clock.state_dict() == eager_clock.state_dict()
