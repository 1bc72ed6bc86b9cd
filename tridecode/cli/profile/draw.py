"""Pictures of a profile in SVG, for light and dark backgrounds."""

from collections import Counter
from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape

from .records import Span

WIDTH, LEFT, RIGHT = 1000, 20, 20
LANES, LANE = 3, 18  # Number of rows for overlapping launches, and height of a row in pixels.
COLORS = ("#d9822b", "#c75c7f", "#8a8f98", "#9a6fc9", "#b59a3c", "#7f9a3b", "#3aa08f", "#4c8bd6")
OTHER_COLOR = "#6f8299"  # Color of further roles.
LEVELS = (  # Largest number of choices of an expert, relative to the mean; name; opacity.
    (0, "never", 0.04), (0.25, "up to 1/4", 0.15), (0.5, "up to 1/2", 0.3), (1, "up to 1", 0.45), (2, "up to 2", 0.6),
    (4, "up to 4", 0.8), (float("inf"), "more", 1),
)  # fmt: skip
STYLE = """\
<style>
text { font: 12px sans-serif; fill: #1f2328 } .title { font-weight: bold }
.dim { fill: #59636e } .axis { stroke: #d1d9e0 } .page { fill: #ffffff }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc } .dim { fill: #9198a1 } .axis { stroke: #3d444d } .page { fill: #0d1117 } }
</style>"""


