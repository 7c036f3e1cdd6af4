# Two commands: `make demo`, `make test`. Everything else is for people who change onegraph.
PYTHON ?= python3
VENV   ?= .venv
# e.g. PIP_ARGS="--extra-index-url <index of CPU builds>" where the default torch would bring CUDA packages along
PIP_ARGS ?=
BIN    := $(VENV)/bin
# Modules are compiled when they are imported first: of torch's most never are, and all of them take longer than torch.
PIP    := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt $(PIP_ARGS)
TESTS  ?= tests
COUNT  ?= 10000

.PHONY: help demo test avx2 vllm hf torch-versions python-versions lint site mutate fuzz kills gpu-test clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "onegraph needs Python 3.11 or newer, got %d.%d; try: make PYTHON=python3.12" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "pip==26.3"

$(VENV)/.run: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) "torch==2.13.0"
	$(PIP) -e ".[gguf]"
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	$(PIP) --group test --group lint --group site
	@# CPU builds of torch bring no Triton; its interpreter runs our kernels without a GPU (CUDA builds pin their own)
	$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) triton==3.6.0
	@touch $@

demo: $(VENV)/.run ## quantize SmolLM2-135M to 4 bits and ask it a question
	$(BIN)/python -m tools demo

# The tests on the real model run where `make demo` has fetched it.
test: export ONEGRAPH_SMOLLM2 ?= $(abspath $(firstword $(wildcard .demo/*.gguf)))
test: export ONEGRAPH_SMOLLM2_4BIT ?= $(abspath $(wildcard .demo/SmolLM2-135M-Instruct-4bit))
# `make hf` and `make vllm` run theirs, with the versions that they are about.
TOOK := build/test-minutes
test: $(VENV)/.dev ## everything that needs no GPU; the integrations have their own: hf, vllm
	@[ "$(TESTS)" != tests ] || cat $(TOOK) 2>/dev/null || \
	  echo "This takes about 15 minutes on two cores with AVX-512, and longer with AVX2 alone."
	@mkdir -p build
	start=$$(date +%s); $(BIN)/python -m pytest -m "not gpu" -n 2 --dist worksteal $(TESTS) \
	  $(if $(filter-out tests,$(TESTS)),,--ignore=tests/integrations/hf --ignore=tests/integrations/vllm) && \
	  { [ "$(TESTS)" != tests ] || \
	    echo "This took $$(( ($$(date +%s) - start) / 60 + 1 )) minutes the last time on this machine." > $(TOOK); }

# An environment $(1) of its own on top of the main one, with what $(2) lists and nothing that it would bring along.
define overlay
$(BIN)/python -m venv --without-pip $(1)
$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
  > $$(echo $(1)/lib/python*/site-packages)/main.pth
$(BIN)/python -m pip --python $(1)/bin/python install --quiet --no-compile --disable-pip-version-check --no-deps $(PIP_ARGS) \
  -r $(2)
endef

# torch's products, oneDNN's and FBGEMM's, as a CPU without AVX-512 runs them, and what rests on their sums: quantizing,
# models against transformers, a text that does not depend on its batch. tests/ops/test_cpu_targets.py has our C.
NUMERIC := $(addprefix tests/, nn/test_linear.py nn/test_attention.py ops/test_cpu_ops.py ops/test_packed.py \
  quant/test_quant.py quant/test_quant_parts.py models/test_llama.py engine/test_engine_llama.py \
  engine/test_batch_invariant.py)
avx2: export ATEN_CPU_CAPABILITY := avx2
avx2: export ONEDNN_MAX_CPU_ISA := AVX2
avx2: export FBGEMM_ENABLE_INSTRUCTIONS := AVX2
avx2: $(VENV)/.dev ## the numeric tests with torch limited to AVX2, on a CPU with AVX-512
	@if grep -qw avx512f /proc/cpuinfo; then \
	  $(BIN)/python -m pytest -m "not gpu and not slow" -n 2 --dist worksteal $(NUMERIC) -k "not attention_of_a_token"; \
	else echo "This CPU has no AVX-512: make test runs these tests with AVX2."; fi

# vLLM, since its pins are not ours.
$(VENV)/vllm/.done: tests/integrations/vllm/requirements.txt $(VENV)/.dev
	$(call overlay,$(VENV)/vllm,$<)
	@# PyPI's torchvision loads its operators beside a CUDA build of torch only. Models of images import its transforms,
	@# to which the operators' names are enough.
	$(VENV)/vllm/bin/python -c 'import torchvision' 2>/dev/null || \
	  printf 'for name in ("nms", "qnms"):\n    torch.library.define(f"torchvision::{name}", "(Tensor a, Tensor b, float c) -> Tensor")\n' \
	  >> $$(echo $(VENV)/vllm/lib/python*/site-packages/torchvision/extension.py)
	@touch $@

vllm: export ONEGRAPH_SMOLLM2 ?= $(abspath $(firstword $(wildcard .demo/*.gguf)))
vllm: export ONEGRAPH_SMOLLM2_4BIT ?= $(abspath $(wildcard .demo/SmolLM2-135M-Instruct-4bit))
vllm: $(VENV)/vllm/.done ## the plugin inside the real vLLM, on the CPU
	$(VENV)/vllm/bin/python -m pytest -m "not gpu" -n 2 --dist loadfile tests/integrations/vllm

# The newest transformers likewise, over the oldest that is supported, which constraints.txt pins.
$(VENV)/hf/.done: tests/integrations/hf/requirements.txt $(VENV)/.dev
	$(call overlay,$(VENV)/hf,$<)
	@touch $@

hf: export ONEGRAPH_SMOLLM2_4BIT ?= $(abspath $(wildcard .demo/SmolLM2-135M-Instruct-4bit))
hf: $(VENV)/hf/.done ## the integration with the oldest transformers that is supported, and with the newest
	$(BIN)/python -m pytest -m "not gpu and not slow" -n 2 --dist worksteal tests/integrations/hf
	$(VENV)/hf/bin/python -m pytest -m "not gpu" -n 2 --dist worksteal tests/integrations/hf

# The oldest torch that is supported and the newest there is, beside the one that constraints.txt pins.
TORCHES ?= 2.11.0 newest
torch-versions: export PIP_ARGS := $(PIP_ARGS)
torch-versions: $(VENV)/.dev ## the checker with each of TORCHES of which there is a CPU build
	$(BIN)/python -m tests.torch_versions $(TORCHES)

# The wheel where CI is not: other Pythons, and the lowest dependencies that pyproject.toml allows.
PYTHONS ?= 3.12 3.13 3.14 lowest
python-versions: export PIP_ARGS := $(PIP_ARGS)
python-versions: $(VENV)/.dev ## the wheel on each of PYTHONS that this machine has
	$(BIN)/python -m tests.python_versions $(PYTHONS)

lint: $(VENV)/.dev ## ruff, mypy, import contracts, spelling, style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/codespell
	$(BIN)/python -m tools.language

site: $(VENV)/.dev ## docs/ and the README as a site in build/site; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet -f site/mkdocs.yml

# mutmut, for the mutants that it makes.
$(VENV)/mutate/.done: tests/mutate-requirements.txt $(VENV)/.dev
	$(call overlay,$(VENV)/mutate,$<)
	@touch $@

# e.g. MODULES="quant runtime/graph.py" SAMPLE=100 JOBS=2. All of them (SAMPLE=99999) take half a day of one core.
MODULES ?= engine runtime quant formats check/simulate/compare.py
SAMPLE  ?= 400
SEED    ?= 0
JOBS    ?= 2
MUTANTS ?= build/mutants.jsonl
mutate: $(VENV)/mutate/.done ## SAMPLE mutants of MODULES against their tests; what survives
	$(VENV)/mutate/bin/python tests/mutate.py --show --modules $(MODULES) --sample $(SAMPLE) --seed $(SEED) \
	  --jobs $(JOBS) --out $(MUTANTS)

fuzz: $(VENV)/.dev ## COUNT damaged inputs (10,000)
	$(BIN)/python -m tests.fuzz --count $(COUNT)

kills: COUNT := $(if $(filter file,$(origin COUNT)),100,$(COUNT))
kills: $(VENV)/.dev ## COUNT kills (100) of quantize, serve and soak each, and what was found
	$(BIN)/python tests/kills.py --count $(COUNT)

# On a GPU machine the torch that is installed is the one that matches its driver, so it is used where there is one.
# Workers share the GPU; cases of one kernel go to one worker. Kernels are compiled first (tests/conftest.py).
GPU_WORKERS ?= -n $(shell n=$$(nproc); echo $$((n > 14 ? 14 : n))) --dist loadgroup
gpu-test: ## the tests marked gpu, with the torch of this machine or a fresh one
	@if $(PYTHON) -c 'import torch, pytest, safetensors, tokenizers, transformers; assert torch.cuda.is_available()' 2>/dev/null; then \
	  PYTHONPATH=src $(PYTHON) -m pytest -m gpu $(GPU_WORKERS) $(TESTS); \
	else \
	  $(MAKE) $(VENV)/.dev && $(BIN)/python -m pytest -m gpu $(GPU_WORKERS) $(TESTS); \
	fi

clean: ## remove what make made
	rm -rf $(VENV) .demo dist build
