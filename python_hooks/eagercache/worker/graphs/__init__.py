"""Traced graphs: what their nodes do, and how they are rewritten before they are compiled."""
