"""Figures of the accounting chapter."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path

from dsv41_edu.accounting import PHASES, active, flops, grand_total, headline, totals, touched
from dsv41_edu.config import ModelConfig
from dsv41_edu.figures import style
from dsv41_edu.figures.style import Drawing, canvas, finish
from dsv41_edu.generations import plan

COLOURS = {
    "routed experts": style.BLUE,
    "shared experts": style.SKY,
    "Engram tables": style.GREEN,
    "Engram projections": style.GREEN,
    "attention": style.ORANGE,
    "compressor": style.ORANGE,
    "indexer": style.ORANGE,
    "head": style.YELLOW,
    "embedding": style.YELLOW,
    "vision": style.PINK,
    "mHC": style.RED,
    "drafter": style.GREY,
}


def billions(n: float) -> str:
    """Parameters in words, three digits."""
    return f"{n / 1e9:.3g} B" if n < 1e12 and n >= 1e8 else f"{n / 1e6:.3g} M"


# ---- where the parameters live


def squarify(
    sizes: Sequence[float], x: float, y: float, w: float, h: float
) -> list[tuple[float, float, float, float]]:
    """Rectangles (x, y, w, h) of the given areas that fill w x h, near squares; sizes positive, descending.

    Source: Bruls, Huizing, van Wijk, "Squarified treemaps" (2000).
    """
    if not sizes:
        return []
    scale = w * h / sum(sizes)
    short = min(w, h)

    def worst(row: Sequence[float]) -> float:
        side = sum(row) * scale / short
        return max(max(side * side / (s * scale), s * scale / (side * side)) for s in row)

    n = 1
    while n < len(sizes) and worst(sizes[: n + 1]) <= worst(sizes[:n]):
        n += 1
    row, side = sizes[:n], sum(sizes[:n]) * scale / short
    found, at = [], 0.0
    for s in row:
        length = s * scale / side
        found.append((x, y + at, side, length) if w >= h else (x + at, y, length, side))
        at += length
    rest = (x + side, y, w - side, h) if w >= h else (x, y + side, w, h - side)
    return found + squarify(sizes[n:], *rest)


def treemap(config: ModelConfig) -> Drawing:
    """Every parameter of the checkpoint as area, and the small groups once more, enlarged."""
    sums: dict[str, int] = {}
    for group, s in totals(plan(config)).items():
        name = "drafter" if group.startswith("drafter") else group
        sums[name] = sums.get(name, 0) + s.parameters
    large = {k: v for k, v in sums.items() if v > 1e10}
    small = {k: v for k, v in sums.items() if v <= 1e10}
    everything = [*large.items(), ("the rest", sum(small.values()))]
    with canvas(9, 4.8) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        _treemap(left, sorted(everything, key=lambda kv: -kv[1]), letter=0.034)
        hidden = _treemap(right, sorted(small.items(), key=lambda kv: -kv[1]), letter=0.052)
        left.set_title(f"all {sum(sums.values()):,} parameters", loc="left")
        right.set_title(f"the rest, {billions(sum(small.values()))}, enlarged", loc="left")
        words = [f"{name} {billions(n)}" for name, n in hidden]
        lines = "\n".join(", ".join(words[i : i + 2]) for i in range(0, len(words), 2))
        right.text(0, 2.04, f"without a label:\n{lines}", fontsize=7.5, va="top", in_layout=False)
        return finish(
            figure,
            alt="Treemap of the checkpoint's parameters: routed experts fill most of it, Engram tables most of what "
            "is left; attention, embedding, head and all other parts share one small corner, enlarged beside it.",
            caption="Where the parameters live. Area is parameters; the right panel enlarges the left's last corner.",
            data=sums,
        )


def _treemap(ax: Axes, items: list[tuple[str, float]], letter: float) -> list[tuple[str, float]]:
    """Draw the areas; returns those too small for their name. `letter` is a letter's width in the axes' units."""
    hidden = []
    for (name, size), (x, y, w, h) in zip(items, squarify([s for _, s in items], 0, 0, 3, 2), strict=True):
        colour = COLOURS.get(name, style.GREY)
        ax.add_patch(Rectangle((x, y), w, h, facecolor=colour, edgecolor="white", linewidth=1.2))
        words = name if w > letter * (len(name) + 1) else name.replace(" ", "\n")
        if w > letter * (max(map(len, words.split("\n"))) + 1) and h > 0.2:
            ax.text(x + 0.04, y + 0.05, f"{words}\n{billions(size)}", fontsize=8, va="top", color=style.ON_COLOUR)
        else:
            hidden.append((name, size))
    ax.set(xlim=(0, 3), ylim=(2.3, 0))
    ax.axis("off")
    return hidden


# ---- what a token touches


def flow(config: ModelConfig) -> Drawing:
    """Stored, touched by a decode token, touched by a prompt token: three columns, the last two enlarged."""
    order = [
        "routed experts",
        "shared experts",
        "attention",
        "head",
        "Engram projections",
        "router",
        "indexer",
        "mHC",
    ]
    order += ["compressor"]
    stored = totals(plan(config))
    per_phase = {phase: {g: t.matrices for g, t in touched(config, phase).items()} for phase in PHASES}
    whole = grand_total(plan(config)).parameters
    with canvas(9, 5) as figure:
        ax = figure.subplots()
        top, zoom = 100.0, 100.0 / active(config, "decode")
        groups = [("routed experts", stored["routed experts"].parameters)]
        groups += [("Engram tables", stored["Engram tables"].parameters)]
        groups += [("drafter", sum(s.parameters for g, s in stored.items() if g.startswith("drafter")))]
        groups += [("everything else", whole - sum(n for _, n in groups))]
        at, label_at = top, top + 99
        for name, n in groups:
            height = n / whole * top
            _box(ax, 0, at - height, 1.3, height, COLOURS.get(name, style.YELLOW))
            label_at = min(at - height / 2, label_at - 4)  # thin boxes, readable names
            ax.text(-0.08, label_at, f"{name} {billions(n)}", ha="right", va="center", fontsize=8)
            at -= height
        sliver = active(config, "decode") / whole * top
        _box(ax, 1.3, 0, 0.12, sliver, style.INK)
        _ribbon(ax, (1.42, 0, sliver), (2.9, 0, active(config, "decode") * zoom), style.GREY, 0.25)
        ends: dict[str, dict[str, tuple[float, float]]] = {}
        for column, (phase, touched_now) in enumerate(per_phase.items()):
            x, at, ends[phase] = 2.9 + column * 2.6, 0.0, {}
            for name in reversed(order):
                height = touched_now.get(name, 0) * zoom
                _box(ax, x, at, 1.6, height, COLOURS.get(name, style.GREY))
                if height > 3:
                    label = f"{name} {billions(touched_now[name])}"
                    ax.text(
                        x + 0.8, at + height / 2, label, ha="center", va="center", fontsize=7.5, color=style.ON_COLOUR
                    )
                ends[phase][name] = (at, height)
                at += height
            words = f"{phase} token\n{billions(active(config, phase))}"
            ax.text(x + 0.8, at + 1.5, words, ha="center", va="bottom", fontsize=9)
        for name in order:
            _ribbon(
                ax, (4.5, *ends["decode"][name]), (5.5, *ends["prefill"][name]), COLOURS.get(name, style.GREY), 0.35
            )
        ax.text(0.65, top + 1.5, f"stored\n{billions(whole)}", ha="center", va="bottom", fontsize=9)
        ax.text(2.35, 3, f"{active(config) / whole:.1%}", ha="center", va="bottom", fontsize=9)
        ax.set(xlim=(-1.9, 7.2), ylim=(-5, 112))
        ax.axis("off")
        return finish(
            figure,
            alt="Flow from the stored parameters to the few that a decode token multiplies, and to the half of those "
            "that a prompt token multiplies: routed experts, attention and shared experts make up most of both.",
            caption="What a token multiplies. The dark sliver at the left column's foot is the whole middle column; "
            "the right column has the middle one's scale.",
            data={"stored": whole, **per_phase},
        )


def _box(ax: Axes, x: float, y: float, w: float, h: float, colour: str) -> None:
    ax.add_patch(Rectangle((x, y), w, h, facecolor=colour, edgecolor="white", linewidth=0.6))


def _ribbon(ax: Axes, left: tuple[float, ...], right: tuple[float, ...], colour: str, alpha: float) -> None:
    """A band between (x, y, height) on the left and on the right; nothing where the right end is empty."""
    (x0, y0, h0), (x1, y1, h1) = left, right
    if h1 == 0:
        return
    middle = (x0 + x1) / 2
    points = [(x0, y0), (middle, y0), (middle, y1), (x1, y1), (x1, y1 + h1)]
    points += [(middle, y1 + h1), (middle, y0 + h0), (x0, y0 + h0), (x0, y0)]
    codes = [Path.MOVETO, *[Path.CURVE4] * 3, Path.LINETO, *[Path.CURVE4] * 3, Path.CLOSEPOLY]
    ax.add_patch(PathPatch(Path(points, codes), facecolor=colour, edgecolor="none", alpha=alpha))


# ---- bytes


def readings(values: dict[str, float], stated: float) -> Drawing:
    """Several readings of one stated figure, as bars in GiB against it."""
    with canvas(8, 0.55 * len(values) + 0.9) as figure:
        ax = figure.subplots()
        names = list(values)
        colours = [style.GREEN if round(v, 1) == stated else style.GREY for v in values.values()]
        ax.barh(names, values.values(), color=colours)
        ax.axvline(stated, color=style.INK, linewidth=1.2, linestyle="--")
        for i, v in enumerate(values.values()):  # at the bars' foot, clear of the line
            ax.text(4, i, f"{v:.3f}", va="center", fontsize=9, color=style.ON_COLOUR)
        ax.invert_yaxis()
        ax.set(xlabel="GiB", xlim=(0, max(values.values()) * 1.05))
        ax.spines["left"].set_visible(False)
        ax.tick_params(axis="y", length=0)
        return finish(
            figure,
            alt=f"Bars of {len(values)} ways to count the experts' bytes; one meets the dashed line at {stated} GiB.",
            caption=f"Which bytes make {stated} GiB (dashed)? Only the bar in colour prints it.",
            data={"stated": stated, **values},
        )


# ---- arithmetic


def flops_by_context(config: ModelConfig) -> Drawing:
    """GFLOP of one decode token as the context grows, by what they are spent on."""
    contexts = [1 << i for i in range(7, config.max_position_embeddings.bit_length())]
    series: dict[str, list[float]] = {}
    for context in contexts:
        for name, n in flops(config, context).items():
            series.setdefault(name, []).append(n / 1e9)
    with canvas(8, 4) as figure:
        ax = figure.subplots()
        colours = (style.BLUE, style.ORANGE, style.GREEN, style.RED)
        ax.stackplot(contexts, series.values(), labels=series, colors=colours, linewidth=0)
        ax.set_xscale("log", base=2)
        ax.set(xlabel="tokens of context", ylabel="GFLOP per decoded token", xlim=(contexts[0], contexts[-1]))
        marks = [c for c in contexts if c in (128, 1 << 10, 1 << 13, 1 << 16, 1 << 20)]
        ax.set_xticks(marks, [_binary(c) for c in marks])
        ax.legend(loc="upper left", fontsize=9)
        return finish(
            figure,
            alt="Stacked areas of operations per decoded token over context: matrices stay constant, attention "
            "saturates early, index scores grow to two thirds of the matrices at a million tokens.",
            caption="One decoded token's arithmetic. Attention reads a bounded number of entries; index scores grow.",
            data={"contexts": contexts, **{k: [round(x, 3) for x in v] for k, v in series.items()}},
        )


def _binary(n: int) -> str:
    return f"{n >> 20} Mi" if n >= 1 << 20 else f"{n >> 10} Ki" if n >= 1 << 10 else str(n)


# ---- generations


def generations(configs: dict[str, ModelConfig]) -> Drawing:
    """Total and active parameters of each generation, on logarithmic axes."""
    points: dict[str, Any] = {}
    with canvas(8, 4.4) as figure:
        ax = figure.subplots()
        for name, config in configs.items():
            found = headline(config)
            total, now = found["backbone"] + found["tables"], found["active, decode"]
            points[name] = [total, now]
            mine = config.model_type == "deepseek_v41"
            ax.scatter(total, now, s=60, color=style.RED if mine else style.BLUE, zorder=3)
            up = name in ("V3.2", "V2")
            ax.annotate(
                f"{name}\n{now / total:.1%} active",
                (total, now),
                xytext=(0, 9 if up else -9),
                textcoords="offset points",
                ha="center",
                va="bottom" if up else "top",
                fontsize=8,
            )
        ax.set(xscale="log", yscale="log", xlim=(1e10, 3e12), ylim=(1.3e9, 8e10))
        ax.set_xticks([1e10, 1e11, 1e12], ["10 B", "100 B", "1 T"])
        ax.set_yticks([2e9, 5e9, 1e10, 2e10, 5e10], ["2 B", "5 B", "10 B", "20 B", "50 B"])
        ax.minorticks_off()
        ax.set_xlabel("parameters of backbone and tables")
        ax.set_ylabel("active per decode token")
        ax.grid(True, linewidth=0.5)
        ax.set_axisbelow(True)
        return finish(
            figure,
            alt="Scatter of total against active parameters for seven models of the family; the active share falls "
            "from a sixth in the first to about two percent in V4.1-Flash.",
            caption="Seven models by the same sums. The share that a token multiplies fell with almost every one.",
            data=points,
        )
