# `make help` lists the targets. Everything is installed into $(VENV); nothing outside of it changes.

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
PROMPT ?= Once upon a time
MODEL ?=
ARGS ?=

BIN := $(VENV)/bin
RESULTS = benchmarks/results/$(shell $(BIN)/python -m benchmarks.result_files)
BUILD_INPUTS := pyproject.toml CMakeLists.txt $(wildcard csrc/*) \
	$(wildcard src/quire/*/__init__.py src/quire/*/*/__init__.py)
EXTRA_INDEX := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

# The house's rules are `make check`'s.
TEST := $(BIN)/python -m pytest -q -n auto --dist worksteal --ignore tests/structure

# Without MODEL nothing is said, so that a --config file in ARGS may name it.
GIVEN_MODEL := $(if $(MODEL),"$(MODEL)")

export PROMPT

.DEFAULT_GOAL := help
.PHONY: help install wheel ship serve chat doctor run test test-changed test-long test-levels test-clients mutate check page format bench bench-all bench-cpu bench-guesses bench-images paper migrating settings fields gpu-check gpu-site clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo '  MODEL=...         what `make serve`, `chat` and `doctor` use: a directory, GGUF file or Hugging Face id'
	@echo '  ARGS="..."        their other flags, such as ARGS="--port 8123"'
	@echo '  PROMPT="..."      what `make run` continues'
	@echo '  PYTHON=python3.12 the Python that the environment is made with (3.11 or newer)'
	@echo '  TORCH_INDEX=URL   another package index for torch, such as'
	@echo '                    https://download.pytorch.org/whl/cpu (no CUDA, a tenth of the size)'

install: $(VENV)/.installed-test ## make .venv and install quire and the test tools into it

