"""Manifests with edited values and a right digest, whose entries are then used."""
