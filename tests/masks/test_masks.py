"""All masks at once: the equations site by site, sums and streams, what a budget sets, and every way of running."""

import copy

import pytest
import torch
from topologies import GROUPED, TOPOLOGIES
from torch import nn
from torch.utils.checkpoint import checkpoint

from softprune import SoftPruner
from softprune.graph import Site
from softprune.masks import MaskConfig, SoftMasks, draw_chain, hook_root_
from softprune.masks.functional import dead_probability, relaxed_sample, sparsity_terms
from softprune.masks.layout import keep_common
from softprune.rng import Clock, channel_words, logistic_noise

CONFIG = MaskConfig()
ACTIVATIONS = {"relu": nn.ReLU, "silu": nn.SiLU, "leaky_relu": nn.LeakyReLU}
LAYERS = [(5, "relu"), (8, "silu"), (7, "relu"), (6, "leaky_relu")]


def network(dtype=torch.float64, layers=LAYERS):
    """A chain of sites of different widths and activations."""
    torch.manual_seed(0)
    modules, sites, width = [], [], 3
    for number, (next_width, activation) in enumerate(layers):
        bn = nn.BatchNorm2d(next_width)
        nn.init.uniform_(bn.weight, -0.3, 0.7)
        nn.init.uniform_(bn.bias, -1.0, 0.5)
        modules += [nn.Conv2d(width, next_width, 3, padding=1), bn, ACTIVATIONS[activation]()]
        sites.append(Site(str(3 * number + 1), next_width, activation))
        width = next_width
    return nn.Sequential(*modules).to(dtype), sites


def masked(dtype=torch.float64, layers=LAYERS, **options):
    model, sites = network(dtype, layers)
    masks = SoftMasks(model, sites, Clock(11), CONFIG, **options)
    hook_root_(model, masks)
    return model, masks


def by_hand(model, masks):
    """The sample of every site, from the equations."""
    found = {}
    for number, site in enumerate(masks.sites):
        bn = model.get_submodule(site.name)
        dead = dead_probability(bn.bias, bn.weight, CONFIG, site.activation)
        noise = logistic_noise(masks.clock, channel_words(11, number, site.width), dead.dtype)
        found[site.name] = relaxed_sample(dead, noise, CONFIG)
    return found


def train(call, model, masks, steps=3, forwards=1, ahead=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        for _ in range(forwards):
            x = torch.randn(4, 3, 5, 5, generator=generator, dtype=torch.float64)
            if ahead is not None:
                masks.draw_ahead(ahead)
            (call(x).square().mean() + 1e-3 * masks.loss()).backward()
        optimizer.step()
        masks.clock.end_step()
        optimizer.zero_grad()
    return model.state_dict()


def assert_same(first, second):
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, rtol=1e-9, atol=1e-12)


def test_samples_and_loss_are_those_of_the_equations():
    model, masks = masked()
    masks.clock.begin_forward()
    masks.prepare(training=True)
    for name, n in by_hand(model, masks).items():
        bn = model.get_submodule(name)
        folded = masks.fold(bn)
        torch.testing.assert_close(folded.n, n)
        torch.testing.assert_close(folded.weight, n * bn.weight)
        torch.testing.assert_close(folded.bias, n * bn.bias)
        assert torch.equal(folded.on, n > 0.5)
    norms = [(model.get_submodule(site.name), site.activation) for site in masks.sites]
    torch.testing.assert_close(
        masks.loss(), sum(sparsity_terms(bn.bias, bn.weight, CONFIG, act).sum() for bn, act in norms)
    )


