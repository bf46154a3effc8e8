"""Which channels of a layer are drawn, in which order, over which range."""

import math
import random

from softprune.report.channels import KEPT_ROWS, ROWS, Rule, tally, view_of
from softprune.runs.result import SiteRecord

RULE = Rule(delta=0.05, c=0.95)


def made(beta: tuple[float, ...], gamma: tuple[float, ...], keep: tuple[bool, ...]) -> SiteRecord:
    # Without checks: what is not a number is refused in files.
    return SiteRecord.model_construct(
        name="bn", activation="relu", width=len(keep), kept=sum(keep), beta=beta, gamma=gamma, keep=keep
    )


def layer(width: int, seed: int = 0) -> SiteRecord:
    rng = random.Random(seed)
    beta = tuple(rng.gauss(-0.3, 0.4) for _ in range(width))
    gamma = tuple(rng.gauss(0, 0.3) for _ in range(width))
    keep = tuple(not RULE.drops(b, g) for b, g in zip(beta, gamma, strict=True))
    return made(beta, gamma, keep)


def test_every_channel_of_a_small_layer_from_alive_to_dead() -> None:
    site = layer(30)
    view = view_of(site, RULE)
    assert sorted(view.order) == list(range(30))
    masses = [RULE.dead_mass(site.beta[i], site.gamma[i]) for i in view.order]
    assert masses == sorted(masses)
    assert tally(site, view) == f"bn: {site.kept} kept, {30 - site.kept} dropped"


def test_a_wide_layer_is_thinned_with_room_for_both_kinds() -> None:
    site = layer(512)
    view = view_of(site, RULE)
    assert len(view.order) == len(set(view.order)) == ROWS
    assert sum(site.keep[i] for i in view.order) == KEPT_ROWS
    assert view.low < RULE.delta < view.high
    assert "40 drawn" in tally(site, view)


def test_the_rows_go_to_the_kind_that_needs_them() -> None:
    all_kept = made((0.5,) * 90, (0.1,) * 90, (True,) * 90)
    assert len(view_of(all_kept, RULE).order) == ROWS
    few_kept = made((-2.0,) * 90, (0.1,) * 90, (True,) * 3 + (False,) * 87)
    view = view_of(few_kept, RULE)
    assert view.order[:3] == (0, 1, 2)
    assert len(view.order) == ROWS


def test_scales_of_zero_and_unknown_channels_are_drawn_or_left_out() -> None:
    site = made((math.nan, -0.4, 0.4), (0.1, 0.0, 0.0), (False, False, True))
    view = view_of(site, RULE)
    assert view.order == (2, 1)
    assert view.low < RULE.delta < view.high
