# Two commands on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
LAB    := $(VENV)/.lab
STAMP  := $(VENV)/.installed
COMPAT ?= build/compat

.PHONY: help install demo test check format docs package workflows compat links pictures bench study clean

help:  ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# torch by itself first: the pin takes the CPU build where one is offered, and nothing after it asks for another.
$(LAB): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[lab]'
	@touch $@

$(STAMP): $(LAB)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[lab,dev,docs]'
	@touch $@

install: $(STAMP)  ## the virtual environment with everything in it

test: $(STAMP)  ## all tests, with coverage
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --cov --cov-report=term --numprocesses auto --maxprocesses 4 --dist worksteal

check: $(STAMP) docs package workflows  ## lint, format, types, import layers, the documentation site, the package
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy docs/explanation/pictures.py
	$(BIN)/lint-imports

format: $(STAMP)  ## mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: $(LAB)  ## the demonstration: methods and seeds side by side on real data, a few minutes
	$(BIN)/orthocond demo

docs: $(STAMP)  ## the documentation site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

package: $(STAMP)  ## the sdist and the wheel, in dist/, checked as PyPI checks them
	rm -rf dist
	$(BIN)/python -m build --no-isolation >/dev/null
	$(BIN)/twine check --strict dist/*

workflows: $(STAMP)  ## the files in .github, against their schemas and for what is unsafe
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml
	$(BIN)/zizmor --offline --quiet .github

# A virtual environment for each release: the oldest that pyproject.toml allows, and the newest there is.
$(COMPAT)/oldest/.installed: TORCH := torch==$(shell sed -nE 's/^dependencies = \["torch>=([0-9.]+)"\]/\1/p' pyproject.toml)
$(COMPAT)/newest/.installed: TORCH := torch
$(COMPAT)/%/.installed: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet '$(TORCH)'
	$(@D)/bin/python -m pip install --quiet --editable '.[test]'
	@touch $@

compat: $(COMPAT)/oldest/.installed $(COMPAT)/newest/.installed  ## the library's tests with the oldest and the newest torch; gigabytes, and an hour
	@for release in oldest newest; do \
		$(COMPAT)/$$release/bin/python -c "import torch; print('torch', torch.__version__)" && \
		OMP_NUM_THREADS=1 $(COMPAT)/$$release/bin/python -m pytest tests --library --numprocesses 2 --dist worksteal || exit 1; \
	done

links: $(STAMP)  ## ask every address on the pages whether it answers; needs a network
	$(BIN)/python docs/_site/pages.py

pictures: $(STAMP)  ## draw the pictures of docs/explanation and of README.md again
	$(BIN)/python docs/explanation/pictures.py
	$(BIN)/python docs/_site/notebooks.py

bench: $(STAMP)  ## what things cost, measured side by side: results/bench, docs/benchmark.md; 20 minutes, on a quiet machine
	for subject in solvers functions polar geometry layers step; do \
		$(BIN)/python -m orthocond bench $$subject --json results/bench/$$subject.json || exit 1; \
	done
	$(BIN)/python -m orthocond.lab.bench.page docs/benchmark.md results/bench/*.json

study:  ## the study on CIFAR-10: make study DATA=DIR, the folder with its parquet files; half a day
	@test -d "$(DATA)" || { echo "make study needs CIFAR-10: make study DATA=DIR, the folder with its parquet files" >&2; exit 2; }
	@$(MAKE) --no-print-directory $(LAB)
	PATH="$(abspath $(BIN)):$$PATH" results/study/run "$(DATA)" runs/study
	$(BIN)/python results/study/collect.py runs/study
	$(BIN)/python results/study/publish.py

clean:  ## remove what the other targets made
	rm -rf $(VENV) build dist site .mypy_cache .pytest_cache .ruff_cache .coverage .import_linter_cache
