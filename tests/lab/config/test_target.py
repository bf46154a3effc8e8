"""What a user may ask for."""

import numpy as np
import pytest

from softprune.errors import ConfigError
from softprune.target import read_target


@pytest.mark.parametrize(
    ("target", "dense", "limit"),
    [
        ({"macs": 0.5}, 1001, 500),
        ({"macs": "50%"}, 1001, 500),
        ({"params": "30 %"}, 1000, 300),
        ({"params": 60_000}, 100_000, 60_000),
        ({"params": "60_000"}, 100_000, 60_000),
        ({"flops": 0.5}, 1001, 500),
        ({"macs": "2_000 MACs"}, 10_000, 2_000),
        ({"channels": 0.6}, 10, 6),
        ({"latency": 0.7}, 2.0, 1.4),
        ({"latency": 3.5}, 5.0, 3.5),
        ({"latency": "0.8 ms"}, 5.0, 0.8),
    ],
)
def test_amounts_become_limits(target, dense, limit):
    assert read_target(target).limit(dense) == pytest.approx(limit, rel=1e-12)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({}, "one key"),
        ({"macs": 0.5, "params": 0.5}, "one key"),
        (0.5, "one key"),
        ({"mac": 0.5}, "Did you mean 'macs'"),
        ({"macs": 0}, "share to keep"),
        ({"macs": -3}, "share to keep"),
        ({"macs": True}, "share to keep"),
        ({"macs": "half"}, "share to keep"),
        ({"macs": float("nan")}, "share to keep"),
        ({"macs": "3 ms"}, "share to keep"),
        ({"macs": 1.0}, "less than the whole"),
        ({"macs": "100%"}, "less than the whole"),
        ({"macs": "120%"}, "less than the whole"),
    ],
)
def test_what_is_no_target_is_refused(target, message):
    with pytest.raises(ConfigError, match=message):
        read_target(target)


@pytest.mark.parametrize("amount", [np.float32(0.5), np.float64(0.5), np.int64(1000)])
def test_numbers_of_numpy_are_amounts(amount: float) -> None:
    assert read_target({"macs": amount}) == read_target({"macs": amount.item()})
