# Two commands set everything up on a machine with only Python >= 3.10 and make:
#
#   make demo    environment, the main job on the CPU, its report
#   make test    environment, tests, lint
#
# Works with GNU make 3.81 (macOS). Every path is relative to this file, so `make -C some/where demo`
# and folders with spaces are fine.

TORCH_VERSION ?= 2.13.0
# What pip is asked for; another build, for instance: make demo TORCH="torch==2.13.0 --index-url https://..."
# A choice other than the default is remembered in .venv.
ifeq ($(origin TORCH_VERSION),file)
TORCH ?= $(shell cat .venv/.torch 2>/dev/null || echo torch==$(TORCH_VERSION))
else
TORCH ?= torch==$(TORCH_VERSION)
endif
NEED_GB ?= 3
JOBS ?= 2

PY := .venv/bin/python
PIP := $(PY) -m pip -q --disable-pip-version-check
RECIPE := recipes/demo/recipe.yaml
# Markers of the tests that are run by hand; pyproject.toml says what each needs.
BY_HAND := slow or gpu or vllm or sglang or ray or slurm or browser or agents or containers
# Tests see a fresh machine each time: an empty home without caches, and an order of their own. The order's seed is
# printed; again in that order: make test ARGS=--random-order-seed=123
FORGET := -u HF_HOME -u HF_HUB_CACHE -u HUGGINGFACE_HUB_CACHE -u HF_DATASETS_CACHE -u XDG_DATA_HOME -u XDG_STATE_HOME \
  -u MPLCONFIGDIR -u TRITON_CACHE_DIR
# The value of `KEY=` in ARGS, or the recipe's own.
given = $(or $(lastword $(patsubst $(1)=%,%,$(filter $(1)=%,$(ARGS)))),$(2))

# Somebody else's active environment must not leak into ours.
unexport PYTHONPATH PYTHONHOME PYTHONSTARTUP VIRTUAL_ENV CONDA_PREFIX PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV
export PYTHONNOUSERSITE := 1
export PIP_USER := 0
export TORCH NEED_GB

.PHONY: help demo test site mutants lint format venv venv-dev clean check-space gpu gpu-wheels

help:
	@echo "make demo     set up, train the demo on the CPU, write runs/demo/report/report.html"
	@echo "make test     set up, run the tests and the linters"
	@echo "make lint     ruff and mypy only        make format   rewrite the code with ruff"
	@echo "make site     the documentation as a site: build/site/index.html"
	@echo "make gpu      everything that only a GPU shows, in nine minutes (docs/gpu.md); first make gpu-wheels"
	@echo "make mutants  do the tests notice a changed sign? For hours; some modules: MODULES=\"learn/kl learn/losses\""
	@echo "make venv     set up only               make clean    remove .venv and caches (not runs/)"
	@echo
	@echo "Variables: PYTHON=python3.12 (interpreter), TORCH_VERSION=$(TORCH_VERSION), NEED_GB=$(NEED_GB), JOBS=$(JOBS) (test processes),"
	@echo "  TORCH=\"torch==$(TORCH_VERSION) --index-url https://download.pytorch.org/whl/cpu\" (on Linux without a GPU: a smaller download)"

demo: venv
	@.venv/bin/hone train $(RECIPE) $(ARGS)
	@.venv/bin/hone report $(call given,runs,runs)/$(call given,name,demo)

test: venv-dev
	@home=`mktemp -d` && trap 'rm -rf "$$home"' EXIT && trap 'exit 130' INT && trap 'exit 143' TERM && \
	  env $(FORGET) HOME="$$home" XDG_CACHE_HOME="$$home/cache" XDG_CONFIG_HOME="$$home/config" \
	    TORCHINDUCTOR_CACHE_DIR="$$home/inductor" \
	    $(PY) -m pytest -q -rs -n $(JOBS) --dist worksteal --random-order -m "not ($(BY_HAND))" $(ARGS)
	@$(MAKE) --no-print-directory lint

site: venv-dev
	@$(PY) -m mkdocs build -q --strict && echo build/site/index.html

mutants: venv-dev
	@$(PIP) install mutmut==3.8.1
	@JOBS=$(JOBS) $(PY) benchmarks/mutants.py $(MODULES)

lint: venv-dev
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check -q . || { echo "Some files are not formatted: run 'make format'." >&2; exit 1; }
	@$(PY) -m mypy

format: venv-dev
	@$(PY) -m ruff check -q --fix . ; $(PY) -m ruff format -q .

# On a GPU machine without a network, with its own Python and PyTorch: no .venv. What that Python lacks is fetched
# beforehand by gpu-wheels, where there is a network, and travels in build/gpu-wheels (3 MB).
GPU_PYTHON ?= python3
GPU_PYTHON_VERSION ?= 3.12
GPU_PLATFORM ?= x86_64
GPU_WHEELS := build/gpu-wheels
GPU_PACKAGES := build/gpu-packages
# With their libraries; and of TRL, which is only compared with, what a usual image lacks.
GPU_NEEDS := pydantic==2.14.3 ruamel.yaml==0.19.1
GPU_PEER := trl==1.16.0 datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19
GPU_TAGS := --only-binary=:all: --implementation cp --python-version $(GPU_PYTHON_VERSION) \
  $(foreach tag,manylinux_2_17 manylinux2014 manylinux_2_28,--platform $(tag)_$(GPU_PLATFORM))

