"""Noise of the masks, a pure function of (seed, step, forward, site, channel), and order and augmentation of images.

An integer hash in tensor operations rather than a random generator: it needs no state beyond two counters,
so that the noise is the same on every rank, after a resume, eager, compiled and inside a CUDA graph.
"""

from collections import deque
from typing import Any, TypeVar

import torch
from torch import Tensor

from softprune.errors import ConfigError, ModelError, is_integer

Word = TypeVar("Word", int, Tensor)

_MASK = 0xFFFFFFFF
# Keep the (step, forward) words and the (site, channel) words of one seed apart.
_TIME, _PLACE = 0x74696D65, 0x73697465
_REMEMBERED = 1024
"""Forwards of a step whose noise an activation checkpoint can repeat."""


@torch.library.custom_op("softprune::tick", mutates_args=("counter",))
def _tick(counter: Tensor) -> Tensor:
    """Advance a counter in place and return a copy of it.

    An operator of its own, because torch.compile likes to compute cheap things again in backward: from the
    counter itself, which has moved by then, it would arrive at the noise of another forward.
    """
    counter.add_(1)
    return counter.clone()


@_tick.register_fake
def _(counter: Tensor) -> Tensor:
    return torch.empty_like(counter)


def in_backward() -> bool:
    """Whether autograd runs: a forward that begins now is one that an activation checkpoint recomputes."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class Clock:
    """The position in training: the optimizer's step, and the root forward within it.

    Both are 0-d int64 tensors that only ever change in place; reading and advancing them never waits for the
    device. A gate that is sampled before any forward was announced sees forward 0.
    """

    step: Tensor
    """Optimizer steps taken."""
    forward: Tensor
    """Root training forwards begun since the last step; the first one of a step is number 1."""
    reading: Tensor
    """``forward`` as the forward in progress has read it: what its noise depends on. Between two steps it is
    ``forward`` itself: a tensor that stays, because a CUDA graph of a step goes on reading where it has read first."""

    def __init__(self, seed: int = 0, device: torch.device | str | None = None) -> None:
        if not is_integer(seed):
            raise ConfigError(f"The seed of the masks must be an integer. Got {seed!r}.")
        self.seed = int(seed)
        self.step = torch.zeros((), dtype=torch.int64, device=device)
        self.forward = torch.zeros((), dtype=torch.int64, device=device)
        self.reading = self.forward
        self._forwards: deque[tuple[int, Tensor]] = deque(maxlen=_REMEMBERED)
        """The first number that autograd gave to a node of each forward of this step, and its reading."""

    def begin_forward(self) -> None:
        """Begin a training forward of the whole model: fresh noise."""
        self.reading = _tick(self.forward)
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            self._forwards.append((torch._C._autograd._get_sequence_nr(), self.reading))

    def now(self) -> Tensor:
        """Return what the noise depends on: ``reading`` or, in backward, that of the forward that is recomputed.

        Activation checkpoints recompute a forward while one of its nodes goes backward.
        """
        node = None if torch.compiler.is_compiling() else torch._C._current_autograd_node()
        if node is None:
            return self.reading
        if torch.is_grad_enabled() and torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
            raise ModelError(
                "activation checkpoints of a masked network must not be reentrant. Got one that is; pass "
                "use_reentrant=False to torch.utils.checkpoint."
            )
        number = node._sequence_nr()  # type: ignore[attr-defined]
        return next((reading for first, reading in reversed(self._forwards) if first <= number), self.reading)

    def end_step(self, skipped: Tensor | None = None) -> None:
        """Count one optimizer step, unless `skipped` (a GradScaler's found_inf, on the device) is not zero.

        A skipped step leaves both counters alone, so that the forwards which repeat it draw fresh noise.
        """
        if skipped is None:
            self.step.add_(1)
            self.forward.zero_()
        else:
            taken = (skipped == 0).all().to(self.step.device)
            self.step.add_(taken)
            self.forward.mul_(~taken)
        self._between_steps()

    def to(self, device: torch.device | str) -> "Clock":
        """Move the counters; the clock stays the same object."""
        announced = self.reading is not self.forward
        self.step, self.forward = self.step.to(device), self.forward.to(device)
        self.reading = self.reading.to(device) if announced else self.forward
        return self

    def state_dict(self) -> dict[str, int]:
        """Seed and counters as plain integers (reads the device)."""
        return {"seed": self.seed, "step": int(self.step), "forward": int(self.forward)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from :meth:`state_dict`; the counters are written in place."""
        self.seed = state["seed"]
        self.step.fill_(state["step"])
        self.forward.fill_(state["forward"])
        self._between_steps()

    def _between_steps(self) -> None:
        self.reading = self.forward
        self._forwards.clear()


def channel_words(seed: int, site: int, width: int, device: torch.device | str | None = None) -> Tensor:
    """One 32-bit word for each channel of a site, in int64: the part of the hash that never changes."""
    key = _absorb(_seed_word(seed, _PLACE), site)
    return _mix(torch.arange(width, dtype=torch.int64, device=device) ^ key)


def uniform_noise(clock: Clock, words: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """u in (0, 1), one for each of ``channel_words``, for the clock's step and forward.

    23 bits and a half: exact in float32, symmetric about 1/2, and never 0 or 1.
    """
    time = _absorb(_absorb(_seed_word(clock.seed, _TIME), clock.step), clock.now())
    bits = _mix(words ^ time.to(words.device)) >> 9
    return (bits.to(dtype) + 0.5) * 2.0**-23


def logistic_noise(clock: Clock, words: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """L = log u - log(1 - u): the difference of two Gumbel variables."""
    u = uniform_noise(clock, words, dtype)
    return torch.log(u) - torch.log1p(-u)


def _mix(word: Word) -> Word:
    """A bijection of 32-bit words with nearly ideal avalanche (multiply-xorshift, two rounds).

    Both multipliers are below 2**31, so that no int64 product overflows.
    """
    word = word ^ (word >> 16)
    word = (word * 0x21F0AAAD) & _MASK
    word = word ^ (word >> 15)
    word = (word * 0x735A2D97) & _MASK
    return word ^ (word >> 15)


def _absorb(state: int | Word, word: Word) -> Word:
    return _mix((word & _MASK) ^ state)


def _seed_word(seed: int, purpose: int) -> int:
    return _absorb(_absorb(purpose, seed), seed >> 32)


def hashed_permutation(size: int, seed: int, word: int, number: int, device: torch.device | str = "cpu") -> Tensor:
    """Return permutation ``number`` of ``size`` elements: the elements sorted by a hash, the same on every device."""
    clock = Clock(seed, device)
    clock.step.fill_(number)
    high, low = uniform_noise(clock, channel_words(seed, word, 2 * size, device), torch.float64).view(2, size)
    # Equal keys of 46 bits, which would keep their order, are unlikely.
    return torch.argsort(high + low * 2.0**-23, stable=True)
