"""What `eagercache doctor` looks at."""