WAYS = {
    "ahead": lambda model: (model, draw_chain),
    "compiled": lambda model: (torch.compile(model, fullgraph=True, backend="aot_eager"), None),
    "compiled ahead": lambda model: (model, torch.compile(draw_chain, fullgraph=True, backend="aot_eager")),
    "a compiled block": lambda model: (model[1].compile(fullgraph=True, backend="aot_eager"), (model, None))[1],
    "checkpoints": lambda model: (lambda x: checkpoint(model, x, use_reentrant=False), None),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_training_gives_the_same(way):
    layers = [(5, "relu"), (6, "leaky_relu")]
    model, masks = masked(layers=layers)
    expected = copy.deepcopy(train(model, model, masks, forwards=2))
    model, masks = masked(layers=layers)
    call, ahead = WAYS[way](model)
    got = train(call, model, masks, forwards=2, ahead=ahead)
    # With checkpoints around the whole model statistics move twice, as without masks.
    names = dict(model.named_parameters()) if "checkpoints" in way else expected
    assert_same({name: expected[name] for name in names}, got)
    assert masks._folds is None


def test_a_batchnorm_that_is_called_alone_decides_as_in_the_model():
    model, masks = masked()
    x, bn = torch.randn(2, 3, 5, 5, dtype=torch.float64), model[1]
    inner = []
    bn.register_forward_hook(lambda module, args, output: inner.append((args[0], output)))
    for training in (True, False):
        model.train(training)(x)
        torch.testing.assert_close(bn(inner[-1][0]), inner[-1][1])
    bn.eval()
    model[4].train()  # one that trains and one that does not, in one forward pass
    model.train(False)
    model.training = True
    with torch.no_grad():
        model(x)
    assert masks._folds is None


class Network(nn.Module):
    """Four BatchNorms of one width, and a narrower one."""

    def __init__(self, width=6):
        super().__init__()
        torch.manual_seed(0)
        self.norms = nn.ModuleList(nn.BatchNorm1d(width if i < 4 else 3) for i in range(5))
        for norm in self.norms:
            nn.init.uniform_(norm.weight, 0.1, 0.5)
            nn.init.uniform_(norm.bias, -0.9, 0.1)


STREAM = Site("norms.0", 6, "relu", points=(("norms.0", "norms.1"), ("norms.2",)))
ALONE = Site("norms.3", 6, "relu")
ENTERED = Site("norms.0", 6, "relu", points=(("norms.0", "norms.1"),), entering=((2, (("norms.4",),)),))


def test_gaussians_add_up_and_a_stream_is_dead_where_every_point_is_dead():
    model = Network()
    masks = SoftMasks(model, [STREAM, ALONE], Clock(3))
    a, b, c, d, _ = model.norms
    beta, gamma = a.bias + b.bias, (a.weight**2 + b.weight**2).sqrt()
    expected = torch.minimum(dead_probability(beta, gamma, CONFIG), dead_probability(c.bias, c.weight, CONFIG))
    dead = masks.by_site(masks.dead_probability(*masks.parameters()))
    torch.testing.assert_close(dead["norms.0"], expected)
    torch.testing.assert_close(dead["norms.3"], dead_probability(d.bias, d.weight, CONFIG))
    losses = [(beta, gamma), (c.bias, c.weight), (d.bias, d.weight)]
    torch.testing.assert_close(masks.loss(), sum(sparsity_terms(*each, CONFIG).sum() for each in losses))
    torch.testing.assert_close(masks.channel_terms().sum(), masks.loss())
    masks.prepare(training=True)
    assert torch.equal(masks.fold(a).n, masks.fold(b).n)
    assert torch.equal(masks.fold(a).n, masks.fold(c).n)
    assert not torch.equal(masks.fold(a).n, masks.fold(d).n)
    with torch.no_grad():
        for norm in (a, b, c):
            norm.weight.fill_(0.01)
            norm.bias.fill_(-1.0)
        a.bias[0], b.bias[0] = 2.0, -3.0  # dead as a sum
        a.bias[1] = 2.0  # alive at the first point
        c.bias[2] = 1.0  # alive at the second point
    assert masks.by_site(masks.dead())["norms.0"].tolist() == [True, False, False, True, True, True]
    torch.testing.assert_close(masks.by_site(masks.alive())["norms.0"][1:3], torch.ones(2))


def test_the_gradient_is_finite_where_all_scales_are_zero():
    model = Network()
    masks = SoftMasks(model, [STREAM], Clock(3))
    for norm in model.norms:
        nn.init.zeros_(norm.weight)
    (masks.sample(*masks.parameters()).weight.sum() + masks.loss()).backward()
    assert all(torch.isfinite(p.grad).all() for norm in model.norms[:3] for p in norm.parameters())


def test_a_stream_that_enters_keeps_its_channels_alive_and_has_its_own_loss():
    model = Network()
    masks = SoftMasks(model, [ENTERED, Site("norms.4", 3, "relu")], Clock(3))
    with torch.no_grad():
        for norm in model.norms:
            norm.bias.fill_(-3.0)
        model.norms[4].bias[1] = 1.0
    hard = masks.by_site(masks.hard())
    assert hard["norms.0"].tolist() == [False, False, False, True, False, False]
    assert hard["norms.4"].tolist() == [False, True, False]
    a, b, *_, e = model.norms
    own = sparsity_terms(a.bias + b.bias, (a.weight**2 + b.weight**2).sqrt(), CONFIG).sum()
    torch.testing.assert_close(masks.loss(), own + sparsity_terms(e.bias, e.weight, CONFIG).sum())


# --- floors, multiples, coupled sites ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alive", "round_to", "floor", "kept"),
    [(0, 1, 0, 0), (0, 4, 0, 0), (0, 1, 2, 2), (0, 4, 1, 4), (3, 1, 2, 3), (3, 4, 0, 4), (5, 4, 0, 6), (6, 4, 0, 6)],
)
def test_masks_are_filled_up_with_the_channels_most_likely_alive(alive, round_to, floor, kept):
    model = Network()
    masks = SoftMasks(model, [ALONE, STREAM], Clock(), round_to=round_to, floors={"norms.3": floor})
    with torch.no_grad():
        model.norms[3].weight.fill_(0.1)
        model.norms[3].bias.copy_(torch.linspace(-1.0, -0.5, 6))
        model.norms[3].bias[6 - alive :] = 1.0
    hard = masks.by_site(masks.hard())["norms.3"]
    assert hard.tolist() == [i >= 6 - kept for i in range(6)]


