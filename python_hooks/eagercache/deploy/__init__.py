"""Modules with their weights as one signed file. Nothing else imports this package."""
