PYTHON ?= python3
# Extra arguments for pip, for example an index that has the CPU build of torch.
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo setup test newest coverage lint format bench bench-data bench-training accuracy clean

demo: $(READY)  ## train two small models side by side and write runs/demo/report.html
	$(BIN)/mgk demo

setup: $(READY)  ## virtual environment in .venv with everything the tests need

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_ARGS) --constraint constraints.txt --editable '.[dev]'
	touch $@

# The browser tests need Debian's package chromium on the PATH, and are skipped without; their pictures go to artefacts/.
test: $(READY)  ## the test suite, on two cores; the fused kernels in Triton's interpreter
	$(BIN)/pytest -n 2 -m "not gpu and not slow" --ignore tests/ops/triton
	TRITON_INTERPRET=1 $(BIN)/pytest -n 2 -m "not gpu and not slow" tests/ops/triton

newest:  ## the first half of the suite with the newest libraries that pip finds, in .venv-newest
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/pip install --quiet --disable-pip-version-check $(PIP_ARGS) --upgrade --editable '.[dev]' 'numpy<2.4'
	.venv-newest/bin/pytest -n 2 -m "not gpu and not slow" --ignore tests/ops/triton

coverage: $(READY)  ## the first half of the suite with line coverage, which takes a third longer; at least 95 %
	$(BIN)/pytest -n 2 -m "not gpu and not slow" --ignore tests/ops/triton --cov --cov-fail-under=95

lint: $(READY)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)  ## speed of attention on this CPU, next to stock softmax
	$(BIN)/python benchmarks/cpu_attention.py

bench-data: $(READY)  ## time and memory of preparing the corpora in DATA, and of one batch: results/bench/data-cpu.json
	$(BIN)/python benchmarks/data.py $(DATA)

bench-training: $(READY)  ## the training loop beside the bare model step, with the IMDb files in DATA
	$(BIN)/python benchmarks/training.py $(DATA)

accuracy: $(READY)  ## errors against fp64: results/accuracy/cpu.json and the table of docs/numerics.md
	$(BIN)/python benchmarks/accuracy.py

clean:
	rm -rf $(VENV) artefacts .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
