"""What `eagercache run --report` shows, as tables, a page and a picture."""
