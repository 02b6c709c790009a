"""A proof as a picture: what was asked on top, what it rests on at the bottom."""

from __future__ import annotations

from PIL import Image, ImageDraw, ImageFont

from hamlet.proofs.trace import Proof

SIZE, SMALL = 18, 13  # pixels of the two fonts
PAD, GAP, DROP = 10, 24, 64  # inside a box, between boxes, between levels
PAPER, INK, GREY = (255, 255, 255), (25, 30, 40), (110, 115, 125)
FACT, DERIVED = (222, 242, 222), (222, 232, 248)


def draw_proof(proof: Proof) -> Image.Image:
    """An RGB image: green boxes are facts, blue ones follow by the rule named in them."""
    font, small = ImageFont.load_default(SIZE), ImageFont.load_default(SMALL)

    def texts(node: Proof) -> tuple[str, str]:
        return str(node.atom), node.rule or "fact"

    def box(node: Proof) -> float:
        atom, why = texts(node)
        return max(font.getlength(atom), small.getlength(why)) + 2 * PAD

    def width(node: Proof) -> float:
        below = sum(width(c) for c in node.children) + GAP * max(len(node.children) - 1, 0)
        return max(box(node), below)

    def levels(node: Proof) -> int:
        return 1 + max((levels(c) for c in node.children), default=0)

    height = SIZE + SMALL + 2 * PAD + 8
    image = Image.new(
        "RGB",
        (int(width(proof)) + 2 * GAP, levels(proof) * (height + DROP) - DROP + 2 * GAP),
        PAPER,
    )
    pen = ImageDraw.Draw(image)

    def draw(node: Proof, left: float, top: float) -> float:
        """Draw a node and what is below it; returns the middle of its box."""
        middle = left + width(node) / 2
        below = sum(width(c) for c in node.children) + GAP * max(len(node.children) - 1, 0)
        at = middle - below / 2
        for child in node.children:
            end = draw(child, at, top + height + DROP)
            pen.line((middle, top + height, end, top + height + DROP), GREY, 2)
            at += width(child) + GAP
        half = box(node) / 2
        corners = (middle - half, top, middle + half, top + height)
        pen.rounded_rectangle(corners, 8, DERIVED if node.rule else FACT, GREY, 2)
        atom, why = texts(node)
        pen.text((middle, top + PAD), atom, INK, font, anchor="ma")
        pen.text((middle, top + PAD + SIZE + 8), why, GREY, small, anchor="ma")
        return middle

    draw(proof, GAP, GAP)
    return image
