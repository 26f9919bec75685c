"""The lab: processes up and down, steps held and let go, what notebooks call."""

from .lab import Lab

__all__ = ["Lab"]
