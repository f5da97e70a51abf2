# `make demo` and the tests need only Python >= 3.11, pip and make: they create .venv and install everything.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RESULTS ?= results

.PHONY: demo docs test test-all check lint chaos install clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedloom needs Python >= 3.11; this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip "setuptools>=77" wheel
	PYTHONWARNINGS="ignore:Editable installation" $(BIN)/pip install --quiet --editable ".[dev]"
	touch $@

demo: install
	$(BIN)/fedloom demo results=$(RESULTS)

# The site, in build/docs/index.html: a broken link, a missing page or a missing name ends it.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# In minutes, for every change. The tests of Ray, which mostly wait for processes, run beside the others; each worker has
# a cluster of its own if it needs one. What they print comes when the others are done.
test: install
	$(call both,and not slow)

# Everything: also kill schedules, every preset, browsers, clusters with authentication.
test-all: install
	$(call both,)

# The tests start hundreds of Python processes: without compiled files each would compile fedloom anew.
unexport PYTHONDONTWRITEBYTECODE

PYTEST := $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=20
define both
start=$$(date +%s); log="$$(mktemp)"; $(PYTEST) -m "ray $(1)" $$(grep -rl 'mark\.ray' tests --include='test_*.py' | sort) > "$$log" 2>&1 & beside=$$!; \
trap 'kill $$beside 2> /dev/null; rm -f "$$log"; exit 130' INT TERM; \
OMP_NUM_THREADS=1 $(PYTEST) -m "not ray $(1)"; failed=$$?; \
wait $$beside || failed=1; cat "$$log"; rm "$$log"; \
seconds=$$(( $$(date +%s) - start )); echo "all tests: $$(( seconds / 60 )) min $$(( seconds % 60 )) s"; exit $$failed
endef

# Attacks on what docs/concepts/promises.md promises; SECONDS limits each, and the next call continues.
CHAOS := PYTHONPATH=tests $(BIN)/python -m chaos
LIMIT := $(if $(SECONDS),--seconds $(SECONDS))
chaos: install
	@failed=0; for attack in "twice --times 20" "suspended --times 20" "exchanged --times 20" "corrupt --times 1000" \
	    "disk --times 50" "fuzz --times 10000" "kill --times 100" "inputs --times 60" "stranger --times 1000" load; do \
	    $(CHAOS).$$attack $(LIMIT) || failed=1; done; exit $$failed

check: lint
	$(BIN)/pytest -q -m "not slow" tests/test_repository.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p fedloom -p chaos

clean:
	rm -rf $(VENV) results chaos build *.egg-info .mypy_cache .ruff_cache .pytest_cache
