"""Requests on their way through the worker, one kind a file."""
