"""Connections to serving engines. Importing this package loads neither torch nor an engine."""

from __future__ import annotations
