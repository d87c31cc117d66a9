# make demo and make test need nothing but Python 3.11 (or later) and make: they set up .venv themselves.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Code is compiled once, not by every process that a test starts.
unexport PYTHONDONTWRITEBYTECODE
DEMO_METHODS := rolora,ffa_lora,fedlora,flexlora

.PHONY: demo report test test-more test-slow test-lowest test-quant flower flower-all flower-slow walks torture soak check lint types docs format clean help
help:
	@echo "make demo   fetch a small model and data, compare four methods on them (a few minutes)"
	@echo "make report  write the report of the committed results: results/report.html, report.md, results.csv"
	@echo "make test   run the tests that convince, about three minutes on two cores: every method and command from start to"
	@echo "            end, the identities, what clients may not send, and a run that is killed and resumed"
	@echo "make test-more   run the other tests, about ten minutes; make test-slow has those that take minutes each"
	@echo "make test-lowest   part of the suite with the lowest versions that setup.py allows, in an environment of its own"
	@echo "make flower   the tests of the engine on Flower, in an environment of its own; make flower-all compares every method"
	@echo "            with the embedded engine (results/flower.md), make flower-slow has the federation of docs/guides/flower.md"
	@echo "make test-quant   the tests of quantised bases, with bitsandbytes in an environment of its own"
	@echo "make walks  a first hour as a notebook, work that is killed and goes on, and the tutorials, from an installed wheel"
	@echo "make torture NUMBER=100 SEED=0   kill and damage runs, at most ten minutes at a time; KINDS=kills,damage"
	@echo "make soak   distributed runs with something wrong, and the longest waits in them (below ten minutes); ONLY=drops"
	@echo "make check  look at the code without running it: style, format, types, and the documentation, built into site/"
	@echo "make lint, make types, make docs   one of these alone; make format writes the format"
	@echo "make clean  remove the environment and the demo's results"

# torch goes first and pinned, so that nothing else can pull another build of it. uv knows where PyTorch keeps its builds
# and takes the one for this machine: without a GPU the CPU's, not gigabytes of CUDA. It needs half of pip's time; where it
# does not reach the packages that pip is configured for, pip installs them. Both compile
# the modules, which the first test would do otherwise.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
UV := UV_HTTP_RETRIES=1 $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python -c constraints.txt
$(VENV)/.installed: setup.py constraints.txt
	@echo "== setting up $(VENV): about a minute and 2 GB, once"
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(PIP) setuptools wheel uv
	@echo "== installing torch: PyTorch's build for this machine"
	$(UV) --torch-backend auto torch || \
	{ echo "== PyTorch's builds cannot be reached; taking the torch that pip finds"; $(PIP) torch; }
	@echo "== installing fs-lowrank and its libraries"
	$(UV) --no-build-isolation -e '.[dev,docs]' || $(PIP) --no-build-isolation -e '.[dev,docs]'
	@echo "== installing curvlinops, alone: what it asks for would bring another torch"
	$(UV) --no-deps curvlinops-for-pytorch backpack-for-pytorch || $(PIP) --no-deps curvlinops-for-pytorch backpack-for-pytorch
	@touch $@

report: $(VENV)/.installed
	@echo "== writing results/report.md and report.html, their figures, results.csv and claims.csv"
	$(BIN)/fs-lowrank benchmark report

demo: $(VENV)/.installed
	@echo "== fetching MiniLM and the four-domain sentiment data (87 MB, once)"
	$(BIN)/fs-lowrank fetch minilm sentiment
	@echo "== comparing $(DEMO_METHODS) over 24 clients; results go to runs/demo"
	$(BIN)/fs-lowrank compare --cfg examples/demo.yaml --methods $(DEMO_METHODS) --resume

test: $(VENV)/.installed
	@echo "== running the main tests"
	$(BIN)/python -m pytest -q -n 2 --dist load

test-more: $(VENV)/.installed
	@echo "== running the tests that make test leaves out"
	$(BIN)/python -m pytest -q -n 2 --dist load -m "more and not slow"

test-slow: $(VENV)/.installed
	@echo "== running the tests that take long"
	$(BIN)/python -m pytest -q -n 2 --dist load -m slow

# The lowest versions of what setup.py names, and of what these ask for the newest that fits. The part of the suite that
# meets each library; it takes some gigabytes where PyTorch's own builds cannot be reached.
LOWEST ?= .venv-lowest
LOWEST_TESTS ?= tests/algebra tests/data tests/models/test_adapters.py tests/models/test_build.py tests/models/test_vision.py \
	tests/training tests/settings tests/runs tests/test_config.py tests/test_generic.py tests/after tests/hpo/test_space.py tests/test_start.py
