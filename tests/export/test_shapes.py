"""Which dimensions of an export are free."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import ReLU

from softprune.export.writing import dynamic_shapes
from softprune.graph import Example


def test_the_batch_is_free_and_on_a_gpu_as_large_as_cudnn_takes() -> None:
    with FakeTensorMode():
        for device, below, above in (("cpu", 65536, None), ("cuda", 65535, 65536)):
            given = Example.of(torch.empty(2, 3, 4, 4, device=device))
            shapes = dynamic_shapes(ReLU(), given, dynamic_batch=True)
            assert shapes is not None
            batch = shapes["input"][0]
            assert batch.min == 1
            assert batch.max >= below
            assert above is None or batch.max < above
            assert dynamic_shapes(ReLU(), given, dynamic_batch=False) is None
