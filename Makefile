# All targets use .venv. The first target that needs it creates it. `make help` lists the targets.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable  # modules are compiled when imported
export PATH := $(PATH):$(CURDIR)/$(BIN)
export PYTHONDONTWRITEBYTECODE :=  # pytest would rewrite all tests in each of its processes
JOBS := $(shell nproc)
IN_PARALLEL := --numprocesses $(shell expr 2 \* $(JOBS)) --dist worksteal  # many tests wait for processes that they start
CXX_FILES := $(wildcard csrc/src/*.?pp csrc/include/*.h csrc/tests/*.?pp)

.PHONY: help demo install browser native native-test test test-slow check lint docs reference asan tsan bench bench-peer \
	picture wheel clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' Makefile

demo: install native ## train a DLRM on synthetic clicks with two ranks; takes minutes from a fresh clone
	$(BIN)/nestpipe train --ranks 2

install: .venv/installed ## create .venv with the package, its dependencies and the development tools

.venv/installed: pyproject.toml constraints.txt hatch_build.py
	$(PYTHON) -m venv .venv
	$(PIP) '.[dev]'
	@command -v cmake >/dev/null || $(BIN)/pip install --quiet cmake
	@touch $@

.venv/installed-slow: .venv/installed
	$(PIP) '.[dev,slow]'
	@touch $@

browser: ## install Debian's Chromium, in which `make test-slow` opens the report page; needs root
	apt-get install --yes --no-install-recommends chromium chromium-driver

native: ## build the native library into the source tree; needs cmake and a C++17 compiler, not pip
	@cmake -S . -B build/native -DNESTPIPE_TESTS=ON >/dev/null
	@cmake --build build/native --parallel $(JOBS) --target nestpipe

native-test: native ## run the native tests without sanitizers
	@cmake --build build/native --parallel $(JOBS)
	ctest --test-dir build/native --parallel $(JOBS) --output-on-failure

# Threads of torch would spin on cores that other tests need.
test test-slow: export OMP_WAIT_POLICY := passive

test: install native-test ## run all tests except those marked slow
	$(BIN)/python -m pytest -m 'not slow and alone'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not slow and not alone' --durations 20 $(IN_PARALLEL)

test-slow: .venv/installed-slow native-test ## run all tests, the slow ones included
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not slow and not alone' $(IN_PARALLEL)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'slow and not alone' --numprocesses $(JOBS) --dist worksteal --timeout 180
	$(BIN)/python -m pytest -m alone

check: install lint docs asan tsan ## check formatting, types and documents; run the native tests under the sanitizers

lint: install ## check formatting and types only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)

docs: .venv/installed-slow ## build the documentation site into build/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

reference: install native ## write the reference of keys and commands into docs/reference
	$(BIN)/python -m nestpipe.cli.reference docs/reference

asan: ## run the native tests under AddressSanitizer and UndefinedBehaviorSanitizer
	@cmake -S . -B build/asan -DNESTPIPE_TESTS=ON -DNESTPIPE_SANITIZE=address,undefined >/dev/null
	@cmake --build build/asan --parallel $(JOBS)
	ctest --test-dir build/asan --parallel $(JOBS) --output-on-failure

tsan: ## run the native tests under ThreadSanitizer
	@cmake -S . -B build/tsan -DNESTPIPE_TESTS=ON -DNESTPIPE_SANITIZE=thread >/dev/null
	@cmake --build build/tsan --parallel $(JOBS)
	ctest --test-dir build/tsan --parallel $(JOBS) --output-on-failure

bench: install native ## run every benchmark and check its targets; needs an idle machine
	$(BIN)/nestpipe bench store --json benchmarks/results/store.json --check
	$(BIN)/nestpipe bench plain --json benchmarks/results/plain.json --check
	$(BIN)/nestpipe bench scale --json benchmarks/results/scale.json --check
	$(BIN)/nestpipe bench attention --json benchmarks/results/attention.json --check
	$(BIN)/nestpipe bench cluster --json benchmarks/results/cluster.json --check
	$(BIN)/nestpipe bench overlap --json benchmarks/results/overlap.json --check
	$(BIN)/nestpipe bench reader --json benchmarks/results/reader.json --check
	$(BIN)/nestpipe bench learning --json benchmarks/results/learning.json --check
	$(BIN)/nestpipe bench consistency --json benchmarks/results/consistency.json --plot docs/consistency.svg --check
	$(BIN)/nestpipe bench schedules --json benchmarks/results/schedules.json --check
	$(BIN)/nestpipe bench prepare --rows 20000000 --json benchmarks/results/prepare.json --check
	$(BIN)/nestpipe bench checkpoint --json benchmarks/results/checkpoint.json --check
	$(BIN)/nestpipe bench faults --count 200 --json benchmarks/results/faults.json --check
	$(MAKE) picture
	$(BIN)/nestpipe bench simulate --json benchmarks/results/simulate.json --check
	$(BIN)/nestpipe bench planner --json benchmarks/results/planner.json --check
	$(BIN)/nestpipe bench monitor --json benchmarks/results/monitor.json --check
	$(BIN)/nestpipe bench exchange --json benchmarks/results/exchange-link.json --check
	$(BIN)/nestpipe bench exchange --part quality --json benchmarks/results/exchange-quality.json --check
	$(BIN)/nestpipe bench paper --json benchmarks/results/paper.json --report docs --check

picture: install native ## run `bench network`, and draw the README's picture of its traces; needs root, an idle machine
	@mkdir -p build/traces
	$(BIN)/nestpipe bench network --traces build/traces --json benchmarks/results/network.json --check
	$(BIN)/nestpipe report build/traces/serial.json build/traces/nested.json --out docs/timeline.svg

bench-peer: install native ## compare with TorchRec; makes an environment for it on first use; needs root, an idle machine
	$(BIN)/nestpipe bench peer --json benchmarks/results/peer.json --check

wheel: install ## build the wheel and the source distribution into dist/
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m build --outdir dist .

clean: ## remove everything that was built, and .venv
	rm -rf .venv build dist nestpipe/store/native/*.so
