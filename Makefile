# Everything lives inside the clone: the environment, its caches and its temporary files are all under .venv.
PYTHON ?= python3
VENV := $(CURDIR)/.venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

export TMPDIR := $(VENV)/tmp
export PIP_NO_CACHE_DIR := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test check bench golden wheel clean

demo: $(READY) ## write a small real bundle and look at it
	$(BIN)/python examples/small_network.py demo/small.kfac
	$(BIN)/kfacpack inspect demo/small.kfac --blocks
	$(BIN)/kfacpack verify demo/small.kfac --model demo/small.safetensors

test: $(READY) ## every test that needs nothing but this clone
	$(BIN)/python -m pytest

check: $(READY) ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY) ## the measured promises, as ratios; fails when one does not hold
	$(BIN)/python tests/bench/bundle.py

golden: $(READY) ## write the JSON schema and any golden file that is missing
	$(BIN)/python tests/spec/golden.py

wheel: $(READY)
	$(BIN)/python -m build --wheel --outdir dist .

clean:
	rm -rf $(VENV) build dist demo *.egg-info

$(READY): pyproject.toml constraints.txt
	mkdir -p $(TMPDIR)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@