def test_equal_scores_fill_up_in_the_order_of_the_channels():
    masks = SoftMasks(Network(), [ALONE, STREAM], Clock())
    keep, scores = torch.zeros(12, dtype=torch.bool), torch.full((12,), 7.0)
    made = masks.by_site(masks.layout.fill_up(keep, scores, 1, torch.tensor([2, 0])))
    assert made["norms.3"].tolist() == [True, True, False, False, False, False]
    assert not made["norms.0"].any()


def test_channels_in_common_are_those_whose_smallest_score_is_largest():
    scores = [torch.tensor([0.9, 0.1, 0.5, 0.4]), torch.tensor([0.2, 0.8, 0.4, 0.5])]
    assert keep_common(scores, 2).tolist() == [False, False, True, True]


# --- what a budget sets ------------------------------------------------------------------------------------------


def test_a_budget_decides_in_training_and_evaluation():
    _, masks = masked()
    free = masks.sample(*masks.parameters()).n
    masks.record(0)
    drop = masks.drop.view(-1)
    assert (masks.sample(*masks.parameters()).n == 1).all(), "what stays is left alone"
    drop[masks.slices["4"]] = torch.inf
    drop[masks.slices["7"]] = -3.0  # fading: its own log-odds count where they are larger
    drawn = masks.by_site(masks.sample(*masks.parameters()).n)
    hard = masks.by_site(masks.hard())
    assert (drawn["4"] == 0).all()
    assert (drawn["7"] <= masks.by_site(free)["7"]).all()
    assert (drawn["1"] == 1).all()
    assert [bool(hard[name].any()) for name in ("1", "4", "7")] == [True, False, True]


def test_other_masks_can_be_tried_in_evaluation():
    model, masks = masked()
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    model.eval()
    before, kept = model(x), masks.hard()
    with masks.trial() as trial:
        trial[masks.slices["7"]] = False
        assert not torch.equal(model(x), before)
    assert torch.equal(model(x), before)
    assert torch.equal(masks.hard(), kept)


# --- copies ------------------------------------------------------------------------------------------------------


def test_a_copy_shares_the_decision_and_has_weights_of_its_own():
    model, masks = masked()
    twin = copy.deepcopy(model)
    other = twin[1].masks
    assert other.modules[0] is twin[1]
    with torch.no_grad():
        twin[1].bias.fill_(-5.0)
    assert not other.by_site(other.hard())["1"].any()
    assert torch.equal(other.hard(), masks.hard(twin))  # the same from outside
    masks.record(0)
    twin = copy.deepcopy(model)
    other = twin[1].masks
    masks.drop[masks.slices["4"]] = torch.inf
    assert not other.by_site(other.hard())["4"].any()
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    assert twin.to("meta").eval()(x.to("meta")).is_meta
    assert masks.drop.device.type == "cpu"


@pytest.mark.parametrize("name", GROUPED)
def test_the_drawn_network_is_the_sum_of_its_parts_on_every_grouped_topology(name):
    """Resampling at the same clock gives the same masks, and all BatchNorms of a site have one."""
    topology = {**TOPOLOGIES, **GROUPED}[name]
    pruner = SoftPruner(topology.build(), topology.example(), site_kinds=topology.kinds, strength=0.1)
    masks = pruner.site_masks
    masks.prepare(training=True)
    for site in pruner.sites:
        first, *others = (masks.members[member] for member in site.members)
        assert all(torch.equal(masks.fold(first).n, masks.fold(other).n) for other in others)
    assert torch.isfinite(masks.loss())