wheel: $(VENV)/bin/python ## build dist/quire-*.whl for this machine's kind, and check what is in it
	rm -rf dist build/wheel
	$(BIN)/python -m pip wheel --disable-pip-version-check --no-deps -C build-dir=build/wheel -w dist .
	.ci/check-wheel dist/*.whl

ship: $(VENV)/bin/python ## build an sdist and a wheel for others' machines, and try the wheel in an empty environment
	.ci/ship $(BIN)/python dist

serve: $(VENV)/.installed ## serve MODEL through OpenAI's HTTP API on 127.0.0.1:8000
	@exec $(BIN)/quire serve $(GIVEN_MODEL) $(ARGS)

chat: $(VENV)/.installed ## talk with MODEL in this terminal
	@exec $(BIN)/quire chat $(GIVEN_MODEL) $(ARGS)

doctor: $(VENV)/.installed ## what this machine has, and what quire would use
	@$(BIN)/quire doctor $(GIVEN_MODEL) $(ARGS)

run: $(VENV)/.installed ## generate text from PROMPT with the model that comes with quire
	@$(BIN)/quire generate "$$PROMPT"

test: $(VENV)/.installed-test ## the tests; minutes at most, no GPU needed
	$(TEST) $(ARGS)

test-changed: $(VENV)/.installed-test ## tests that import what differs from HEAD; or ARGS="--since main"
	$(BIN)/python -m tests.changed $(ARGS)

test-long: $(VENV)/.installed-test ## the tests, with those that take minutes each
	$(TEST) -m "not gpu" $(ARGS)

# What depends on a CPU's instruction set: of the core's C++ variants, and of torch's own.
LEVELS ?= portable:default avx2:avx2 avx512:avx512
LEVEL_TESTS ?= tests/ops tests/kernels tests/runner tests/models tests/pairs tests/engine tests/cli

test-levels: $(VENV)/.installed-test ## tests with the CPU held to lower instruction sets, and emulated AMX and AVX-VNNI; an hour
	@for level in $(LEVELS); do \
		echo "QUIRE_CPU_VARIANT=$${level%:*} ATEN_CPU_CAPABILITY=$${level#*:}"; \
		QUIRE_CPU_VARIANT=$${level%:*} ATEN_CPU_CAPABILITY=$${level#*:} $(TEST) $(LEVEL_TESTS) $(ARGS) || exit 1; \
	done
	$(TEST) -m "not gpu" tests/ops/test_amx.py tests/ops/test_avx_vnni.py

test-clients: $(VENV)/.installed ## openai, langchain and others against `quire serve`; first makes an environment for each
	$(BIN)/python -m tests.clients $(ARGS)

mutate: $(VENV)/.installed-test ## do the tests see small mistakes in scheduler, KV room and sampler? ten minutes
	$(BIN)/python -m tests.mutation.run $(ARGS)

check: $(VENV)/.installed-test ## linter, types, and the house's rules on size and imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -n 2 --dist worksteal tests/structure

page: ## build the page at / anew from web/; needs node
	cd web && npm ci && npm run check && npm run build

format: $(VENV)/.installed-test ## let ruff lay out the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.installed ## throughput and the scheduler's speed on this machine; minutes
	$(BIN)/quire bench throughput --model shape:qwen3-0.6b
	$(BIN)/python -m benchmarks.scheduler.steps --rows 256 1024
	$(BIN)/python -m benchmarks.memory.block_pool

bench-all: $(VENV)/.installed-test ## all benchmarks; results go to benchmarks/results/MACHINE
	$(BIN)/python -m benchmarks.models.against_transformers --dtype bfloat16 \
		--output-json $(RESULTS)/against_transformers_bfloat16.json
	$(BIN)/python -m benchmarks.models.against_transformers --dtype float32 \
		--output-json $(RESULTS)/against_transformers_float32.json
	for name in server.throughput server.import_time server.front_end server.turns server.reuse server.startup \
		server.worst_bodies server.grammars memory.prefix_sharing memory.prefix_savings memory.chat_turns memory.hybrid_hits \
		memory.swap memory.sharing memory.block_pool memory.block_tables memory.live_slots memory.handover \
		models.beam_search models.accuracy scheduler.steps scheduler.async_scheduling scheduler.policies \
		scheduler.recording scheduler.kv_events scheduler.live_watcher kernels.linear kernels.attention \
		kernels.states kernels.collective; do \
		$(BIN)/python -m benchmarks.$$name --output-json $(RESULTS)/$${name#*.}.json || exit 1; done

bench-cpu: $(VENV)/.installed ## beside llama.cpp and others, each in an environment of its own; an hour or two
	$(BIN)/python -m benchmarks.cpu --rounds 3 --output-json $(RESULTS)/cpu.json $(ARGS)

bench-guesses: $(VENV)/.installed ## guessing ahead beside llama.cpp's and OpenVINO's own; twenty minutes
	$(BIN)/python -m benchmarks.cpu.drafts --rounds 3 --output-json $(RESULTS)/cpu_drafts.json $(ARGS)

bench-images: $(VENV)/.installed-test ## images, compared with transformers and OpenVINO on this CPU; an hour or two
	$(BIN)/python -m benchmarks.cpu.images --rounds 3 --output-json $(RESULTS)/cpu_images.json $(ARGS)

paper: $(VENV)/.installed-bench ## the papers' evaluation, simulated: docs/results/evaluation*.md and papers.md; five minutes, or ARGS="--only fig_12"
	$(BIN)/python -m benchmarks.paper $(ARGS)

migrating: $(VENV)/.installed ## write vLLM's flags, and the cases of its tests and examples, into the docs
	$(BIN)/python -m quire.cli.migrating docs/use
	$(BIN)/python -m tests.serve.vllm_cases.table
	$(BIN)/python -m tests.vllm.table

settings: $(VENV)/.installed ## write docs/use/settings.md and other-flags.md from the configuration
	$(BIN)/python -m quire.cli.options.reference docs/use

fields: $(VENV)/.installed-test ## write docs/use/fields.md and endpoint-table.md from what the server accepts
	$(BIN)/python -m tests.serve.fields_page
	$(BIN)/python -m tests.serve.endpoints_page

gpu-check: ## on a GPU: right? how fast? 8 minutes; or PART=kernels|models|..., or PLAN=30min [CALL=1] [DRY=1]
	@PYTHON="$(PYTHON)" PART="$(PART)" PLAN="$(PLAN)" CALL="$(CALL)" DRY="$(DRY)" .ci/gpu-check $(ARGS)

gpu-site: $(VENV)/.installed ## packages to carry to a GPU on which nothing can be installed
	.ci/gpu-site $(ARGS)

clean: ## remove .venv, build outputs and caches
	rm -rf $(VENV) .venv-clients build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "quire needs Python 3.11 or newer; set PYTHON=..., see make help"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Where the test tools are installed, the core keeps the code of all instruction sets.
$(VENV)/.installed: $(BUILD_INPUTS) | $(VENV)/bin/python
	@PYTHON=$(BIN)/python TORCH_INDEX="$(TORCH_INDEX)" .ci/announce
	@.ci/requirements $(BIN)/python > $(VENV)/requirements.txt
	@.ci/install $(BIN)/python $(if $(wildcard $(VENV)/.installed-test),all,native) $(EXTRA_INDEX) \
		-r $(VENV)/requirements.txt
	@.ci/announce core $(BIN)/python
	@touch $@

# The tests run the code of all instruction sets.
$(VENV)/.installed-test: $(BUILD_INPUTS) | $(VENV)/bin/python
	@PYTHON=$(BIN)/python TORCH_INDEX="$(TORCH_INDEX)" .ci/announce
	@.ci/requirements $(BIN)/python > $(VENV)/requirements.txt
	@.ci/requirements $(BIN)/python test > $(VENV)/requirements-test.txt
	@.ci/install $(BIN)/python all $(EXTRA_INDEX) -r $(VENV)/requirements.txt -r $(VENV)/requirements-test.txt
	@.ci/announce core $(BIN)/python
	@touch $(VENV)/.installed $@

$(VENV)/.installed-bench: $(VENV)/.installed
	@.ci/requirements $(BIN)/python bench > $(VENV)/requirements-bench.txt
	$(BIN)/python -m pip install --disable-pip-version-check $(EXTRA_INDEX) -r $(VENV)/requirements-bench.txt
	@touch $@
