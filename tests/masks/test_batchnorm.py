"""The masked BatchNorm against the paper's revised BN, written out by hand."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from softprune.graph import Site
from softprune.masks import MaskConfig, SoftMasks, StoredMasks, is_masked
from softprune.masks.batchnorm import unmask_
from softprune.rng import Clock

SHAPES = {
    nn.BatchNorm1d: [(12, 6), (4, 6, 5)],
    nn.BatchNorm2d: [(4, 6, 3, 5)],
    nn.BatchNorm3d: [(2, 6, 3, 2, 4)],
    nn.SyncBatchNorm: [(12, 6), (4, 6, 3, 5)],
}
CASES = [(cls, shape) for cls, shapes in SHAPES.items() for shape in shapes]


def make_bn(cls=nn.BatchNorm2d, width=6, seed=0, **arguments):
    """A BatchNorm whose channels are partly alive, partly dead and partly in between."""
    generator = torch.Generator().manual_seed(seed)
    bn = cls(width, **arguments).double()
    with torch.no_grad():
        bn.weight.copy_(torch.rand(width, generator=generator) - 0.3)
        bn.bias.copy_(torch.linspace(-1.5, 0.5, width))
        if bn.running_mean is not None:
            bn.running_mean.copy_(torch.randn(width, generator=generator))
            bn.running_var.copy_(torch.rand(width, generator=generator) + 0.5)
    return bn


def soft(bn, clock=None, *, round_to=1, **config):
    """The BatchNorm with a mask of SCP."""
    SoftMasks(bn, [Site("", bn.num_features, "relu")], clock or Clock(1), MaskConfig(**config), round_to=round_to)
    return bn


def stored(bn, mask, in_training=False):
    """The BatchNorm with a fixed mask."""
    masks = StoredMasks(bn, [Site("", bn.num_features, "relu")])
    masks.masked_training = in_training
    masks.keep.copy_(mask)
    return bn


def sample(bn):
    return bn.masks.sample(*bn.masks.parameters()).n


def random_input(shape, seed=7):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2 + 1


def batch_statistics(x):
    rows = x.transpose(0, 1).flatten(1)
    return rows.mean(1), rows.var(1, correction=0), rows.var(1, correction=1)


def by_channel(vector, x):
    return vector.view(1, -1, *(1,) * (x.dim() - 2))


def revised_bn(x, bn, n):
    """The paper's equation: (gamma z + beta) n."""
    mean, var, _ = batch_statistics(x)
    z = (x - by_channel(mean, x)) / torch.sqrt(by_channel(var, x) + bn.eps)
    return (by_channel(bn.weight, x) * z + by_channel(bn.bias, x)) * by_channel(n, x)


@pytest.mark.parametrize(("cls", "shape"), CASES)
def test_training_is_the_papers_revised_bn_in_value_and_gradient(cls, shape):
    bn = soft(make_bn(cls))
    x = random_input(shape).requires_grad_()
    probe = random_input(shape, seed=8)
    results = []
    for output in (bn(x), revised_bn(x, bn, sample(bn))):
        gradients = torch.autograd.grad((output * probe).sum(), (x, bn.weight, bn.bias))
        results.append((output, *gradients))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    assert sample(bn).min() < 0.9


