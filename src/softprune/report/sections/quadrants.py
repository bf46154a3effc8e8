"""SCP's decision beside Slimming's: every channel by (beta, |gamma|), and a typical one of each kind."""

from __future__ import annotations

from collections.abc import Sequence

from softprune.report.bells import REACH, bell, bell_defs
from softprune.report.decisions import Channel, Decisions, exemplar
from softprune.report.figures import figure, section, svg, x_axis, y_axis
from softprune.report.formats import count, percent, significant
from softprune.report.markup import Markup, el, num
from softprune.report.scales import Scale, limits, quantile, ticks
from softprune.report.signs import BETA, DELTA, GAMMA, THIN
from softprune.runs.records import Run, Site

WIDTH, HEIGHT = 620, 730
LEFT, RIGHT, TOP, BOTTOM = 52, 606, 30, 672

KINDS = {
    "keep": ("Both keep", "It varies, and much of it passes the activation."),
    "scp": (
        "Only SCP drops",
        f"It varies, but almost all of it lies below {DELTA}: the activation silences it.",
    ),
    "slimming": (
        "Only Slimming drops",
        "Its scale is small, yet its shift carries it through the activation.",
    ),
    "drop": ("Both drop", f"It hardly varies, and it lies below {DELTA}."),
}


def quadrants(run: Run, decisions: Decisions | None) -> Markup | None:
    if decisions is None:
        return None
    counts = decisions.counts
    total = len(decisions.channels)
    dropped = counts["scp"] + counts["drop"]
    who = "SCP dropped" if decisions.recorded else "SCP's rule would drop"
    if dropped:
        lead = (
            f"{who} {count(dropped)} of {count(total)} channels. Slimming looks at |{GAMMA}| alone: it would "
            f"have kept {count(counts['scp'])} of these and dropped as many others."
        )
    else:
        lead = (
            f"{who} none of {count(total)} channels, so there is nothing for Slimming to choose differently."
        )
    return section(
        "decisions",
        "SCP's decision beside Slimming's",
        lead,
        figure(
            "decisions",
            el(
                "div",
                el("div", _plane(decisions), el("p", class_="readout", aria_live="polite"), class_="plane"),
                _cards(decisions, run.sites),
                class_="beside",
            ),
            caption=_caption(decisions),
        ),
    )


def _scales(channels: Sequence[Channel], threshold: float) -> tuple[Scale, Scale]:
    low, high = limits([channel.beta for channel in channels], trim=0.002)
    most = max(quantile([channel.gamma for channel in channels], 0.998) * 1.06, threshold * 1.5, 1e-3)
    # Where Slimming's line would lie on the axis, a square-root axis gives the small scales room.
    return Scale(low, high, LEFT, RIGHT), Scale(0.0, most, BOTTOM, TOP, root=0 < threshold < 0.05 * most)


def _plane(decisions: Decisions) -> Markup:
    scale_x, scale_y = _scales(decisions.channels, decisions.threshold)
    dots: dict[str, set[str]] = {kind: set() for kind in KINDS}
    for channel in decisions.channels:
        # Channels on the same half pixel are one dot to the eye, and to the file.
        x, y = round(2 * scale_x.clamp(channel.beta)) / 2, round(2 * scale_y.clamp(channel.gamma)) / 2
        dots[channel.quadrant].add(f"M{num(x)} {num(y)}h0")
    y_ticks = ticks(0.0, scale_y.high, 5)
    if scale_y.root:
        y_ticks = [
            tick for tick in (0.0, 0.01, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.0, 3.0) if tick <= scale_y.high
        ]
    counts = decisions.counts
    chart = svg(
        "drawing",
        WIDTH,
        HEIGHT,
        "Every channel by shift and scale",
        ", ".join(f"{KINDS[kind][0].lower()}: {counts[kind]}" for kind in KINDS),
        x_axis(scale_x, ticks(scale_x.low, scale_x.high, 6), TOP, BOTTOM),
        y_axis(scale_y, y_ticks, LEFT, RIGHT),
        el(
            "text",
            f"|{GAMMA}|",
            el("tspan", " scale" + (", square-root axis" if scale_y.root else ""), class_="soft"),
            x=LEFT,
            y=TOP - 12,
            class_="axis",
        ),
        el("text", BETA, el("tspan", " shift", class_="soft"), x=RIGHT, y=BOTTOM + 40, class_="axis end"),
        *(
            el("path", d="".join(sorted(dots[kind])), class_=f"dots q-{kind}")
            for kind in ("drop", "keep", "scp", "slimming")
        ),
        _scp_line(decisions, scale_x, scale_y),
        _slimming_line(decisions, scale_y),
        el("g", class_="cursor"),
    )
    return el(
        "div",
        chart,
        class_="chart",
        data_low=repr(scale_x.low),
        data_high=repr(scale_x.high),
        data_most=repr(scale_y.high),
        data_root=str(int(scale_y.root)),
        data_left=LEFT,
        data_right=RIGHT,
        data_top=TOP,
        data_bottom=BOTTOM,
    )


