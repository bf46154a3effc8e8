"""In distributed training only rank 0 gives warnings."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from method_networks import Chain, batch
from torch.testing._internal.distributed.fake_pg import FakeStore

from softprune.log import get_logger
from softprune.methods import SoftPruner


@pytest.fixture(params=["torchrun", "group"])
def rank_1(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is rank 1 of 2, before or after it has joined the process group."""
    if request.param == "torchrun":
        monkeypatch.setenv("RANK", "1")
        yield
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
        yield
        dist.destroy_process_group()


def _misuse() -> None:
    pruner = SoftPruner(Chain(), batch()[0])
    for _ in range(2):
        pruner.loss(pruner.model(batch()[0]).logsumexp(1))


@pytest.mark.usefixtures("rank_1")
def test_another_rank_gives_errors_alone(caplog: pytest.LogCaptureFixture) -> None:
    _misuse()
    assert not caplog.records
    get_logger("softprune.somewhere").error("it fails")
    assert [record.getMessage() for record in caplog.records] == ["it fails"]


def test_rank_0_of_a_group_warns_whatever_its_environment(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANK", "1")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        get_logger("softprune.somewhere").warning("look")
    finally:
        dist.destroy_process_group()
    assert caplog.messages == ["look"]
