"""Plot the held-out bits per byte of a training log as an SVG.

python training/plot_losses.py training/results/metrics.json training/results/losses.svg
"""

import json
import sys
from pathlib import Path

WIDTH, HEIGHT, LEFT, TOP, BOTTOM, RIGHT = 900, 460, 60, 40, 60, 170
COLORS = "#1f77b4 #ff7f0e #2ca02c #d62728 #9467bd #8c564b #e377c2 #7f7f7f #bcbd22 #17becf #393b79 #637939".split()


def draw(log: list[dict]) -> str:
    """Return the SVG of a training log (`results/metrics.json`)."""
    points = [entry for entry in log if "held_out_bits_per_byte" in entry]
    sources = sorted(points[-1]["held_out_bits_per_byte"])
    most_tokens = max(entry["tokens"] for entry in points)
    highest = max(max(entry["held_out_bits_per_byte"].values()) for entry in points)

    def x(tokens: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * tokens / most_tokens

    def y(bits: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * bits / highest

    def text(left: float, top: float, words: str, more: str = "") -> str:
        return f'<text x="{left:.1f}" y="{top:.1f}" {more}>{words}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        "<style>text { font-size: 12px }</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(LEFT, 20, "Held-out bits per byte against tokens seen"),
    ]
    for bits in range(int(highest) + 1):
        parts.append(f'<path d="M{LEFT} {y(bits):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(text(LEFT - 8, y(bits) + 4, str(bits), 'text-anchor="end"'))
    for tokens in range(0, most_tokens, 100_000_000):
        parts.append(text(x(tokens), HEIGHT - BOTTOM + 18, f"{tokens // 1_000_000} M", 'text-anchor="middle"'))
    border = x(max(entry["tokens"] for entry in log if entry["stage"] == "pretrain"))
    parts.append(f'<path d="M{border:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="black" stroke-dasharray="4"/>')
    parts.append(text(border - 6, TOP + 12, "pretraining", 'text-anchor="end"'))
    parts.append(text(border + 6, TOP + 12, "fine-tuning"))
    for row, source in enumerate(sources):
        color = COLORS[row % len(COLORS)]
        places = [f"{x(e['tokens']):.1f},{y(e['held_out_bits_per_byte'][source]):.1f}" for e in points]
        parts.append(f'<polyline points="{" ".join(places)}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        last = points[-1]["held_out_bits_per_byte"][source]
        parts.append(text(WIDTH - RIGHT + 12, TOP + 14 + 20 * row, f"{source} {last:.2f}", f'fill="{color}"'))
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__.strip())
    Path(sys.argv[2]).write_text(draw(json.loads(Path(sys.argv[1]).read_text())))
