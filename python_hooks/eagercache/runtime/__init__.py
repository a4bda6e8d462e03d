"""What this process has switched on: choices, its store, the way of a miss to the service."""
