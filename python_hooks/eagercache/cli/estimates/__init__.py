"""What `eagercache estimate` records in a program, and what it makes of it."""
