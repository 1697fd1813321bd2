# Everything is written inside the clone: the environment and its temporary files in .venv, the tools' caches beside it.
PYTHON ?= python3
# The interpreters of `make compat`.
OLDEST_PYTHON ?= $(PYTHON)
NEWEST_PYTHON ?= $(PYTHON)
VENV := $(CURDIR)/.venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
READY_DOCS := $(VENV)/ready-docs

export TMPDIR := $(VENV)/tmp
export KFACPACK_CACHE := $(VENV)/cache
# Where the stand-in device of tests/devices is built.
export TORCH_EXTENSIONS_DIR := $(VENV)/cache/extensions
# Material's notice about its successor.
export NO_MKDOCS_2_WARNING := 1
export PIP_NO_CACHE_DIR := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Two worker processes with one thread each. A file stays in one process, which shares its fixtures; files are started in
# their order, with the slow ones of tests/cli first.
PARALLEL := --numprocesses=2 --dist=loadfile --no-loadscope-reorder

.PHONY: help demo test testruns check docs bench benchmerge paper gpu golden wheel installcheck compat oldest newest clean

help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/make \1\t\2/' | expand -t 16

demo: $(READY) ## run `kfacpack demo`, and write bundles of small networks; the report is demo/report.html
	$(BIN)/kfacpack demo -o demo
	$(BIN)/python examples/small_network.py demo/small.kfac
	$(BIN)/kfacpack inspect demo/small.kfac --blocks
	$(BIN)/kfacpack verify demo/small.kfac --model demo/small.safetensors
	$(BIN)/python examples/own_module.py demo/own.kfac
	$(BIN)/kfacpack verify demo/own.kfac

test: $(READY) ## run the tests of the library and its commands, in two processes
	$(BIN)/python -m pytest $(PARALLEL) --ignore=tests/runs --ignore=tests/devices --ignore=tests/docs

testruns: $(READY) ## run the tests of whole plans, worker processes, Ray, nodes and a device (a stand-in if there is no GPU)
	$(BIN)/python -m pytest $(PARALLEL) tests/runs tests/devices

check: $(READY) ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY_DOCS) ## build the documentation site in site/ and run the code on its pages; fails on a broken link
	$(BIN)/mkdocs build --strict --quiet
	$(BIN)/python -m pytest $(PARALLEL) tests/docs

bench: $(READY) ## measure performance as ratios; fails if a bound is exceeded
	$(BIN)/python tests/bench/bundle.py
	$(BIN)/python tests/bench/tiny.py
	$(BIN)/python tests/bench/compress.py
	$(BIN)/python tests/bench/merge.py
	$(BIN)/python tests/bench/linear.py
	$(BIN)/python tests/bench/overhead.py
	KFACPACK_TEST_COMPILE=1 $(BIN)/python -m pytest -k 'models or jvp or every_mode' tests/linearization/test_families.py tests/models/test_clip.py tests/training/test_train.py
	$(BIN)/python tests/bench/penalty.py
	$(BIN)/python tests/bench/sweep.py
	$(BIN)/python tests/bench/interrupted.py
	$(BIN)/python tests/bench/jobs.py
	$(BIN)/python tests/bench/ray_cluster.py --out $(VENV)/cache/ray-cluster
	$(BIN)/pip install --quiet --constraint constraints.txt curvlinops-for-pytorch kronfluence
	$(BIN)/python tests/bench/estimate.py

gpu: $(READY) ## run the device tests and benches on the GPU, or on its stand-in, and write gpu/report.html
	$(BIN)/pip install --quiet --constraint constraints.txt curvlinops-for-pytorch kronfluence
	$(BIN)/python tests/bench/gpu.py --out gpu

benchmerge: $(READY) ## merge eight vectors of the size of ViT-B/32 with their bundles; takes ten minutes
	$(BIN)/python tests/bench/merge_vectors.py

paper: $(READY) ## run the plans of examples/paper on tiny, and write RESULTS.md; takes hours, the same command resumes
	$(BIN)/python examples/paper/results.py run -o paper

golden: $(READY) ## write the JSON schema and any golden file that is missing
	$(BIN)/python tests/spec/golden.py

wheel: $(READY) ## build the wheel and the sdist into dist/
	rm -rf build dist
	$(BIN)/python -m build --outdir dist .

installcheck: wheel ## install the wheel without extras in a new environment and use it there
	$(BIN)/python tests/environments/installed.py dist $(VENV)/installed

compat: oldest newest ## run the core of the tests with the oldest and with the newest versions of all dependencies; several GB

oldest:
	mkdir -p $(TMPDIR)
	$(OLDEST_PYTHON) tests/environments/compat.py oldest $(VENV)/oldest

newest:
	mkdir -p $(TMPDIR)
	$(NEWEST_PYTHON) tests/environments/compat.py newest $(VENV)/newest

clean: ## remove everything that make has created
	rm -rf $(VENV) build dist demo gpu paper site *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache

$(READY): pyproject.toml constraints.txt
	mkdir -p $(TMPDIR)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

$(READY_DOCS): $(READY)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@
