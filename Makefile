# Checkmate. `make demo` and `make test` do all of their own set-up.
.DEFAULT_GOAL := help
.PHONY: help setup demo demo-switch test test-all coverage sanitize lint ptf p4 nccl proto bench comparators evaluation docs clean
RUN := .venv/bin/python
TARGET ?= softswitch
P4_TARGET ?= bmv2

help: ## This list
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/\1\t\2/p' Makefile | expand -t 14

setup: ## Virtual environment, of PYTHON=python3.12 for example; Debian packages when root
	@tools/setup.sh

demo: setup ## Training loses two ranks to kill -9, and ends as if nothing had happened; 3 minutes
	@$(RUN) -m topologies.training.demo --target $(TARGET)

demo-switch: setup ## The switch alone: a lab, a job, verified shadow streams
	@$(RUN) -m checkmate.cli.entry lab down demo --if-up > /dev/null # left by a demo that was killed
	@$(RUN) -m checkmate.cli.entry lab run single_tor --name demo --target $(TARGET)

test: setup ## Lint and quick tests, under 10 minutes
	@$(RUN) -m pytest -m "not slow" -n 3 --dist loadgroup

test-all: comparators ## Everything: each lab on each target
	@$(RUN) -m pytest

coverage: setup ## Quick tests, and the lines that they leave out, in build/coverage
	@$(RUN) -m pytest -m "not slow" -n 3 --dist loadgroup --cov --cov-report=html:build/coverage --cov-report=term:skip-covered

# The interpreter is not instrumented: the library comes first, and Python's own allocator would hide ours from it.
SANITIZED = SANITIZE=$1 LD_PRELOAD=$$(cc -print-file-name=$2.so) PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0 \
	$(RUN) -m pytest tests/nccl -m "not slow" --timeout=300 -p no:cacheprovider
sanitize: setup ## The NCCL plugin under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer; 3 minutes
	@$(call SANITIZED,address,libasan)
	@$(call SANITIZED,undefined,libubsan)
	@$(call SANITIZED,thread,libtsan)

lint: setup ## ruff, mypy --strict, import-linter, and the mechanical rules of English
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy
	@.venv/bin/lint-imports
	@$(RUN) -m tools.prose

ptf: setup ## Packet tests; TARGET=softswitch (default), bmv2 or tna; tofino with PTF_CONFIG=FILE
	@$(RUN) -m ptf_tests --target $(TARGET) $(if $(PTF_CONFIG),--config $(PTF_CONFIG))

p4: setup ## Compile the data plane with p4c; P4_TARGET=bmv2 (default), tofino or tofino2
	@$(RUN) -m p4src.compile $(P4_TARGET)

nccl: setup ## Compile the plugin for stock NCCL, and print the variables that name it to NCCL
	@$(RUN) -m checkmate.cli.entry nccl build

proto: setup ## Generate checkmate/rpc's Python from its .proto
	@$(RUN) -m tools.proto

bench: setup ## Measure the figures of docs/figures.md
	@$(RUN) -m benchmarks

comparators: setup ## The packages of others with which the evaluation compares, in build/comparators
	@$(RUN) -m pip install --quiet --upgrade --no-deps --require-hashes --target build/comparators -r benchmarks/comparators/packages.txt

EVALUATION = --raw out/$1.jsonl --page $2/$1.md
evaluation: comparators ## Compare with other systems, in docs/evaluation.md: hours; QUICK=1: 30 minutes, in out/; RECOVERY=1: 30 minutes
	@$(RUN) -m benchmarks.evaluation $(if $(RECOVERY),--recovery --raw out/recovery.jsonl --page docs/evaluation.md,$(if $(QUICK),--quick $(call EVALUATION,quick,out),$(call EVALUATION,evaluation,docs)))

docs: setup ## The documentation as a site, in build/site; needs no network once set up
	@$(RUN) -m tools.site build/site

clean: ## Remove what set-up and runs made here
	rm -rf .venv build out *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
