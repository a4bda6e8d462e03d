"""Which calls and data a kernel is tried on."""
