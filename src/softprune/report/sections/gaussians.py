"""The Gaussians of one layer's channels with delta marked: why each channel was kept or dropped.

BatchNorm gives a channel the distribution N(beta, gamma^2) (the paper's assumption). What lies right of delta
passes the ReLU; a channel with less than the share 1 - c there is dropped. The first layer is drawn here, the
others by the script from the data beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from softprune.report.decisions import QUADRANTS, RELU_LIKE, Decisions, Rule, rule_of
from softprune.report.figures import figure, section, twice
from softprune.report.formats import percent, significant
from softprune.report.markup import Markup, el
from softprune.report.ridges import draw_ridges, tally, view_of
from softprune.report.signs import BETA, DELTA, GAMMA, SQUARED
from softprune.runs.records import Run, Site


def gaussians(run: Run, decisions: Decisions | None) -> Markup | None:
    if decisions is None:
        return None
    shown = sorted({channel.site for channel in decisions.channels})
    rule = rule_of(run.masks)
    chosen = _telling(run.sites, shown)
    site, view = run.sites[chosen], view_of(run.sites[chosen], rule)
    return section(
        "gaussians",
        "What each channel emits",
        _lead(run, rule),
        figure(
            "gaussians",
            _picker(run.sites, shown, chosen),
            el("p", tally(site, view), class_="readout", aria_live="polite"),
            twice(lambda canvas: draw_ridges(canvas, site, view, rule)),
            caption=_caption([run.sites[position] for position in shown]),
            data=_data(run.sites, shown, decisions, rule),
        ),
    )


def _telling(sites: Sequence[Site], shown: Sequence[int]) -> int:
    """The layer to show first: about as many kept as dropped, and wide."""
    return min(shown, key=lambda p: (abs(sites[p].kept / sites[p].width - 0.5) > 0.3, -sites[p].width))


def _picker(sites: Sequence[Site], shown: Sequence[int], chosen: int) -> Markup:
    options = []
    for number, position in enumerate(shown):
        site = sites[position]
        label = f"{site.name} ({site.kept} of {site.width} kept)"
        options.append(el("option", label, value=str(number), selected=position == chosen))
    return el(
        "p",
        el("label", "Layer ", el("select", *options, id="layer")),
        el("button", "Previous", type="button", data_step="-1"),
        el("button", "Next", type="button", data_step="1"),
        class_="picker scripted",
        hidden=True,
    )


def _lead(run: Run, rule: Rule) -> str:
    text = (
        f"After BatchNorm a channel follows N({BETA}, {GAMMA}{SQUARED}): a row each, the most alive on top. "
        f"The filled part, right of {DELTA} = {significant(rule.delta)}, is what the activation lets pass. "
    )
    if run.method != "scp":
        return f"{text}The colours are what this run decided, by another rule than SCP's."
    if run.masks.get("use_relu") is False:
        return f"{text}This run judged without the ReLU, by the mass on either side of zero: see the colours."
    share = percent(100 * (1 - rule.c), 0)
    return f"{text}A channel with less than {share} of its mass there is as good as silent, and is dropped."


def _caption(sites: Sequence[Site]) -> str:
    text = f"The bars on the right give the share of each curve right of {DELTA}."
    others = sorted({site.activation for site in sites if site.activation not in RELU_LIKE})
    if others:
        text += (
            f" Layers with {', '.join(name or 'no activation' for name in others)} have a rule of their own; "
            f"the line at {DELTA} is ReLU's, the colours are what the run decided."
        )
    return text


def _data(sites: Sequence[Site], shown: Sequence[int], decisions: Decisions, rule: Rule) -> dict[str, object]:
    """Every channel for the script, in ten-thousandths: both figures of the channels read it."""
    letters = {name: str(position) for position, name in enumerate(QUADRANTS)}
    quadrants = {(channel.site, channel.index): letters[channel.quadrant] for channel in decisions.channels}
    layers = []
    for position in shown:
        site = sites[position]
        view = view_of(site, rule)
        layers.append(
            {
                "name": site.name,
                "tally": tally(site, view),
                "order": view.order,
                "range": [round(view.low, 4), round(view.high, 4)],
                "ticks": view.ticks,
                "beta": [_tenthousandths(value) for value in site.beta],
                "gamma": [_tenthousandths(abs(value)) for value in site.gamma],
                "keep": "".join("01"[keep] for keep in site.keep),
                "quadrant": "".join(quadrants.get((position, index), "-") for index in range(site.width)),
            }
        )
    return {"delta": rule.delta, "sites": layers}


def _tenthousandths(value: float) -> int | None:
    return round(value * 1e4) if math.isfinite(value) else None
