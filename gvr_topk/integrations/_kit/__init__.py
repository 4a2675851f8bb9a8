"""What the integrations of all engines share. These modules know no engine."""

from __future__ import annotations
