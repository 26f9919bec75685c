"""Whose request the running code serves, for the trace.

Layers that know no request, such as the embedding cache, label their steps with this. Whoever calls them for a request
sets it; tasks and threads started from there inherit it. Nothing is decided by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

REQUEST_LABELS: ContextVar[Mapping[str, Any]] = ContextVar("REQUEST_LABELS", default=MappingProxyType({}))
"""Labels of the request being served: `req`, and `part` where there is one."""
