"""The package's version, known without the extension module."""

from __future__ import annotations

__version__ = "0.1.0"
