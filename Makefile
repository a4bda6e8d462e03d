# Every target sets up what it needs first; when that is there, it costs a fraction of a second.
# TORCH picks the torch version: make test TORCH=2.15.0

TORCH ?= 2.11.0
export TORCH

.DEFAULT_GOAL := help
.PHONY: help setup build demo test fuzz conformance models matrix docs bench check soak clean

help:
	@echo 'make demo    a real model on CPU: native, then with compiled kernels, then from the warm cache'
	@echo 'make test    set up, build, and run all C++ and Python tests'
	@echo 'make build   set up and build (build/dev-$(TORCH))'
	@echo "make fuzz    random operator programs against native; FUZZ_ARGS='--calls 1000000 --keys 1000'"
	@echo "             changes of what whole modules read: FUZZ_ARGS=--modules"
	@echo "make models  real models against native; MODELS_ARGS='--kind modules --only resnet'"
	@echo "make conformance  PyTorch's operator database through kernels, against native (CONFORMANCE_ARGS=--help)"
	@echo "make matrix  every supported torch against all that is done with it; MATRIX_ARGS='--torch 2.13.0 --only import'"
	@echo 'make docs    build the documentation (build/docs/html)'
	@echo 'make bench   build and run the benchmarks'
	@echo 'make check   formatting, linters and type checks'
	@echo 'make soak    the long torture of the store, then the tests again and again (SOAK_SECONDS, default 1800)'
	@echo 'make clean   remove what was built; .venv stays'
	@echo
	@echo 'TORCH=2.11.0 (default), 2.12.1, 2.13.0, 2.14.1 or 2.15.0 selects the torch version.'

setup:
	@scripts/setup

build: setup
	@scripts/build

demo: build
	@scripts/demo $(DEMO_ARGS)

test: build
	@scripts/test

fuzz: build
	@scripts/fuzz_programs $(FUZZ_ARGS)

models: build
	@scripts/models $(MODELS_ARGS)

conformance: build
	@scripts/conformance $(CONFORMANCE_ARGS)

# It sets up and builds for each torch itself; the default one's environment runs it.
matrix: setup
	@scripts/matrix $(MATRIX_ARGS)

docs: build
	@scripts/docs

bench: build
	@scripts/bench $(BENCH_ARGS)

check: setup
	@scripts/check

soak: build
	@scripts/soak

clean:
	rm -rf build dist demo_output
