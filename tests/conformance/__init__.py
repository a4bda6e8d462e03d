"""Every eligible operator through eagercache against native, by PyTorch's own operator database.

`python -m conformance` (scripts/conformance, make conformance) runs it; tests/python/
test_conformance.py runs a small fixed part, and plants faults that the judge must find.

    units.py     what there is to run, in which order
    runner.py    child processes, the state that a later run goes on from, progress
    child.py     one process: units, in groups whose kernels are compiled together
    database.py  samples of the operator database, and the calls of backend operators that they make
    forms.py     other layouts, values and writing forms of a call
    judge.py     what a call did, compared with what native's did
    reference.py values: bit for bit, or by their error against a wider computation
    ours.py      eagercache in this process: asking, recording, compiling in bulk
    summary.py   totals, and docs/reference/conformance.md
"""
