"""The two drawings of the manual, as SVG.

    python benchmarks/figures.py    # writes docs/pictures/iteration.svg and docs/pictures/sample.svg

The drawings are 700 units wide, which is their width in pixels on a page. They have a light background, so that they
can be read on a dark page as well. No text is smaller than 12 units.
"""

from html import escape

import torch
from common import BLUE, GREY, GRID, INK, ORANGE, PAPER, RED, ROOT, ppo_llm

FOLDER = ROOT / "docs" / "pictures"
WIDTH = 700
SANS = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"
MONO = "Menlo, Consolas, 'Liberation Mono', 'DejaVu Sans Mono', monospace"
NOTE = "#5c5c5c"  # the colour of small text
WHITE, FAINT_ORANGE, FAINT_BLUE, FAINT_GREY = "#ffffff", "#fbe7c8", "#d9e8f5", "#e8e8e4"


class Drawing:
    """Elements of an SVG, in units of a pixel, with the origin in the upper left corner."""

    def __init__(self, height: int, description: str):
        self.height = height
        self.lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
            f' role="img" font-family="{SANS}" font-size="13" fill="{INK}">',
            f"<title>{escape(description)}</title>",
        ]
        self.rect(0.5, 0.5, WIDTH - 1, height - 1, PAPER, GRID, radius=10)

    def rect(self, x, y, width, height, fill=WHITE, stroke=GREY, radius=4, dashes="") -> None:
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        self.lines.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="{radius}" fill="{fill}" stroke="{stroke}"'
            f"{dashed}/>"
        )

    def text(self, x, y, text: str, color=INK, size=13, anchor="start", bold=False, mono=False) -> None:
        """One line of text, whose baseline is y."""
        style = f' font-family="{MONO}"' * mono + ' font-weight="bold"' * bold
        style += f' font-size="{size}"' * (size != 13) + f' fill="{color}"' * (color != INK)
        style += f' text-anchor="{anchor}"' * (anchor != "start")
        self.lines.append(f'<text x="{x}" y="{y}"{style} xml:space="preserve">{escape(text, quote=False)}</text>')

    def box(self, x, y, width, height, lines: list[str], fill=WHITE, stroke=GREY, dashes="") -> None:
        """A rectangle with centred lines of text. A line that begins with ` is code."""
        self.rect(x, y, width, height, fill, stroke, dashes=dashes)
        first = y + height / 2 + 4.5 - 8 * (len(lines) - 1)
        for i, line in enumerate(lines):
            code = line.startswith("`")
            self.text(x + width / 2, first + 16 * i, line.strip("`"), size=12 if code or i else 13, anchor="middle",
                      bold=not code and i == 0 and fill != WHITE, mono=code)  # fmt: skip

    def arrow(self, *points, color=GREY, dashes="", width=1.5) -> None:
        """Straight lines through the points, with a head at the last one."""
        (x0, y0), (x, y) = points[-2:]
        length = ((x - x0) ** 2 + (y - y0) ** 2) ** 0.5
        dx, dy = (x - x0) / length, (y - y0) / length
        base = x - 7 * dx, y - 7 * dy
        path = " ".join(f"{a:g},{b:g}" for a, b in (*points[:-1], base))
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        self.lines.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}"{dashed}/>'
        )
        corners = (x, y), (base[0] - 3.5 * dy, base[1] + 3.5 * dx), (base[0] + 3.5 * dy, base[1] - 3.5 * dx)
        self.lines.append(
            f'<polygon points="{" ".join(f"{round(a, 2):g},{round(b, 2):g}" for a, b in corners)}" fill="{color}"/>'
        )

    def circle(self, x, y, radius, fill, stroke) -> None:
        self.lines.append(f'<circle cx="{x}" cy="{y}" r="{radius}" fill="{fill}" stroke="{stroke}"/>')

    def line(self, x1, y1, x2, y2, color=GREY, dashes="", width=1) -> None:
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        self.lines.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{color}" stroke-width="{width}"{dashed}/>'
        )

    def svg(self) -> str:
        return "\n".join([*self.lines, "</svg>", ""])


