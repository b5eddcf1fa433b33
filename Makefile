# Everything happens in .venv; the first target that needs it makes it. `make help` lists the targets.
PYTHON ?= python3
# With TORCH, a target runs on that version of torch instead of .venv's; `make test-newest` has a default.
TORCH ?=
ON_TORCH = $(PYTHON) tools/on_torch.py --python $(PYTHON) $(if $(TORCH),--torch $(TORCH)) $(ON_TORCH_OPTIONS) --
RUN = $(if $(TORCH),$(ON_TORCH),$(BIN)/python)
BUILT = $(if $(TORCH),,build)
VENV := .venv
BIN := $(VENV)/bin
CXX_SOURCES := $(wildcard src/phalanx/_core/*.?pp tests/native/*.?pp)
export OMP_NUM_THREADS ?= 1
# Tests start thousands of processes: without compiled files each would compile what it imports.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help build demo check test test-newest conformance soak lint stubs format bench sanitize changelog clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# torch first and pinned, so that every later step finds it in place.
$(VENV)/.tools: requirements-dev.txt constraints.txt
	@echo "Making $(VENV) (torch and the tools; a few minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --requirement requirements-dev.txt
	@touch $@

# src/phalanx/__init__.py has the version, which the metadata repeats.
$(VENV)/.built: $(VENV)/.tools CMakeLists.txt pyproject.toml src/phalanx/__init__.py $(CXX_SOURCES)
	@echo "Building the native core"
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	@touch $@

build: $(VENV)/.built ## make .venv and build the native core

demo: $(BUILT) ## train a small model with DDP on 4 ranks, then compare collective times with Gloo's
	@$(RUN) examples/train_ddp.py --ranks 4

# tests/spreading.py says which worker runs what. More workers than cores: a third of the time tests only wait.
test: build ## run the test suite (6 minutes on 2 cores)
	@$(BIN)/python -m pytest -n 4 $(PYTEST)

check: lint ## for the inner loop: the linters, the unit tests, a slice of the contract suite
	@PHALANX_CONTRACT=slice $(BIN)/python -m pytest -n 2 -q -m "not slow" tests/unit tests/contract

test-newest: ## run the test suite on torch 2.15.0 (TORCH=2.14.1 PYTHON=python3.13 to choose; TESTS=... for a part)
	@$(ON_TORCH) -m pytest -n 2 $(TESTS)

conformance: $(BUILT) ## all of torch's own distributed suite, on Phalanx and guarded Gloo; writes docs/conformance.md (6 minutes; TORCH=2.15.0)
	@$(RUN) tests/conformance/conform.py $(CONFORMANCE)

soak: build ## 500 random deaths, a million mixed calls, 1000 programs of shared memory, 2000 random programs, 3000 programs that wait, 5000 damaged boxes (40 minutes; SOAK="--kills 50" for fewer)
	@$(BIN)/python tests/soak/run.py $(SOAK)

# What nanobind tells of the native module, in the project's format.
STUB := src/phalanx/_core_ext.pyi
write_stub = $(BIN)/python -m nanobind.stubgen -q --exclude-values -m phalanx._core_ext -p src/phalanx/_core/stubs.txt -o $(1) \
	&& $(BIN)/ruff check -q --select I --fix $(1) && $(BIN)/ruff format -q $(1)

stubs: build ## write the types of the native module to src/phalanx/_core_ext.pyi
	@$(call write_stub,$(STUB))

lint: build ## ruff, mypy --strict, clang-format, the stub
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@for file in tests/*/conftest.py tests/soak/run.py; do $(BIN)/mypy --no-error-summary $$file || exit 1; done
	@$(BIN)/clang-format --dry-run --Werror $(CXX_SOURCES)
	@$(call write_stub,build/_core_ext.pyi)
	@cmp -s build/_core_ext.pyi $(STUB) || { diff -u $(STUB) build/_core_ext.pyi | head -40; echo "$(STUB) is out of date: make stubs"; exit 1; }

format: build ## rewrite the sources in the project's format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(CXX_SOURCES)

bench: build ## measure every figure that the docs give; fails where a target is missed
	@$(BIN)/python benchmarks/run.py --check

sanitize: build ## the native stress test under thread and address sanitizers
	@$(BIN)/python tests/native/sanitize.py

# The version stands in src/phalanx/__init__.py only. In a git repository towncrier stages what it writes and removes.
changelog: build ## for a release: set the version, move the fragments in news/ to CHANGELOG.md (VERSION=0.2.0)
	@echo "$(VERSION)" | grep -Eqx '[0-9]+\.[0-9]+\.[0-9]+' || { echo "give the version: make changelog VERSION=0.2.0"; exit 2; }
	@! grep -q '^## $(VERSION) ' CHANGELOG.md || { echo "CHANGELOG.md has version $(VERSION) already"; exit 2; }
	@$(BIN)/towncrier build --yes --version $(VERSION)
	@sed -i 's/^__version__ = .*/__version__ = "$(VERSION)"/' src/phalanx/__init__.py
	@$(MAKE) --no-print-directory build

clean: ## remove .venv and everything that was built
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache
