"""epdlab: a bench for SGLang's EPD embedding hand-off over the Mooncake Transfer Engine.

Read the hand-off top to bottom: `receiver`, `encode_server`, `landing`, `regions`, `engine`; its words are in `rules`,
`steps` and `messages`. Nothing here imports torch or Mooncake until it is used.
"""

from __future__ import annotations

__version__ = "0.1.0"


def best_device() -> str:
    """`cuda` if torch sees a GPU, else `cpu`."""
    from .vlm import best_device as best

    return best()


__all__ = ["__version__", "best_device"]
