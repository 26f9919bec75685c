"""Draws the sample media that ship with the package: two pictures and a short animated GIF.

`python tools/make_samples.py` writes them into epdlab/samples. Everything is drawn by code, so it is ours to ship.
"""

from __future__ import annotations

import argparse
import colorsys
import math
from pathlib import Path

from PIL import Image, ImageDraw

Colour = tuple[int, int, int]
VIDEO_FRAMES = 8


def hue(turn: float, light: float = 0.55, saturation: float = 0.75) -> Colour:
    """An RGB colour; `turn` walks once around the colour wheel from 0 to 1."""
    red, green, blue = colorsys.hls_to_rgb(turn % 1.0, light, saturation)
    return round(red * 255), round(green * 255), round(blue * 255)


def harbour() -> Image.Image:
    """448 x 336: a sunset, its reflection, three boats. 768 patches, 192 tokens."""
    picture = Image.new("RGB", (448, 336))
    draw = ImageDraw.Draw(picture)
    for y in range(0, 200, 8):
        draw.rectangle((0, y, 448, y + 8), fill=hue(0.72 + 0.36 * y / 200, 0.35 + 0.3 * y / 200))
    draw.ellipse((176, 120, 272, 216), fill=hue(0.14, 0.62, 0.95))
    for y in range(200, 336, 8):
        draw.rectangle((0, y, 448, y + 8), fill=hue(0.58 + 0.06 * (y - 200) / 136, 0.45 - 0.2 * (y - 200) / 136))
        glint = 40 - (y - 200) // 5
        draw.rectangle((224 - glint, y + 2, 224 + glint, y + 5), fill=hue(0.11, 0.6, 0.9))
    for x, y, turn in ((60, 232, 0.0), (300, 248, 0.33), (180, 284, 0.85)):
        draw.polygon([(x, y), (x + 84, y), (x + 68, y + 22), (x + 14, y + 22)], fill=hue(turn, 0.4))
        draw.polygon([(x + 40, y - 6), (x + 40, y - 66), (x + 78, y - 6)], fill=hue(turn + 0.1, 0.8))
        draw.polygon([(x + 36, y - 6), (x + 36, y - 54), (x + 10, y - 6)], fill=hue(turn + 0.1, 0.9))
    return picture


def tiles() -> Image.Image:
    """336 x 280: a mosaic of 28-pixel tiles, one per token. 480 patches, 120 tokens."""
    picture = Image.new("RGB", (336, 280), "white")
    draw = ImageDraw.Draw(picture)
    for row in range(10):
        for column in range(12):
            x, y, turn = column * 28, row * 28, (row * 5 + column * 7) % 24 / 24
            draw.rectangle((x + 1, y + 1, x + 26, y + 26), fill=hue(turn))
            inset = 4 + (row + 2 * column) % 8
            draw.ellipse((x + inset, y + inset, x + 27 - inset, y + 27 - inset), fill=hue(turn + 0.5, 0.75))
    return picture


def ball(step: int) -> Image.Image:
    """224 x 168: one frame of a ball that crosses the picture and bounces once."""
    frame = Image.new("RGB", (224, 168), hue(0.58, 0.85))
    draw = ImageDraw.Draw(frame)
    draw.rectangle((0, 140, 224, 168), fill=hue(0.33, 0.4))
    time = step / (VIDEO_FRAMES - 1)
    x, y = 24 + 176 * time, 118 - 84 * abs(math.cos(math.pi * time))
    draw.ellipse((x - 20, y - 20, x + 20, y + 20), fill=hue(0.0))
    draw.pieslice((x - 20, y - 20, x + 20, y + 20), 360 * time, 360 * time + 120, fill=hue(0.15))
    return frame


def write(folder: Path) -> list[Path]:
    """Write harbour.png, tiles.png and ball.gif (8 frames, 125 ms each) into `folder`; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / name for name in ("harbour.png", "tiles.png", "ball.gif")]
    harbour().save(paths[0], optimize=True)
    tiles().save(paths[1], optimize=True)
    first, *rest = (ball(step) for step in range(VIDEO_FRAMES))
    first.save(paths[2], save_all=True, append_images=rest, duration=125, loop=0)
    return paths


def main() -> None:
    """Write the samples and say what was written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "epdlab" / "samples")
    for path in write(parser.parse_args().out):
        print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