def page(height: float, parts: Sequence[str]) -> str:
    """Return an SVG document of this height with these elements."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}">'
    return "\n".join([head, STYLE, '<rect class="page" width="100%" height="100%"/>', *parts, "</svg>"]) + "\n"


def text(x: float, y: float, words: str, more: str = "") -> str:
    """Return an SVG text element. `more` are further attributes."""
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(words)}</text>'


def timeline(title: str, step: Sequence[Span]) -> str:
    """Draw the whole pass in the upper half, and the layer in its middle in the lower half.

    A launch is pale while earlier launches still run, and has its full color after they have ended.
    """
    repeated = {op for op, count in Counter(span.op for span in step).items() if count > 1}
    first = next((span.op for span in step if span.op in repeated), None)  # The first launch of a layer.
    borders = [i for i, span in enumerate(step) if span.op == first or span.op == "lm_head"]
    layers = len(borders) - 1
    whole, layer = step, step[borders[layers // 2] : borders[layers // 2 + 1]]
    parts = [text(LEFT, 24, title, 'class="title"')]
    parts += legend(list(dict.fromkeys(span.op for span in step)), 48)
    parts += track(f"the whole step, {len(whole)} launches", whole, 76, colors_of(span.op for span in step))
    parts += track(f"layer {layers // 2 + 1} of {layers}", layer, 180, colors_of(span.op for span in step), labels=True)
    note = "Pale: a launch as recorded, while earlier ones still run. Full color: its cost, from their end on."
    parts.append(text(LEFT, 284, note, 'class="dim"'))
    return page(300, parts)


def colors_of(ops: Iterable[str]) -> dict[str, str]:
    """Return a color for each role. Equal sets of roles have equal colors."""
    roles = sorted(set(ops))
    return dict(zip(roles, COLORS)) | dict.fromkeys(roles[len(COLORS) :], OTHER_COLOR)


def legend(ops: Sequence[str], y: float) -> list[str]:
    """Return the colored squares and names of the ops, in a row at `y`."""
    parts, x, colors = [], LEFT, colors_of(ops)
    for op in ops:
        parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{colors[op]}"/>')
        parts.append(text(x + 17, y, op))
        x += 40 + 8 * len(op)
    return parts


def track(title: str, spans: Sequence[Span], top: float, colors: dict[str, str], labels: bool = False) -> list[str]:
    """Draw a row of launches over a time axis that starts with the cost of the first one."""
    begin, end = spans[0].before, max(span.end for span in spans)
    begin = min(begin, *(span.start for span in spans)) if labels else begin
    scale = (WIDTH - LEFT - RIGHT) / max(end - begin, 1e-9)

    def x(time: float) -> float:
        return LEFT + (max(time, begin) - begin) * scale

    parts = [text(LEFT, top, f"{title}, {end - begin:,.1f} µs", 'class="dim"')]
    for i, span in enumerate(spans):
        y, color = top + 8 + (i % LANES) * LANE, colors[span.op]
        for left, opacity in ((span.start, 0.35), (max(span.start, span.before), 1)):
            if span.end > left:
                width = max(x(span.end) - x(left), 0.3)
                box = f'x="{x(left):.2f}" y="{y}" width="{width:.2f}" height="{LANE - 3}"'
                parts.append(f'<rect {box} fill="{color}" opacity="{opacity}"/>')
        if labels:
            parts.append(text(x(span.start) + 3, y + 11, f"{span.op} {span.cost:.1f}"))
    base = top + 8 + LANES * LANE + 4
    parts.append(f'<path class="axis" d="M{LEFT} {base}H{WIDTH - RIGHT}"/>')
    for i in range(6):
        words, anchor = f"{(end - begin) * i / 5:,.1f}", ("start", *["middle"] * 4, "end")[i]
        place = LEFT + (WIDTH - LEFT - RIGHT) * i / 5
        parts.append(text(place, base + 14, words, f'class="dim" text-anchor="{anchor}"'))
    return parts


def loads(title: str, layers: Sequence[dict]) -> str:
    """Draw a line of cells for each layer, one for each expert. The color shows how often tokens choose the expert."""
    left, top, height = 70, 76, 12
    cell = (WIDTH - left - RIGHT) / max(layer["experts"] for layer in layers)
    levels: dict[int, list[str]] = {level: [] for level in range(len(LEVELS))}
    parts = [text(LEFT, 24, title, 'class="title"')]
    for row, layer in enumerate(layers):
        y, mean = top + row * height, sum(layer["counts"]) / layer["experts"]
        parts.append(text(left - 8, y + 10, str(layer["layer"]), 'class="dim" text-anchor="end"'))
        for expert, count in enumerate(layer["counts"]):
            level = next(i for i, (limit, _, _) in enumerate(LEVELS) if count <= limit * mean)
            levels[level].append(f"M{left + expert * cell:.1f} {y}h{cell - 0.3:.1f}v{height - 1}h-{cell - 0.3:.1f}z")
    for (_, words, opacity), cells, x in zip(LEVELS, levels.values(), range(left, WIDTH, 110)):
        look = f'fill="{COLORS[-1]}" opacity="{opacity}"'
        parts.append(f'<rect x="{x}" y="42" width="12" height="12" {look}/>')
        parts.append(text(x + 17, 52, words))
        if cells:
            parts.append(f'<path {look} d="{"".join(cells)}"/>')
    bottom = top + len(layers) * height
    note = "A line for each layer, a cell for each expert. Color: its choices, relative to the mean of the layer."
    parts.append(text(left, bottom + 18, note, 'class="dim"'))
    return page(bottom + 30, parts)


def shares(title: str, kernels: Sequence[dict]) -> str:
    """Draw a bar for each role, as long as its share of the step."""
    parts, y, start, max_width = [text(LEFT, 24, title, 'class="title"')], 40, 330, 360
    colors = colors_of(role["op"] for role in kernels)
    largest = max(role["share_pct"] for role in kernels)
    for role in kernels:
        width = max(max_width * role["share_pct"] / largest, 1) if largest else 1
        name = role["op"] if len(role["op"]) <= 44 else role["op"][:43] + "…"
        words = f"{role['share_pct']:.1f}% · {role['launches']} x {role['mean_us']:.2f} µs"
        if role.get("pct_bandwidth") is not None:
            words += f" · {role['pct_bandwidth']:.0f}% of bandwidth"
        parts.append(text(start - 10, y + 13, name, 'text-anchor="end"'))
        color = colors[role["op"]]
        parts.append(f'<rect x="{start}" y="{y}" width="{width:.1f}" height="18" fill="{color}"/>')
        parts.append(text(start + width + 8, y + 13, words))
        y += 26
    return page(y + 8, parts)