def iteration() -> str:
    """What flows where in one iteration of the training loop."""
    d = Drawing(
        726,
        "The data flow of one iteration. Prompts go to the sampler, which plays episodes with the environment. "
        "Reward model, actor, reference and critic score the episodes once. Rewards, the KL, and the values give "
        "returns and advantages, which are constant from here on. The critic's epochs and the actor's epochs train "
        "the two models. The sampler receives the actor's new weights.",
    )
    left, right = 132, 672
    columns = [(left + 138 * i, 126) for i in range(4)]  # x, width
    centers = [x + width / 2 for x, width in columns]

    def step(y, number, name, *lines):
        d.text(16, y, f"{number} {name}", bold=True)
        for i, line in enumerate(lines, start=1):
            d.text(16, y + 17 * i, line.strip("`"), color=NOTE, size=12, mono=line.startswith("`"))

    def shelf(y):
        d.line(16, y, right, y, color=GRID)

    # --- 1. Rollout.
    step(60, 1, "Rollout", "`play")
    d.box(left, 40, 100, 44, ["prompts", "from seeds"])
    d.box(290, 40, 150, 44, ["sampler", "a copy of the actor"], FAINT_ORANGE, ORANGE, dashes="5 3")
    d.box(522, 40, 150, 44, ["environment", "rewards, messages"])
    d.arrow((left + 100, 62), (290, 62))
    d.arrow((440, 55), (522, 55))
    d.text(481, 49, "response", size=12, anchor="middle", color=NOTE)
    d.arrow((522, 71), (440, 71))
    d.text(481, 86, "message", size=12, anchor="middle", color=NOTE)
    d.arrow((365, 84), (365, 106))
    d.arrow((597, 84), (597, 106))
    d.rect(left, 106, right - left, 30, FAINT_BLUE, BLUE)
    d.text(left + 10, 126, "episodes", bold=True)
    d.text(left + 92, 126, "tokens  mask  sampler_logprobs  rewards", mono=True, size=12)
    shelf(150)

    # --- 2. Scoring.
    step(184, 2, "Scoring", "once, before", "any update")
    models = [
        (["reward model", "frozen, optional"], FAINT_GREY, GREY, "`rewards", "plus its score"),
        (["actor", "before the updates"], FAINT_ORANGE, ORANGE, "`old_logprobs", None),
        (["reference", "frozen"], FAINT_GREY, GREY, "`ref_logprobs", None),
        (["critic", "before the updates"], FAINT_ORANGE, ORANGE, "`values", None),
    ]
    for (x, width), center, (lines, fill, stroke, output, more) in zip(columns, centers, models):
        d.arrow((center, 136), (center, 164))
        d.box(x, 164, width, 44, lines, fill, stroke, dashes="5 3" if "optional" in lines[1] else "")
        d.arrow((center, 208), (center, 230))
        d.box(x, 230, width, 42 if more else 30, [output, more] if more else [output], FAINT_BLUE, BLUE)
    shelf(286)

    # --- 3. Advantages.
    step(318, 3, "Advantages", "`compute_gae", "`masked_whiten")
    d.box(left, 302, 402, 30, ["`rewards - kl_coef * (old_logprobs - ref_logprobs)"])
    d.arrow((centers[0], 272), (centers[0], 302))
    d.arrow((centers[1], 260), (centers[1], 302))
    d.arrow((centers[2], 260), (centers[2], 302))
    d.arrow((left + 201, 332), (left + 201, 354))
    d.arrow((centers[3], 260), (centers[3], 354))
    d.box(left, 354, right - left, 30, ["`compute_gae(rewards, values, mask, gamma, lambda)"])
    half = (right - left - 18) / 2
    second = left + half + 18
    d.arrow((left + half / 2, 384), (left + half / 2, 420))
    d.text(left + half / 2 + 10, 407, "with --critic-lambda", size=12, color=NOTE)
    d.arrow((second + half / 2, 384), (second + half / 2, 420))
    d.text(second + half / 2 + 10, 400, "with --gae-lambda,", size=12, color=NOTE)
    d.text(second + half / 2 + 10, 415, "then whitened", size=12, color=NOTE)
    d.box(left, 420, half, 30, ["`returns"], FAINT_BLUE, BLUE)
    d.box(second, 420, half, 30, ["`advantages"], FAINT_BLUE, BLUE)
    d.line(16, 472, right, 472, color=BLUE, dashes="6 4", width=1.5)
    d.rect(290, 462, 224, 20, PAPER, PAPER)
    d.text(402, 477, "all blue is constant from here on", color=BLUE, anchor="middle", bold=True, size=12)

    # --- 4. Updates.
    step(516, 4, "Updates", "`for epoch", "`  for minibatch", "`    for mb")
    d.arrow((left + half / 2, 450), (left + half / 2, 498))
    d.arrow((second + half / 2, 450), (second + half / 2, 498))
    cards = [
        (left, "critic", "critic epochs come first", "newvalues",
         ["value_loss(newvalues,", "  mb.values, mb.returns)", "optimizer_step(critic)"]),
        (second, "actor", "actor epochs come second", "newlogprobs",
         ["policy_loss(newlogprobs,", "  mb.old_logprobs, mb.advantages)", "optimizer_step(actor)"]),
    ]  # fmt: skip
    for x, model, heading, output, lines in cards:
        d.rect(x, 498, half, 112, FAINT_ORANGE, ORANGE)
        d.text(x + 12, 518, heading, bold=True)
        d.text(x + 12, 542, output, size=12, mono=True)
        d.text(x + 20 + 7.3 * len(output), 542, f"by the {model} as it is now", size=12)
        for i, line in enumerate(lines):
            d.text(x + 12, 562 + 18 * i, line, size=12, mono=True)

    # --- 5. Hand-over.
    step(652, 5, "Hand-over")
    d.arrow((second + half / 2, 610), (second + half / 2, 634))
    d.box(second, 634, half, 28, ["`update_sampler(actor, sampler)"])
    d.arrow((right, 648), (right + 14, 648), (right + 14, 18), (365, 18), (365, 40), color=ORANGE)
    d.text(right - 4, 32, "the actor's new weights", size=12, anchor="end", color=ORANGE)

    # --- Key.
    shelf(676)
    key = [("trains", FAINT_ORANGE, ORANGE, ""), ("gets new weights", FAINT_ORANGE, ORANGE, "5 3"),
           ("frozen", FAINT_GREY, GREY, ""), ("constant data", FAINT_BLUE, BLUE, ""),
           ("computation or input", WHITE, GREY, "")]  # fmt: skip
    x = 16
    for name, fill, stroke, dashes in key:
        d.rect(x, 692, 22, 16, fill, stroke, dashes=dashes)
        d.text(x + 29, 705, name, size=12)
        x += 29 + 7.2 * len(name) + 22
    return d.svg()