gpu-wheels:
	@rm -rf $(GPU_WHEELS); mkdir -p $(GPU_WHEELS)
	@$(GPU_PYTHON) -m pip -q --disable-pip-version-check download $(GPU_TAGS) -d $(GPU_WHEELS) $(GPU_NEEDS)
	@$(GPU_PYTHON) -m pip -q --disable-pip-version-check download $(GPU_TAGS) -d $(GPU_WHEELS) --no-deps $(GPU_PEER)
	@size=`du -sk $(GPU_WHEELS) | awk '{print $$1}'`; echo "$(GPU_WHEELS): $$size KB"; \
	if [ "$$size" -gt 40960 ]; then echo "make: more than 40 MB; see GPU_NEEDS" >&2; exit 1; fi

# Whatever the Python there has already is not installed again: another version would hide it.
gpu:
	@rm -rf $(GPU_PACKAGES); mkdir -p $(GPU_PACKAGES)
	@$(GPU_PYTHON) benchmarks/gpu_install.py $(GPU_WHEELS) $(GPU_PACKAGES)
	@PYTHONPATH="$(CURDIR)/$(GPU_PACKAGES)" $(GPU_PYTHON) benchmarks/gpu.py $(ARGS)

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find hone tests -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is written last and holds what it was made from (pyproject.toml, the torch asked for, this folder):
# a second run reinstalls nothing, an interrupted or a moved one is repaired.
KEY = { cksum < pyproject.toml; echo "$$TORCH"; pwd; }

venv:
	@if { $(KEY) | cmp -s - .venv/.installed; } || { $(KEY) | cmp -s - .venv/.installed-dev; }; then :; else \
	  $(MAKE) --no-print-directory .install EXTRAS= STAMP=.installed; fi

venv-dev:
	@if $(KEY) | cmp -s - .venv/.installed-dev; then :; else \
	  $(MAKE) --no-print-directory .install EXTRAS='[dev]' STAMP=.installed-dev; fi

# On failure show the end of the log, and exit.
LOGGED = > .venv/install.log 2>&1 || { grep -v "is ignored: it is " .venv/install.log | tail -n 15 >&2; \
	  echo "make: $$doing failed; the whole log is .venv/install.log. Free disk: `df -Pk . | awk 'NR==2 {printf "%.1f GB", $$4/1048576}'`." \
	  "When the cause is gone, run make again: it goes on from here." >&2; exit 1; }

.PHONY: .install .interpreter
.install: check-space .interpreter
	@rm -f .venv/$(STAMP); doing="installing $(TORCH)"; echo "Installing PyTorch (the largest part, a few minutes) ..."; \
	  $(PIP) install $(TORCH) $(LOGGED)
	@case "$(origin TORCH_VERSION) $$TORCH" in "file torch==$(TORCH_VERSION)") rm -f .venv/.torch;; *) echo "$$TORCH" > .venv/.torch;; esac
	@doing="installing hone$(EXTRAS)"; echo "Installing hone$(EXTRAS) and its libraries (about 1 GB, a few minutes) ..."; \
	  pin=`$(PY) -c "from importlib.metadata import version; print('torch==' + version('torch'))"` || exit 1; \
	  $(PIP) install -e '.$(EXTRAS)' "$$pin" $(LOGGED)
	@$(KEY) > .venv/$(STAMP); echo "Installed in .venv."

check-space:
	@free=`df -Pk . | awk 'NR==2 {print $$4}'`; \
	if [ "$$free" -lt $$(($$NEED_GB * 1048576)) ]; then \
	  echo "make: the environment needs about $$NEED_GB GB of free disk here, and there are $$((free / 1048576)) GB." \
	  "Free some space, or move this folder to a larger disk; NEED_GB=0 skips this check." >&2; exit 1; fi

# .venv from the first interpreter that is new enough and has the venv module.
.interpreter:
	@if [ -x $(PY) ] && $(PY) -c 'import sys, pip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then exit 0; fi; \
	old=; novenv=; \
	for p in $${PYTHON:+"$$PYTHON"} python3.13 python3.12 python3.11 python3.10 python3 python; do \
	  v=`"$$p" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null` || continue; \
	  "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { old="$$p ($$v)"; continue; }; \
	  "$$p" -c 'import venv, ensurepip' 2>/dev/null || { novenv="$$v"; continue; }; \
	  echo "Creating .venv with $$p (Python $$v) ..."; rm -rf .venv; \
	  "$$p" -m venv .venv && exit 0; exit 1; \
	done; \
	if [ -n "$$novenv" ]; then \
	  echo "make: Python $$novenv is here, but without its venv module. On Debian or Ubuntu: sudo apt install python$$novenv-venv" >&2; \
	elif [ -n "$$old" ]; then \
	  echo "make: hone needs Python 3.10 or newer; the newest found is $$old. Install one (https://www.python.org/downloads)" \
	  "and, if it is not on PATH, name it: make PYTHON=/path/to/python3.12" >&2; \
	else \
	  echo "make: no Python found. Install 3.10 or newer (https://www.python.org/downloads)" \
	  "or name one: make PYTHON=/path/to/python3.12" >&2; \
	fi; exit 1
