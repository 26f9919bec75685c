"""Run the notebooks and store what they show: `python tools/run_notebooks.py [NOTEBOOK ...]`, all of them by default.

Stored outputs are what nbval compares later, so nothing of this machine or this minute goes into them: no widget ids,
no timing metadata, no interpreter version. A cell that prints to stderr stops the run: a reader would see it too.
"""

from __future__ import annotations

import base64
import io
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
CELL_TIMEOUT_S = 300
PICTURE_COLOURS = 256
WIDGET = "application/vnd.jupyter.widget-view+json"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def main(arguments: list[str]) -> int:
    """Run the notebooks named, or all; the number of those that failed."""
    paths = [Path(name) for name in arguments] or sorted((ROOT / "notebooks").rglob("*.ipynb"))
    return sum(not run(path) for path in paths if ".ipynb_checkpoints" not in path.parts)


def run(path: Path) -> bool:
    """Run one notebook and store it; whether it ran without an error."""
    print(f"{path}: running", flush=True)
    book = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(book, timeout=CELL_TIMEOUT_S, coalesce_streams=True, resources=where)
    try:
        client.execute()
        tidy(book)
    except Exception as error:
        print(f"{path}: {error}", file=sys.stderr)
        return False
    nbformat.write(book, path)
    return True


def tidy(book: Any) -> None:
    """Leave only what is the same on every run.

    Raises:
        RuntimeError: a cell printed to stderr.
    """
    book.metadata = nbformat.from_dict(METADATA)
    for number, cell in enumerate(book.cells):
        cell.id = f"cell-{number:02}"
        cell.metadata = nbformat.from_dict({key: cell.metadata[key] for key in ("tags",) if cell.metadata.get(key)})
        for output in cell.get("outputs", []):
            if output.get("name") == "stderr":
                raise RuntimeError(f"cell {number} prints to stderr: {output.text.strip()[:300]}")
            _tidy_data(output.get("data", {}))


def _tidy_data(data: dict[str, Any]) -> None:
    data.pop(WIDGET, None)
    if "image/png" in data:
        data["image/png"] = smaller(data["image/png"])


def smaller(png: str) -> str:
    """A picture (base64) in its commonest colours, as a drawing has few; unchanged if that does not make it smaller."""
    raw, small = base64.b64decode(png), io.BytesIO()
    picture = Image.open(io.BytesIO(raw)).convert("RGB")
    counted: list[Any] = picture.getcolors(picture.width * picture.height) or []
    palette = Image.new("P", (1, 1))
    palette.putpalette([part for _, colour in sorted(counted, reverse=True)[:PICTURE_COLOURS] for part in colour])
    picture.quantize(palette=palette, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
    return base64.b64encode(small.getvalue()).decode() if small.tell() < len(raw) else png


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
