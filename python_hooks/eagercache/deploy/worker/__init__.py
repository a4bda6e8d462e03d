"""The worker's half of deployment."""
