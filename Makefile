# Everything one does with a clone. The first target that needs Python makes .venv and installs into it; later ones
# find it there, and install again only after pyproject.toml or constraints.txt has changed.

PYTHON ?= python3
# Another PyTorch than the tested one, for example: make test TORCH=2.14.1. It gets an environment of its own.
TORCH :=
VENV := .venv$(if $(TORCH),-torch-$(TORCH))
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Settings of a run, for example: make train ARGS="graph=full_iteration train.steps=1000"
ARGS ?=
# What `make generate` goes on from. It reaches the command by the environment, since a shell would read it again.
PROMPT ?= def main(
# Tests beside other programs on few cores: see train.py.
export GOMP_SPINCOUNT ?= 3000

.DEFAULT_GOAL := help
.PHONY: help setup train generate serve compare tensorboard docs test test-all lint format clean

# make would take settings for variables of its own, and drop them.
OWN := PYTHON TORCH VENV ARGS PROMPT GOMP_SPINCOUNT
SETTINGS := $(strip $(foreach name,$(filter-out $(OWN),$(.VARIABLES)),$(if $(findstring command line,$(origin $(name))),$(name)=$($(name)))))
ifneq ($(SETTINGS),)
$(error write: make $(MAKECMDGOALS) ARGS="$(SETTINGS)")
endif

help: ## show this list
	@echo "make TARGET [ARGS='KEY=VALUE ...'] [PYTHON=python3.12] [TORCH=2.14.1]"
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv and install graphmod into it

$(STAMP): pyproject.toml constraints.txt
	@found=; \
	for python in $(PYTHON) python3.13 python3.12 python3.11; do \
		if $$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then \
			found=$$python; break; \
		fi; \
	done; \
	if [ -z "$$found" ]; then \
		echo "error: no Python 3.11, 3.12 or 3.13 found; install one, or name it: make PYTHON=/path/to/python3.12" >&2; \
		exit 1; \
	fi; \
	echo "installing into $(VENV) with $$($$found --version)"; \
	$$found -m venv $(VENV)
	sed '$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/)' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c $(VENV)/constraints.txt -e '.[dev]'
	@$(BIN)/python -m compileall -qq -j 0 -x '/tests/' $(VENV)/lib || true  # as pip does, but on all cores; some templates are not Python
	@touch $@

train: $(STAMP) ## train a small model on Python's own sources, in graphs; ARGS are settings
	$(BIN)/python train.py $(ARGS)

generate: export GOES_ON_FROM = $(value PROMPT)
generate: $(STAMP) ## sample from the last trained model (trains one briefly if there is none); ARGS are settings
	@ls runs/train/*/checkpoints/*/config.json >/dev/null 2>&1 || $(BIN)/python train.py train.steps=200 data.seq_len=128
	$(BIN)/python generate.py model.path=runs/train prompt="$$GOES_ON_FROM" decode=sample $(ARGS)

serve: $(STAMP) ## serve the last trained model at http://127.0.0.1:8000 (trains one briefly if there is none); ARGS are settings
	@ls runs/train/*/checkpoints/*/config.json >/dev/null 2>&1 || $(BIN)/python train.py train.steps=200 data.seq_len=128
	$(BIN)/python serve.py model.path=runs/train $(ARGS)

compare: $(STAMP) ## the same run without graphs, per layer and as one graph, side by side; ARGS are settings
	$(BIN)/graphmod compare $(ARGS)

tensorboard: $(STAMP) ## show all runs in the browser
	$(BIN)/tensorboard --logdir runs

docs: $(STAMP) ## build the pages as a site with search, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "open site/index.html"

test: $(STAMP) ## run the tests on all cores (at most 8), except the slow ones; those for a GPU are skipped where there is none. TORCH is another PyTorch to run them on
	@# Else each of many processes compiles the package again, where bytecode is not written.
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n auto --maxprocesses=8 --dist loadfile -m "not slow" $(ARGS)

test-all: $(STAMP) ## likewise, with the slow ones
	$(BIN)/python -m pytest -n auto --maxprocesses=8 --dist loadfile $(ARGS)

lint: $(STAMP) ## check style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check --summary=none
	$(BIN)/pyrefly check --summary=none --preset=basic benchmarks

format: $(STAMP) ## put the code into its format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove .venv, those of other PyTorchs, site/ and caches; runs/ stays
	rm -rf $(VENV) .venv-torch-* build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis
