"""The compile service of the user's process: a queue, and the workers that answer it."""
