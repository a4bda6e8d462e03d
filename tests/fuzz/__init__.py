"""Random operator programs, each run with and without kernels and compared after every call.

`templates` knows calls, `pool` picks the keys that programs are drawn from and has their kernels
compiled, `programs` draws programs, `both_ways` runs one, `judge` decides whether two answers are
equal by the numerics class, `shrink` makes a failing program small, and `__main__` is `make fuzz`.
`modules` changes what whole modules read (`make fuzz FUZZ_ARGS=--modules`).
"""
