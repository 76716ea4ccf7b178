# make demo   installs into .venv and detects signs on the photographs that ship with the package
# make test   installs into .venv and runs every test
# Both make .venv when it is missing. The other targets are what CI runs beside them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
JOBS ?= $(shell nproc)
CMAKE_BUILD_TYPE ?= RelWithDebInfo

.PHONY: demo test test-cpp asan tsan neon fuzz lean lint stubs wheel clean
SHELL := bash

demo: $(VENV)/.demo
	$(BIN)/edgeyolo demo --save runs/demo

# The GPU's code runs on the simulated driver where there is no GPU, and over the test TensorRT everywhere: both are built
# by test-cpp, the latter against NVIDIA's headers, which a pinned package brings (EDGEYOLO_TENSORRT_HEADERS).
test: $(VENV)/.test test-cpp
	YOLO_OFFLINE=1 YOLO_CONFIG_DIR=$(abspath $(VENV)) $(BIN)/python -m pytest $(PYTEST_FLAGS)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip

# What the installed package is made of: a change installs it again.
SOURCES := pyproject.toml CMakeLists.txt $(shell find cpp cmake python tools assets examples/signs -type f -not -name '*.pyc')

$(VENV)/.demo: $(BIN)/python $(SOURCES) constraints.txt
	$(PIP) install --quiet -c constraints.txt '.[cpu]'
	touch $@

$(VENV)/.test: $(BIN)/python $(SOURCES) constraints.txt
	CMAKE_ARGS="$(TENSORRT) $(CMAKE_ARGS)" $(PIP) install --quiet -c constraints.txt '.[cpu,tools,dev]'
	touch $@ $(VENV)/.demo

# The C++ tests need GoogleTest (Debian, Ubuntu and JetPack: apt-get install libgtest-dev); without it they are skipped,
# and say so. CI has it.
TENSORRT := -DEDGEYOLO_TENSORRT_HEADERS=pypi
CPP_FLAGS := -DEDGEYOLO_PYTHON=OFF -DEDGEYOLO_TESTS=ON -DEDGEYOLO_WERROR=ON
CPP_TESTS := edgeyolo_tests edgeyolo_gpu_tests edgeyolo_trt10_tests edgeyolo_pipeline10_tests
HAVE_GTEST := $(wildcard /usr/include/gtest/gtest.h /usr/local/include/gtest/gtest.h)

define cpp_tests # folder, cmake options, environment, tests
	cmake -S . -B $(1) $(CPP_FLAGS) $(2) >$(1).log 2>&1 || { cat $(1).log; exit 1; }
	cmake --build $(1) -j $(JOBS) >>$(1).log 2>&1 || { tail -n 60 $(1).log; exit 1; }
	for tests in $(4); do $(3) $(1)/tests/cpp/$$tests --gtest_brief=1 $(GTEST_FLAGS) || exit 1; done
endef

test-cpp:
ifeq ($(HAVE_GTEST),)
	@echo "SKIPPED: the C++ tests need GoogleTest: apt-get install libgtest-dev"
else
	@mkdir -p build
	$(call cpp_tests,build/cpp,-DCMAKE_BUILD_TYPE=$(CMAKE_BUILD_TYPE) $(TENSORRT),,$(CPP_TESTS))
endif

asan:
	@mkdir -p build
	$(call cpp_tests,build/asan,-DCMAKE_BUILD_TYPE=RelWithDebInfo -DEDGEYOLO_SANITIZE=address$(comma)undefined \
	  -DEDGEYOLO_CUDA=OFF $(TENSORRT),\
	  UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1,$(CPP_TESTS))

# ThreadSanitizer does not follow the fibers on which kernel_source_test runs a kernel's threads.
tsan: GTEST_FLAGS = --gtest_filter=-KernelSource.*
tsan:
	@mkdir -p build
	$(call cpp_tests,build/tsan,-DCMAKE_BUILD_TYPE=RelWithDebInfo -DEDGEYOLO_SANITIZE=thread \
	  -DEDGEYOLO_CUDA=OFF $(TENSORRT),TSAN_OPTIONS=halt_on_error=1,$(CPP_TESTS))

comma := ,

# The NEON code, compiled for AArch64 and run under QEMU.
# apt-get install g++-aarch64-linux-gnu qemu-user-static libgtest-dev
neon:
	@mkdir -p build
	$(call cpp_tests,build/neon,-DCMAKE_BUILD_TYPE=Release -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DEDGEYOLO_CUDA=OFF -DEDGEYOLO_TENSORRT=OFF \
	  -DGTEST_SOURCE=/usr/src/googletest,qemu-aarch64-static -L /usr/aarch64-linux-gnu,edgeyolo_tests)

# The header parser under libFuzzer: apt-get install clang libclang-rt-14-dev. FUZZ_SECONDS=600 for a real run.
FUZZ_SECONDS ?= 20
fuzz:
	@mkdir -p build/fuzz/corpus
	clang++ -std=c++17 -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -Icpp \
	  tests/fuzz/engine_file_fuzz.cpp cpp/engine_file.cpp cpp/json_scan.cpp cpp/sha256.cpp -o build/fuzz/engine_file_fuzz
	build/fuzz/engine_file_fuzz -max_total_time=$(FUZZ_SECONDS) -max_len=4096 -print_final_stats=1 \
	  build/fuzz/corpus tests/fuzz/corpus 2>&1 | tail -n 4; exit $${PIPESTATUS[0]}

# NVIDIA's real lean runtime libraries, for the tests of loading and refusing (44 MB each).
LEAN := tensorrt_lean_libs/libnvinfer_lean.so
lean:
	for version in 10.16.1.11 11.4.0.106; do \
	  major=$${version%%.*}; [ -e build/lean/$$major/$(LEAN).$$major ] && continue; \
	  $(PYTHON) -m pip download --quiet --no-deps -d build/lean/$$major tensorrt-lean-cu13-libs==$$version && \
	  $(PYTHON) -m zipfile -e build/lean/$$major/*.whl build/lean/$$major || exit 1; done

CXX_FILES = $(shell git ls-files '*.cpp' '*.hpp' '*.cu' '*.cuh')

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	$(BIN)/mypy

# The committed stub of the native module must be what the module says.
stubs: $(VENV)/.test
	$(BIN)/python scripts/stubs.py --check

wheel: $(BIN)/python
	rm -rf dist
	$(PIP) wheel --quiet --no-deps -w dist .

clean:
	rm -rf build dist runs $(VENV)
