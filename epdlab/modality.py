"""The kinds of item a request carries, by upstream's names."""

from __future__ import annotations

from enum import Enum


class Modality(Enum):
    """One modality of a request; the value is the word on the wire (SGLang 0.5.17, `Modality.name`)."""

    IMAGE = "IMAGE"
    VIDEO = "VIDEO"