@pytest.mark.parametrize("gate_statistics", ["both", "mean", "none"])
@pytest.mark.parametrize("momentum", [0.1, 0.4, None])
@pytest.mark.parametrize("cls", [nn.BatchNorm2d, nn.SyncBatchNorm])
def test_running_statistics_move_where_the_sample_is_on(cls, momentum, gate_statistics):
    bn, clock = make_bn(cls, momentum=momentum), Clock(3)
    mean, var = bn.running_mean.clone(), bn.running_var.clone()
    soft(bn, clock, gate_statistics=gate_statistics)
    seen = torch.zeros(6)
    for step in range(1, 13):
        clock.begin_forward()
        x = random_input((4, 6, 3, 5), seed=step)
        on = sample(bn) > 0.5
        seen += on
        factor, gated = (1 / step, "none") if momentum is None else (momentum, gate_statistics)
        batch_mean, _, batch_var = batch_statistics(x)
        new_mean, new_var = mean + factor * (batch_mean - mean), var + factor * (batch_var - var)
        mean = new_mean if gated == "none" else torch.where(on, new_mean, mean)
        var = torch.where(on, new_var, var) if gated == "both" else new_var
        bn(x)
        clock.end_step()
        torch.testing.assert_close(bn.running_mean, mean, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(bn.running_var, var, rtol=1e-12, atol=1e-12)
        assert bn.num_batches_tracked == step
    assert ((seen > 0) & (seen < 12)).any()


@pytest.mark.parametrize(("cls", "shape"), CASES)
def test_evaluation_zeroes_the_pruned_channels_and_no_others(cls, shape):
    plain = make_bn(cls).eval()
    bn = soft(copy.deepcopy(plain))
    x = random_input(shape)
    keep = bn.masks.hard()
    assert 0 < keep.sum() < 6
    output = bn(x)
    assert (output[:, ~keep] == 0).all()
    torch.testing.assert_close(output[:, keep], plain(x)[:, keep], rtol=1e-14, atol=1e-14)
    assert bn.num_batches_tracked == 0


def test_evaluation_is_clean_where_dropped_parameters_are_not():
    bn = make_bn().eval()
    with torch.no_grad():
        bn.weight[0], bn.bias[1] = float("nan"), float("inf")
    stored(bn, torch.tensor([False, False, True, True, True, True]))
    assert torch.isfinite(bn(random_input((4, 6, 3, 5)))).all()


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_gate_without_samples_trains_a_plain_batchnorm(momentum):
    plain = make_bn(momentum=momentum)
    bn = stored(copy.deepcopy(plain), torch.tensor([True, False] * 3))
    for step in range(3):
        x = random_input((4, 6, 3, 5), seed=step)
        assert torch.equal(bn(x), plain(x))
    torch.testing.assert_close(bn.running_mean, plain.running_mean)
    torch.testing.assert_close(bn.running_var, plain.running_var)


def test_a_fixed_mask_in_training():
    plain = make_bn()
    mask = torch.tensor([True, False] * 3)
    bn = stored(copy.deepcopy(plain), mask, in_training=True)
    x = random_input((4, 6, 3, 5))
    torch.testing.assert_close(bn(x), plain(x) * by_channel(mask.double(), x))
    torch.testing.assert_close(bn.running_var, plain.running_var)


def test_without_running_statistics_batches_serve_in_evaluation_too():
    plain = make_bn(track_running_stats=False)
    bn = soft(copy.deepcopy(plain))
    x = random_input((4, 6, 3, 5))
    torch.testing.assert_close(bn(x), revised_bn(x, bn, sample(bn)))
    bn.eval()
    torch.testing.assert_close(bn(x), plain.eval()(x) * by_channel(bn.masks.hard().double(), x))


def test_the_module_keeps_its_identity():
    bn = make_bn()
    parameters, keys, calls = list(bn.parameters()), list(bn.state_dict()), []
    bn.register_forward_hook(lambda *_: calls.append(1))
    optimizer = torch.optim.SGD(bn.parameters(), lr=0.1)
    soft(bn)
    assert isinstance(bn, nn.BatchNorm2d)
    assert all(a is b for a, b in zip(parameters, bn.parameters(), strict=True))
    assert list(bn.state_dict()) == keys
    before = bn.bias.detach().clone()
    bn(random_input((4, 6, 3, 5))).square().sum().backward()
    optimizer.step()
    assert calls
    assert not torch.equal(before, bn.bias)
    make_bn().load_state_dict(bn.state_dict())
    bn.load_state_dict(make_bn().state_dict())


@pytest.mark.parametrize("cls", SHAPES)
def test_unmask_gives_the_plain_class_back(cls):
    bn = make_bn(cls)
    before = set(bn.__dict__)
    soft(bn)
    assert is_masked(bn)
    assert unmask_(bn) is bn
    assert type(bn) is cls
    assert set(bn.__dict__) == before
    assert not is_masked(bn)
    assert unmask_(bn) is bn


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_masked_and_independent(duplicate):
    model = nn.Sequential(make_bn(), nn.ReLU(), make_bn(seed=1))
    clock = Clock(2)
    SoftMasks(model, [Site("0", 6, "relu"), Site("2", 6, "relu")], clock)
    twin = duplicate(model)
    assert type(twin[0]) is type(model[0])
    assert twin[0].masks is twin[2].masks
    assert twin[0].masks.modules[0] is twin[0]
    x = random_input((4, 6, 3, 5))
    assert torch.equal(twin(x), model(x))
    twin[0].masks.clock.end_step()
    assert not torch.equal(twin(x), model(x))
    assert clock.step == 0


@pytest.mark.parametrize("training", [True, False])
def test_half_precision_parameters(training):
    bn = soft(make_bn()).train(training)
    x = random_input((4, 6, 3, 5))
    half, single = copy.deepcopy(bn).half(), copy.deepcopy(bn).float()
    output = half(x.half())
    assert output.dtype == torch.float16
    torch.testing.assert_close(output.float(), single(x.float()), rtol=2e-2, atol=2e-2)
    output.sum().backward()
    assert torch.isfinite(half.bias.grad).all()


def test_autocast_trains_with_a_float32_mask():
    conv, bn = nn.Conv2d(3, 6, 3), soft(make_bn().float())
    reference = copy.deepcopy(bn)
    x = torch.randn(4, 3, 6, 6)
    with torch.autocast("cpu", dtype=torch.float16):
        features = conv(x)
        output = bn(features)
        assert sample(bn).dtype == torch.float32
    assert features.dtype == torch.float16
    torch.testing.assert_close(output.float(), reference(features.float()), rtol=1e-2, atol=1e-2)
    output.float().square().sum().backward()
    assert torch.isfinite(bn.weight.grad).all()


def synced(monkeypatch):
    """Pretend to be one of two processes, with a stand-in for torch's forward that needs no GPU.

    Like the real one it writes the running statistics but does not keep them for backward.
    """

    def forward(self, x):
        if self.running_mean is None:
            return F.batch_norm(x, None, None, self.weight, self.bias, True)
        self.num_batches_tracked.add_(1)
        mean, var = self.running_mean.clone(), self.running_var.clone()
        y = F.batch_norm(x, mean, var, self.weight, self.bias, True, self.momentum, self.eps)
        self.running_mean.copy_(mean)
        self.running_var.copy_(var)
        return y

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr("softprune.masks.batchnorm._sync_forward", forward)


@pytest.mark.parametrize("gate_statistics", ["both", "mean", "none"])
def test_synchronised_batches_scale_the_output(monkeypatch, gate_statistics):
    alone = soft(make_bn(nn.SyncBatchNorm), gate_statistics=gate_statistics)
    together = copy.deepcopy(alone)
    x = random_input((4, 6, 3, 5))
    expected = alone(x)
    expected.square().sum().backward()
    synced(monkeypatch)
    output = together(x)
    output.square().sum().backward()
    torch.testing.assert_close(output, expected)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(together.state_dict()[name], value)
    torch.testing.assert_close(together.bias.grad, alone.bias.grad)
    torch.testing.assert_close(together.weight.grad, alone.weight.grad)
    assert together.float()(x.bfloat16()).dtype == torch.bfloat16  # as under autocast


def test_synchronised_batches_without_samples_or_statistics(monkeypatch):
    synced(monkeypatch)
    x = random_input((4, 6, 3, 5))
    bn = make_bn(nn.SyncBatchNorm)
    fixed = stored(copy.deepcopy(bn), torch.ones(6, dtype=torch.bool))
    expected = F.batch_norm(x, None, None, bn.weight, bn.bias, True)
    torch.testing.assert_close(fixed(x), expected)
    untracked = soft(make_bn(nn.SyncBatchNorm, track_running_stats=False))
    torch.testing.assert_close(untracked(x), revised_bn(x, untracked, sample(untracked)))


@pytest.mark.parametrize("training", [True, False])
def test_timm_layers_keep_their_activation(training):
    layers = pytest.importorskip("timm.layers", reason='the "timm" extra is not installed')
    bn = make_bn(layers.BatchNormAct2d, act_layer=nn.SiLU, drop_layer=nn.Hardtanh).train(training)
    inner = make_bn()
    inner.load_state_dict(bn.state_dict())
    soft(inner.train(training))
    soft(bn)
    x = random_input((4, 6, 3, 5))
    assert type(bn).__name__ == "MaskedBatchNormAct2d"
    torch.testing.assert_close(bn(x), F.silu(F.hardtanh(inner(x))))
    torch.testing.assert_close(copy.deepcopy(bn)(x), bn(x))
    assert type(unmask_(bn)) is layers.BatchNormAct2d
