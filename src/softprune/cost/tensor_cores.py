"""What tensor cores want of a width."""

HALF_CHANNELS = 8
"""Tensor cores, and many other kernels, take channels of half precision so many at a time."""
FEW_COLOURS = 4
"""Up to so many channels are those of an image, which no cut changes."""


def missing(width: int) -> int:
    """Channels to add up to a multiple of :data:`HALF_CHANNELS`."""
    return -width % HALF_CHANNELS
