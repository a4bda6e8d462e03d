"""`make fuzz FUZZ_ARGS=--modules`: changes of what whole modules read, against eager.

`worlds.py` writes small programs, each a module that reads values of the world around it: the
product of places that values come from (worlds/*.txt, `crossed.py`) and of what a forward does with
one. `changes.py` makes one change after the other and compares the next calls with the forward's.
"""
