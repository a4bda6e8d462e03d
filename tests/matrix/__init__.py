"""Every torch of the table against everything that eagercache does with it: `make matrix`."""
