# make demo   installs into .venv and detects signs on the photographs that ship with the package
# make test   installs into .venv and runs every test
# Both make .venv when it is missing. The other targets are what CI runs beside them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
JOBS ?= $(shell nproc)
CMAKE_BUILD_TYPE ?= RelWithDebInfo

.PHONY: demo test test-cpp asan tsan neon lint stubs wheel clean

demo: $(VENV)/.demo
	$(BIN)/edgeyolo demo --save runs/demo

test: $(VENV)/.test test-cpp
	YOLO_OFFLINE=1 YOLO_CONFIG_DIR=$(abspath $(VENV)) $(BIN)/python -m pytest

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip

# What the installed package is made of: a change installs it again.
SOURCES := pyproject.toml CMakeLists.txt $(shell find cpp cmake python assets examples/signs -type f -not -name '*.pyc')

$(VENV)/.demo: $(BIN)/python $(SOURCES) constraints.txt
	$(PIP) install --quiet -c constraints.txt '.[cpu]'
	touch $@

$(VENV)/.test: $(BIN)/python $(SOURCES) constraints.txt
	$(PIP) install --quiet -c constraints.txt '.[cpu,tools,dev]'
	touch $@ $(VENV)/.demo

# The C++ tests need GoogleTest (Debian, Ubuntu and JetPack: apt-get install libgtest-dev); without it they are skipped,
# and say so. CI has it.
CPP_FLAGS := -DEDGEYOLO_PYTHON=OFF -DEDGEYOLO_TESTS=ON -DEDGEYOLO_WERROR=ON
HAVE_GTEST := $(wildcard /usr/include/gtest/gtest.h /usr/local/include/gtest/gtest.h)

define cpp_tests # folder, cmake options, environment
	cmake -S . -B $(1) $(CPP_FLAGS) $(2) >$(1).log 2>&1 || { cat $(1).log; exit 1; }
	cmake --build $(1) -j $(JOBS)
	$(3) $(1)/tests/cpp/edgeyolo_tests --gtest_brief=1
endef

test-cpp:
ifeq ($(HAVE_GTEST),)
	@echo "SKIPPED: the C++ tests need GoogleTest: apt-get install libgtest-dev"
else
	@mkdir -p build
	$(call cpp_tests,build/cpp,-DCMAKE_BUILD_TYPE=$(CMAKE_BUILD_TYPE),)
endif

asan:
	@mkdir -p build
	$(call cpp_tests,build/asan,-DCMAKE_BUILD_TYPE=RelWithDebInfo -DEDGEYOLO_SANITIZE=address$(comma)undefined,\
	  UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1)

tsan:
	@mkdir -p build
	$(call cpp_tests,build/tsan,-DCMAKE_BUILD_TYPE=RelWithDebInfo -DEDGEYOLO_SANITIZE=thread,TSAN_OPTIONS=halt_on_error=1)

comma := ,

# The NEON code, compiled for AArch64 and run under QEMU.
# apt-get install g++-aarch64-linux-gnu qemu-user-static libgtest-dev
neon:
	@mkdir -p build
	$(call cpp_tests,build/neon,-DCMAKE_BUILD_TYPE=Release -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DEDGEYOLO_CUDA=OFF -DGTEST_SOURCE=/usr/src/googletest,\
	  qemu-aarch64-static -L /usr/aarch64-linux-gnu)

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