def sample() -> str:
    """Which entry of which tensor belongs to which token of an episode of two turns."""
    d = Drawing(
        556,
        "The layout of a sample of two turns. Its tokens have the indices 0 to T - 1: the prompt, a response, the "
        "environment's message, a second response, and padding. The mask is 1 at the tokens of the responses. "
        "Log-probs and values of token t are stored at index t and computed from the output at index t - 1. The "
        "reward of a turn is at the last token of its response. GAE goes from the last sampled token to the first.",
    )
    parts = [("prompt", "0 to 7 ?", WHITE), ("response", "4 <eos>", FAINT_ORANGE), ("message", "less ?", WHITE),
             ("response", "2 <eos>", FAINT_ORANGE), ("padding", "pad pad", FAINT_GREY)]  # fmt: skip
    tokens = [(token, fill) for _, text, fill in parts for token in text.split()]
    T, left, size = len(tokens), 132, 46
    x = lambda t: left + size * t  # the left edge of the column of token t
    center = lambda t: left + size * t + size / 2
    mask = torch.tensor([[fill == FAINT_ORANGE for _, fill in tokens]])
    sampled = mask[0].nonzero()[:, 0].tolist()
    zeros = torch.zeros(1, T)
    logprobs, values, rewards = zeros.clone(), zeros.clone(), zeros.clone()
    logprobs[mask] = torch.tensor([-1.9, -0.1, -0.7, -0.1])
    values[mask] = torch.tensor([0.5, 0.4, 0.6, 0.7])
    rewards[0, sampled[1]], rewards[0, sampled[3]] = -0.2, 1.0
    advantages, returns = ppo_llm.compute_gae(rewards, values, mask, 1.0, 1.0)

    def label(y, name, *more):
        d.text(16, y, name, mono=True, size=12)
        for i, line in enumerate(more, start=1):
            d.text(16, y + 15 * i, line, color=NOTE, size=12)

    def row(y, numbers, form):
        for t, number in enumerate(numbers):
            inside = t in sampled
            d.rect(x(t) + 2, y, size - 4, 26, FAINT_BLUE if inside else PAPER, BLUE if inside else GRID)
            text = form(number) if inside else "0"
            d.text(center(t), y + 17.5, text, size=12, anchor="middle", mono=True, color=INK if inside else GREY)

    # --- Tokens and mask.
    t = 0
    for name, text, _ in parts:
        count = len(text.split())
        d.line(x(t) + 4, 38, x(t + count) - 4, 38, color=INK)
        d.text((x(t) + x(t + count)) / 2, 29, name, anchor="middle", bold=name == "response")
        t += count
    label(58, "index t")
    label(88, "tokens")
    for t, (token, fill) in enumerate(tokens):
        d.text(center(t), 58, str(t), size=12, anchor="middle", color=NOTE, mono=True)
        d.rect(x(t) + 2, 70, size - 4, 26, fill, ORANGE if fill == FAINT_ORANGE else GREY)
        d.text(center(t), 87.5, token, size=12, anchor="middle", mono=True)
    label(122, "mask")
    row(104, mask[0], lambda number: "1")

    # --- The shift by one.
    label(160, "output at t", "of the model that", "reads tokens 0 to t")
    for t in range(len(tokens) - 2):
        used = t + 1 in sampled
        d.circle(center(t), 156, 8, FAINT_BLUE if used else PAPER, BLUE if used else GRID)
        if used:
            d.arrow((center(t) + 6, 163), (center(t + 1) - 8, 206), color=BLUE)
    d.text(x(T) - 2, 153, "logprobs[t] and", size=12, color=BLUE, anchor="end")
    d.text(x(T) - 2, 168, "values[t] come", size=12, color=BLUE, anchor="end")
    d.text(x(T) - 2, 183, "from output t - 1", size=12, color=BLUE, anchor="end")
    label(226, "logprobs", "old_, ref_ and new")
    row(208, logprobs[0], "{:.1f}".format)
    label(264, "values", "and newvalues")
    row(246, values[0], "{:.1f}".format)

    # --- Rewards.
    label(302, "rewards", "without the KL")
    row(284, rewards[0], lambda number: f"{number:.1f}" if number else "0")
    first, last = sampled[1], sampled[3]
    for t in first, last:
        d.arrow((center(t), 346), (center(t), 312), color=RED)
    d.text(center(first), 361, "the reward of turn 1", size=12, anchor="middle", color=RED)
    d.text(center(last), 361, "the reward of turn 2,", size=12, anchor="middle", color=RED)
    d.text(center(last), 377, "plus the reward model's score", size=12, anchor="middle", color=RED)
    d.text(center(last), 393, "for the whole episode", size=12, anchor="middle", color=RED)

    # --- Returns and advantages.
    label(432, "returns")
    row(414, returns[0], "{:.1f}".format)
    label(470, "advantages", "not yet whitened")
    row(452, advantages[0], "{:.1f}".format)
    for a, b in zip(sampled[:0:-1], sampled[-2::-1]):
        d.arrow((center(a) - 4, 482), (center(a) - 4, 498), (center(b) + 4, 498), (center(b) + 4, 482), color=BLUE)
    order = "GAE goes from the last sampled token to the first, and skips the message"
    d.text(x(T) - 2, 516, order, size=12, anchor="end", color=BLUE)
    shape = "All tensors have the shape [N, T]. T is the length of the longest sample."
    d.text(16, 541, f"{shape} Gamma and both lambdas are 1 here.", size=12, color=NOTE)
    return d.svg()


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, draw in DRAWINGS.items():
        (FOLDER / f"{name}.svg").write_text(draw())


DRAWINGS = {"iteration": iteration, "sample": sample}

if __name__ == "__main__":
    main()
