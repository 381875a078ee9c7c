# What a contributor types; each is one of the repository's own commands.
.PHONY: test all format docs wheel
PYTHON := .venv/bin/python

test:  ## style and the fast tests
	bash scripts/test.sh
all:  ## every test, types, documentation, kernels for GPUs
	bash scripts/test.sh --all
format:
	.venv/bin/ruff check --fix . && .venv/bin/ruff format .
docs:  ## tables and pages that are made from the code
	$(PYTHON) scripts/update_docs.py && $(PYTHON) scripts/update_comfy.py
wheel:
	$(PYTHON) -m build --wheel
