# Each target does its own set-up: a fresh clone and `make test` (or `make demo`) is all it takes.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready

.PHONY: test mutants e2e demo bench bench-scale bench-data check render clean

test: $(READY)
	$(BIN)/python -m pytest -m "not mutants" $(ARGS)

# Is every mistake that is planted in an alert noticed by its cases? Minutes; a part of CI.
mutants: $(READY)
	$(BIN)/python -m pytest -m mutants $(ARGS)

# One story on real servers, with its timings; part of `make test` too.
e2e: $(READY)
	$(BIN)/python -m pytest -m e2e -s $(ARGS)

demo: $(READY)
	$(BIN)/gpuwatch demo $(ARGS)

bench: $(READY)
	$(BIN)/python -m bench $(ARGS)

# Are the recommended loader settings the best ones? Minutes, on a machine that is otherwise idle.
bench-data: $(READY)
	$(BIN)/python -m bench.data $(ARGS)

bench-scale: $(READY)
	$(BIN)/python -m bench.scale $(ARGS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.render --check

render: $(READY)
	$(BIN)/python -m tools.render

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	# torch first and by its exact version: another one would be gigabytes
	$(BIN)/pip install --quiet --constraint constraints.txt "torch==2.13.0"
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $(READY)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