LOWEST_INSTALL = $(BIN)/uv pip install --quiet --python $(LOWEST)/bin/python
test-lowest: $(VENV)/.installed
	@echo "== setting up $(LOWEST) with the lowest versions"
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(LOWEST)
	UV_HTTP_RETRIES=1 $(LOWEST_INSTALL) --resolution lowest-direct --torch-backend auto -e '.[hpo,oneshot]' || \
	$(LOWEST_INSTALL) --resolution lowest-direct -e '.[hpo,oneshot]'
	$(LOWEST_INSTALL) pytest pytest-timeout hypothesis scikit-learn
	$(LOWEST_INSTALL) -c constraints.txt --no-deps curvlinops-for-pytorch backpack-for-pytorch
	$(LOWEST)/bin/python -m pytest -q -m "not slow" $(LOWEST_TESTS)

# Flower's own pins hold back other packages, so its environment is apart, at the versions of constraints-flower.txt; torch,
# which has gigabytes, is that of $(VENV), of the same version.
FLOWER ?= .venv-flower
$(FLOWER)/.installed: $(VENV)/.installed constraints-flower.txt
	@echo "== setting up $(FLOWER) with Flower"
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(FLOWER)
	echo torch > $(FLOWER)/excludes.txt
	$(BIN)/uv pip install --quiet --python $(FLOWER)/bin/python -c constraints-flower.txt --excludes $(FLOWER)/excludes.txt \
	-e '.[flower]' pytest pytest-timeout hypothesis
	echo "$(CURDIR)/$$(ls -d $(VENV)/lib/python*/site-packages)" > $$(ls -d $(FLOWER)/lib/python*/site-packages)/base.pth
	@touch $@

flower: $(FLOWER)/.installed
	@echo "== running the tests of the engine on Flower"
	$(FLOWER)/bin/python -m pytest -q -n 2 --dist load tests/engines/flower

flower-all: $(FLOWER)/.installed
	@echo "== comparing every method on Flower with the embedded engine; the table goes to results/flower.md"
	FLOWER_TABLE=results/flower $(FLOWER)/bin/python -m pytest -q -m slow tests/engines/flower/test_every_method.py

flower-slow: $(FLOWER)/.installed
	@echo "== further keys, and killing the simulation, and a federation with TLS part by part"
	$(FLOWER)/bin/python -m pytest -q -m slow tests/engines/flower --ignore tests/engines/flower/test_every_method.py

# Given again, it goes on where it was. Exit code 1 where something has failed; the table is in results/torture.
NUMBER ?= 100
SEED ?= 0
torture: $(VENV)/.installed
	$(BIN)/python -m tests.torture --number $(NUMBER) --seed $(SEED) $(if $(KINDS),--kinds $(KINDS))

# The tests named by ONLY replace their rows of the table; ONLY="client_killed or server_killed" are the two longest parts.
soak: $(VENV)/.installed
	SOAK_TABLE=results/soak $(BIN)/python -m pytest -q -m slow tests/engines/federatedscope/test_soak.py $(if $(ONLY),-k "$(ONLY)")

# In an environment of its own: PEFT imports bitsandbytes wherever it is installed, which takes seconds in every process.
QUANT ?= .venv-quant
QUANT_TESTS ?= tests/engines/test_quantised.py tests/after/test_finished.py tests/engines/test_memory.py tests/engines/test_placing.py tests/test_estimate.py
test-quant: $(VENV)/.installed
	@echo "== setting up $(QUANT) with bitsandbytes, and running the tests of quantised bases"
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(QUANT)
	echo "$(CURDIR)/$$(ls -d $(VENV)/lib/python*/site-packages)" > $$(ls -d $(QUANT)/lib/python*/site-packages)/base.pth
	$(BIN)/uv pip install --quiet --python $(QUANT)/bin/python -c constraints.txt --no-deps bitsandbytes
	PYTHONPATH=$(CURDIR) $(QUANT)/bin/python -m pytest -q -m "not slow" $(QUANT_TESTS)

walks: $(VENV)/.installed
	@echo "== walking as a new user would, from an installed wheel in empty folders"
	$(BIN)/python tests/walks/run.py

check: lint types docs

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed
	$(BIN)/ruff format .

types: $(VENV)/.installed
	$(BIN)/mypy

# A warning is an error: a link that leads nowhere, a name that has no docstring to show.
docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

clean:
	rm -rf $(VENV) site runs/demo
