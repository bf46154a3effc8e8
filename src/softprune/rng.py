"""Noise of the masks, a pure function of (seed, step, forward, site, channel), and of data order and augmentation.

The noise is an integer hash computed with tensor operations. Unlike a random generator, it has no state except two
counters, so it is the same on all ranks, after resuming, in eager mode, compiled, and inside a CUDA graph.
"""

from collections import deque
from typing import Any, TypeVar

import torch
from torch import Tensor

from softprune.errors import ConfigError, ModelError, is_integer

Word = TypeVar("Word", int, Tensor)

_MASK = 0xFFFFFFFF
# Separate the hashes of (step, forward) from those of (site, channel) with the same seed.
_TIME, _PLACE = 0x74696D65, 0x73697465
_REMEMBERED = 1024
"""Number of forward passes of a step whose noise can be repeated when an activation checkpoint recomputes them."""


@torch.library.custom_op("softprune::tick", mutates_args=("counter",))
def _tick(counter: Tensor) -> Tensor:
    """Increment a counter in place and return a copy of it.

    This is a custom operator because torch.compile recomputes cheap operations in the backward pass. Recomputed from
    the counter, which may have advanced by then, the noise would be that of another forward pass.
    """
    counter.add_(1)
    return counter.clone()


@_tick.register_fake
def _(counter: Tensor) -> Tensor:
    return torch.empty_like(counter)


def in_backward() -> bool:
    """Return whether autograd is running, so that a forward pass is a recomputation by an activation checkpoint."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class Clock:
    """The position in training: the optimizer step, and the forward pass of the root module within it.

    Both are 0-d int64 tensors that change only in place; reading and advancing them never synchronises with the device.
    A mask sampled before the first call of :meth:`begin_forward` uses forward pass 0.
    """

    step: Tensor
    """Number of optimizer steps taken."""
    forward: Tensor
    """Number of training forward passes of the root module since the last step; the first one has number 1."""
    reading: Tensor
    """The value of ``forward`` for the current forward pass, on which its noise depends. Between steps it is the tensor
    ``forward`` itself, since a CUDA graph keeps reading from the address at which it was captured."""

    def __init__(self, seed: int = 0, device: torch.device | str | None = None) -> None:
        if not is_integer(seed):
            raise ConfigError(f"The seed of the masks must be an integer. Got {seed!r}.")
        self.seed = int(seed)
        self.step = torch.zeros((), dtype=torch.int64, device=device)
        self.forward = torch.zeros((), dtype=torch.int64, device=device)
        self.reading = self.forward
        self._forwards: deque[tuple[int, Tensor]] = deque(maxlen=_REMEMBERED)
        """For each forward pass of this step: the sequence number of its first autograd node, and its reading."""

    def begin_forward(self) -> None:
        """Start a training forward pass of the root module, with new noise."""
        self.reading = _tick(self.forward)
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            self._forwards.append((torch._C._autograd._get_sequence_nr(), self.reading))

    def now(self) -> Tensor:
        """Return ``reading``, or during the backward pass, the reading of the forward pass that is recomputed.

        An activation checkpoint recomputes a forward pass while the backward of one of its nodes runs.
        """
        node = None if torch.compiler.is_compiling() else torch._C._current_autograd_node()
        if node is None:
            return self.reading
        if torch.is_grad_enabled() and "CheckpointFunction" in node.name():
            raise ModelError(
                "activation checkpoints of a masked network must not be reentrant. Got one that is; pass "
                "use_reentrant=False to torch.utils.checkpoint."
            )
        number = node._sequence_nr()  # type: ignore[attr-defined]
        return next((reading for first, reading in reversed(self._forwards) if first <= number), self.reading)

    def end_step(self, skipped: Tensor | None = None) -> None:
        """Count an optimizer step, unless `skipped` (the found_inf tensor of a GradScaler) is nonzero.

        A skipped step leaves both counters unchanged, so that the forward passes of the next attempt get new noise.
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
        """Move the counters to a device, in place, and return the clock."""
        announced = self.reading is not self.forward
        self.step, self.forward = self.step.to(device), self.forward.to(device)
        self.reading = self.reading.to(device) if announced else self.forward
        return self

    def state_dict(self) -> dict[str, int]:
        """Return seed and counters as integers. Synchronises with the device."""
        return {"seed": self.seed, "step": int(self.step), "forward": int(self.forward)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`; counters change in place."""
        self.seed = state["seed"]
        self.step.fill_(state["step"])
        self.forward.fill_(state["forward"])
        self._between_steps()

    def _between_steps(self) -> None:
        self.reading = self.forward
        self._forwards.clear()


def channel_words(seed: int, site: int, width: int, device: torch.device | str | None = None) -> Tensor:
    """Return a 32-bit word per channel of a site, (width,) in int64: the constant part of the hash."""
    key = _absorb(_seed_word(seed, _PLACE), site)
    return _mix(torch.arange(width, dtype=torch.int64, device=device) ^ key)


def uniform_noise(clock: Clock, words: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return uniform noise u in (0, 1) for each of ``channel_words``, at the step and forward pass of the clock.

    Values are (n + 1/2) / 2**23: exact in float32, symmetric about 1/2, and never 0 or 1.
    """
    time = _absorb(_absorb(_seed_word(clock.seed, _TIME), clock.step), clock.now())
    bits = _mix(words ^ time.to(words.device)) >> 9
    return (bits.to(dtype) + 0.5) * 2.0**-23


def logistic_noise(clock: Clock, words: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return logistic noise L = log u - log(1 - u), the difference of two Gumbel variables."""
    u = uniform_noise(clock, words, dtype)
    return torch.log(u) - torch.log1p(-u)


def _mix(word: Word) -> Word:
    """Hash 32-bit words by a bijection with nearly ideal avalanche (two rounds of multiply-xorshift).

    Both multipliers are below 2**31, so that int64 products do not overflow.
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
    """Return permutation ``number`` of ``size`` elements, sorted by a hash and the same on every device."""
    clock = Clock(seed, device)
    clock.step.fill_(number)
    high, low = uniform_noise(clock, channel_words(seed, word, 2 * size, device), torch.float64).view(2, size)
    # Keys have 46 bits, so equal ones, which would keep their order, are unlikely.
    return torch.argsort(high + low * 2.0**-23, stable=True)
