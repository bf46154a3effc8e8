"""The Gaussians of one layer's channels with delta marked: why each channel was kept or dropped.

BatchNorm gives a channel the distribution N(beta, gamma^2) (the paper's assumption). A row per channel shows
it, the most alive on top. What lies right of delta passes the ReLU and is filled; a channel with less than
the share 1 - c there is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..bells import bell, bell_defs
from ..decisions import QUADRANTS, RELU_LIKE, Decisions, Rule, rule_of
from ..figures import Canvas, figure, section, svg, twice, x_axis
from ..formats import percent, significant
from ..markup import Markup, el, join
from ..records import Run, Site
from ..scales import Scale, quantile, ticks
from ..signs import BETA, DELTA, GAMMA, SQUARED

ROWS = 40


def gaussians(run: Run, decisions: Decisions | None) -> Markup | None:
    sites = [site for site in run.sites if site.has_channels]
    if not sites or decisions is None:
        return None
    rule = rule_of(run.masks)
    low, high = _range(sites, rule)
    chosen = _telling(sites)
    options = [
        el(
            "option",
            f"{site.name} ({site.kept} of {site.width} kept)",
            value=str(position),
            selected=site is chosen,
        )
        for position, site in enumerate(sites)
    ]
    picker = el(
        "p",
        el("label", "Layer ", el("select", *options, id="layer")),
        el("button", "Previous", type="button", data_step="-1"),
        el("button", "Next", type="button", data_step="1"),
        class_="picker scripted",
        hidden=True,
    )
    return section(
        "gaussians",
        "What each channel emits",
        _lead(run, rule),
        figure(
            "gaussians",
            picker,
            el("p", _tally(chosen), class_="readout", aria_live="polite"),
            twice(lambda canvas: _ridges(canvas, chosen, rule, low, high)),
            caption=_caption(sites),
            data=_data(sites, run, decisions, rule, chosen),
        ),
    )


def rank(site: Site, rule: Rule) -> list[int]:
    """Channels from the most alive to the most dead, the kept ones first, at most ``ROWS`` evenly spread."""

    def deadness(index: int) -> tuple[bool, float]:
        return not site.keep[index], (rule.delta - site.beta[index]) / (abs(site.gamma[index]) + 1e-8)

    known = [index for index in range(site.width) if math.isfinite(site.beta[index] + site.gamma[index])]
    order = sorted(known, key=deadness)
    if len(order) <= ROWS:
        return order
    return [order[round(row * (len(order) - 1) / (ROWS - 1))] for row in range(ROWS)]


def _telling(sites: Sequence[Site]) -> Site:
    """The layer to show first: as many kept as dropped, and wide."""
    return min(sites, key=lambda site: (abs(site.kept / site.width - 0.5) > 0.3, -site.width))


def _range(sites: Sequence[Site], rule: Rule) -> tuple[float, float]:
    """One range for all layers, so that they compare; dead channels may drift out of it on the left."""
    ends = [
        (beta - 3 * abs(gamma), beta + 3 * abs(gamma))
        for site in sites
        for beta, gamma in zip(site.beta, site.gamma, strict=True)
        if math.isfinite(beta + gamma)
    ]
    high = max(quantile([end for _, end in ends], 0.99), rule.delta + 0.1)
    low = min(quantile([start for start, _ in ends], 0.02), rule.delta - 0.1)
    return max(low, rule.delta - 1.6 * (high - rule.delta)), high


def _lead(run: Run, rule: Rule) -> str:
    text = (
        f"After BatchNorm a channel follows N({BETA}, {GAMMA}{SQUARED}): a row each, the most alive on top. "
        f"The filled part, right of {DELTA} = {significant(rule.delta)}, is what the activation lets pass. "
    )
    if run.method == "scp":
        share = percent(100 * (1 - rule.c), 0)
        return (
            f"{text}A channel with less than {share} of its mass there is as good as silent, and is dropped."
        )
    return f"{text}The colours are what this run decided, by another rule than SCP's."


def _tally(site: Site) -> str:
    drawn = f", {ROWS} of them drawn, evenly spread" if site.width > ROWS else ""
    return f"{site.name}: {site.kept} kept, {site.width - site.kept} dropped{drawn}"


def _caption(sites: Sequence[Site]) -> str:
    text = f"The bars on the right give the share of each curve right of {DELTA}."
    others = sorted({site.activation for site in sites if site.activation not in RELU_LIKE})
    if others:
        text += (
            f" Layers with {', '.join(name or 'no activation' for name in others)} have a rule of their own; "
            f"the line at {DELTA} is ReLU's, the colours are what the run decided."
        )
    return text


def _ridges(canvas: Canvas, site: Site, rule: Rule, low: float, high: float) -> Markup:
    split = 260 if canvas.narrow else 690
    left, right, top, bottom = 6.0, float(split), 60.0, 486.0
    shares = Scale(0.0, 1.0, split + 16.0, canvas.width - 8.0)
    scale = Scale(low, high, left, right)
    at = scale(rule.delta)
    identifier = f"ridge-{canvas.name}"
    frame = [
        bell_defs(identifier, left, right, at, 0.0, bottom + 1),
        x_axis(scale, ticks(low, high, 4 if canvas.narrow else 9), top - 36, bottom, "after BatchNorm"),
        x_axis(shares, [0.0, 1.0] if canvas.narrow else [0.0, 0.5, 1.0], top, bottom),
        el("g", *_rows(site, rule, identifier, scale, shares, top, bottom), class_="rows"),
        el("line", x1=at, x2=at, y1=top - 46, y2=bottom, class_="delta"),
        el("text", f"{DELTA} = {significant(rule.delta)}", x=at + 6, y=top - 40, class_="label delta-label"),
        el("text", f"share right of {DELTA}", x=shares.end, y=top - 12, class_="axis end"),
        el("line", x1=shares(1 - rule.c), x2=shares(1 - rule.c), y1=top, y2=bottom, class_="delta"),
    ]
    chart = svg(
        "drawing",
        canvas.width,
        bottom + 42,
        f"Distributions of the channels of {site.name}",
        _tally(site),
        *frame,
    )
    return el(
        "div",
        chart,
        class_=f"chart {canvas.name}",
        data_id=identifier,
        data_left=left,
        data_right=right,
        data_low=repr(low),
        data_high=repr(high),
        data_top=top,
        data_bottom=bottom,
        data_from=shares.start,
        data_to=shares.end,
    )


def _rows(
    site: Site, rule: Rule, identifier: str, scale: Scale, shares: Scale, top: float, bottom: float
) -> list[Markup]:
    """The rows as the script draws them again for another layer: page.js, ``ridges``, must agree."""
    order = rank(site, rule)
    pitch = (bottom - top) / len(order)
    pixels = (scale.end - scale.start) / (scale.high - scale.low)
    rows = []
    for position, index in enumerate(order):
        beta, gamma = site.beta[index], abs(site.gamma[index])
        base = top + (position + 1) * pitch
        live = 1.0 - rule.dead_mass(beta, gamma)
        style = "kept" if site.keep[index] else "dropped"
        note = f"channel {index}: {BETA} {significant(beta)}, |{GAMMA}| {significant(gamma)}, {style}"
        curve = el(
            "g",
            bell(identifier, scale(beta), gamma * pixels, base, min(40.0, 2.6 * pitch), style, note),
            clip_path=f"url(#{identifier}-frame)",
        )
        share = el(
            "rect",
            x=shares.start,
            y=base - min(pitch * 0.78, 16.0),
            width=max(shares(live) - shares.start, 0.6),
            height=min(pitch * 0.62, 12.0),
            class_=f"share {style}",
        )
        away = None
        if scale(beta) < scale.start:
            away = el("path", d=f"M{scale.start + 1:.0f} {base - 3:.1f}l6 -3v6z", class_=f"away {style}")
        rows.append(join((curve, share, away)))
    kept = sum(site.keep[index] for index in order)
    for style, row, shown, of_all in (
        ("kept", 0, kept, site.kept),
        ("dropped", kept, len(order) - kept, site.width - site.kept),
    ):
        if shown:
            place = {"x": scale.end, "y": top + row * pitch + 12}
            rows.append(el("text", f"{of_all} {style}", class_=f"label strong end {style}", **place))
    return rows


def _data(
    sites: Sequence[Site], run: Run, decisions: Decisions, rule: Rule, chosen: Site
) -> dict[str, object]:
    """Every channel for the script, in ten-thousandths: both figures of the channels read it."""
    letters = {name: str(position) for position, name in enumerate(QUADRANTS)}
    quadrants = {(channel.site, channel.index): letters[channel.quadrant] for channel in decisions.channels}
    positions = {id(site): position for position, site in enumerate(run.sites)}
    return {
        "delta": rule.delta,
        "c": rule.c,
        "rows": ROWS,
        "chosen": sites.index(chosen),
        "sites": [
            {
                "name": site.name,
                "beta": [_tenthousandths(value) for value in site.beta],
                "gamma": [_tenthousandths(abs(value)) for value in site.gamma],
                "keep": "".join("01"[keep] for keep in site.keep),
                "quadrant": "".join(quadrants.get((positions[id(site)], i), "-") for i in range(site.width)),
            }
            for site in sites
        ],
    }


def _tenthousandths(value: float) -> int | None:
    return round(value * 1e4) if math.isfinite(value) else None