def _scp_line(decisions: Decisions, scale_x: Scale, scale_y: Scale) -> Markup:
    """beta + z_c |gamma| = delta: straight, or bent by a square-root axis; cut off at the frame."""
    rule = decisions.rule
    highest = (
        scale_y.high if rule.z <= 0 else min(scale_y.high, max((rule.delta - scale_x.low) / rule.z, 0.0))
    )
    points = [
        (scale_x.clamp(rule.delta - rule.z * gamma), scale_y(gamma))
        for gamma in (highest * step / 40 for step in range(41))
    ]
    path = "M" + "L".join(f"{num(x)} {num(y)}" for x, y in points)
    # The label stands where the line leaves the points below it, a third of the way down from its upper end.
    x, y = points[30]
    label = f"SCP: {BETA} + {significant(rule.z)}{THIN}|{GAMMA}| = {DELTA}"
    left = x > (LEFT + RIGHT) / 2
    return el(
        "g",
        el("path", d=path, class_="decision halo"),
        el("path", d=path, class_="decision"),
        el(
            "text",
            label,
            x=x + (-12 if left else 12),
            y=y - 6,
            class_="label on-plane" + (" end" if left else ""),
        ),
    )


def _slimming_line(decisions: Decisions, scale_y: Scale) -> Markup | None:
    if decisions.threshold <= 0:
        return None
    y = scale_y(decisions.threshold)
    label = f"Slimming: |{GAMMA}| = {significant(decisions.threshold)}"
    return el(
        "g",
        el("line", x1=LEFT, x2=RIGHT, y1=y, y2=y, class_="decision halo"),
        el("line", x1=LEFT, x2=RIGHT, y1=y, y2=y, class_="decision dashed"),
        el("text", label, x=RIGHT - 4, y=y - 7, class_="label on-plane end"),
    )


def _cards(decisions: Decisions, sites: Sequence[Site]) -> Markup:
    counts, total = decisions.counts, len(decisions.channels)
    examples = {kind: exemplar(decisions, kind) for kind in KINDS}
    reach = [
        edge
        for channel in examples.values()
        if channel is not None
        for edge in (channel.beta - REACH * channel.gamma, channel.beta + REACH * channel.gamma)
    ]
    low, high = min(reach), max(reach)
    cards = []
    for kind, (title, meaning) in KINDS.items():
        channel = examples[kind]
        cards.append(
            el(
                "li",
                el(
                    "h3",
                    el("span", class_=f"swatch q-{kind}"),
                    title,
                    el(
                        "b",
                        count(counts[kind]),
                        el("small", percent(100 * counts[kind] / total)),
                        class_="tally",
                        data_value=str(counts[kind]),
                    ),
                ),
                el("p", meaning),
                _example(kind, channel, sites, decisions, low, high) if channel else None,
                class_="case",
                data_kind=kind,
            )
        )
    return el("ul", *cards, class_="cases")


def _example(
    kind: str, channel: Channel, sites: Sequence[Site], decisions: Decisions, low: float, high: float
) -> Markup:
    """A typical channel of this kind, to the same scale as the other three."""
    delta = decisions.rule.delta
    scale = Scale(min(low, delta - 0.1), max(high, delta + 0.1), 4, 276)
    pixels = (scale.end - scale.start) / (scale.high - scale.low)
    identifier = f"case-{kind}"
    style = "kept" if kind in ("keep", "slimming") else "dropped"
    name = sites[channel.site].name
    chart = svg(
        "example",
        280,
        64,
        f"A typical channel: {KINDS[kind][0].lower()}",
        f"{name}, channel {channel.index}",
        bell_defs(identifier, 0, 280, scale(delta), 0, 64),
        el("line", x1=0, x2=280, y1=60, y2=60, class_="base"),
        bell(identifier, scale(channel.beta), channel.gamma * pixels, 60.0, 46.0, style, ""),
        el("line", x1=scale(delta), x2=scale(delta), y1=4, y2=60, class_="delta"),
        el("text", DELTA, x=scale(delta) + 5, y=14, class_="tick"),
    )
    numbers = f"{BETA} {significant(channel.beta)}, |{GAMMA}| {significant(channel.gamma)}"
    words = el("p", f"{name}, channel {channel.index}: {numbers}", class_="example-name")
    return el("div", chart, words)


def _caption(decisions: Decisions) -> str:
    text = (
        f"Left of SCP's line, more than {percent(100 * decisions.rule.c, 0)} of the mass is below {DELTA}. "
        "Slimming's line is one threshold for the whole network, set to drop as many channels as SCP. "
        "The curves are the channels nearest to the median of each kind."
    )
    against = sum(
        channel.scp_drops != decisions.rule.drops(channel.beta, channel.gamma)
        for channel in decisions.channels
    )
    if against:
        text += (
            f" {count(against)} channels lie on the other side of SCP's line than the run decided: "
            "rounding, a floor, a budget, or an activation with a rule of its own."
        )
    return text
