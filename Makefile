# Every target sets up what it needs: `make demo` and `make test` are enough on a fresh machine.

PYTHON ?= python3
PY := .venv/bin/python
PY_NEWEST := .venv-newest/bin/python
PIP_INSTALL := -m pip install --disable-pip-version-check --quiet
# Two workers with one thread each, so that two cores are enough.
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

NEEDS_311 := import sys; v = sys.version_info; \
  v >= (3, 11) or sys.exit("Rekindle needs Python 3.11 or newer, and $(PYTHON) is %d.%d: try make PYTHON=python3.11" % v[:2])
IS_USABLE := import pip, sys; sys.exit(sys.version_info < (3, 11))

# $(call venv,FOLDER): a virtual environment there; a working one is left as it is. Where Python comes
# without ensurepip, the pip outside puts one inside.
define venv
@$(PYTHON) -c '$(NEEDS_311)'
@$(1)/bin/python -c '$(IS_USABLE)' 2>/dev/null \
  || $(PYTHON) -m venv --clear $(1) 2>/dev/null \
  || { $(PYTHON) -m venv --clear --without-pip $(1) \
       && $(PYTHON) -m pip --python $(1)/bin/python install --quiet pip; }
endef

.PHONY: setup demo test test-all exhaustive fuzz lint typecheck test-newest matrix bench experiments clean

setup: .venv/.stamp

demo: setup
	.venv/bin/rekindle demo

# What must pass before a change goes in, in a few minutes.
test: lint typecheck
	$(PYTEST) $(PY) -m pytest -n 2 --durations=10 -m "not slow and not exhaustive"

# And the tests that take seconds each. CI runs this.
test-all: test
	$(PYTEST) $(PY) -m pytest -n 2 --durations=10 -m slow

# All of what other tests sample: every operator, the whole table of forms, every line. An hour.
exhaustive: setup
	$(PYTEST) $(PY) -m pytest -n 2 --durations=10 -m exhaustive

# The tests with generated examples, on examples that no run has seen; then random training programs,
# for SECONDS. Failing seeds are printed: python -m benchmarks.fuzz --seed N shows and runs one.
SECONDS ?= 600
fuzz: setup
	HYPOTHESIS_PROFILE=fuzz $(PYTEST) $(PY) -m pytest -n 2 -m hypothesis
	PYTHONPATH=.:tests $(PYTEST) $(PY) -m benchmarks.fuzz --seconds $(SECONDS)

lint: setup
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	.venv/bin/lint-imports

typecheck: setup
	$(PY) -m mypy

# Delete .venv-newest/.stamp to look for newer releases.
test-newest: .venv-newest/.stamp
	$(PYTEST) $(PY_NEWEST) -m pytest -n 2 -m "not exhaustive"

# Public models x budgets, bit for bit; resumable, hours in all. Two parts at once: python -m benchmarks.matrix --part 1/2
matrix: setup
	PYTHONPATH=. $(PYTEST) $(PY) -m benchmarks.matrix
	PYTHONPATH=. $(PY) -m benchmarks.matrix --collect

bench: setup
	$(PY) benchmarks/replay.py

# docs/results/experiments.md and its figures, from the stored results; nothing is measured.
experiments: setup
	$(PY) -m experiments.document

# src/rekindle/tracing/same_bits.json: the forms of operators that compute the same bits. Some minutes.
.PHONY: same-bits
same-bits: setup .venv-newest/.stamp
	$(PYTEST) $(PY) -m experiments.same_bits --also $(PY_NEWEST)

# The site, in build/site. It is built from the sources alone, in an environment without torch.
.PHONY: docs
docs: .venv-docs/.stamp
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet
	@echo "open build/site/index.html; .venv-docs/bin/mkdocs serve has search, too"

clean:
	rm -rf build dist rekindle-demo .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests benchmarks experiments -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.stamp: requirements.txt pyproject.toml
	$(call venv,.venv)
	$(PY) $(PIP_INSTALL) -r requirements.txt
	$(PY) $(PIP_INSTALL) --no-deps --no-build-isolation -e .
	@touch $@

.venv-newest/.stamp: requirements.txt pyproject.toml
	$(call venv,.venv-newest)
	sed -n 's/==.*//p' requirements.txt | xargs $(PY_NEWEST) $(PIP_INSTALL) --upgrade
	$(PY_NEWEST) $(PIP_INSTALL) --no-deps --no-build-isolation -e .
	@touch $@

.venv-docs/.stamp: docs/requirements.txt
	$(call venv,.venv-docs)
	.venv-docs/bin/python $(PIP_INSTALL) -r docs/requirements.txt
	@touch $@
