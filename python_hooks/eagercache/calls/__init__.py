"""Calls of operators as data: descriptions, equality of answers, traces."""
