# Everything is installed into .venv, made on first use. Later runs compile only what changed.
#   make replay    replay the shipped decode trace with the heuristic on, every step checked
#   make test      everything that needs no GPU
#   make test-gpu  everything that needs one; compiles a second library, which delays threads
PYTHON3 ?= python3
VENV ?= .venv
PYTHON ?= $(VENV)/bin/python
OUT ?= out/replay
# nvcc takes up to 3 GB per job, so not one job per core without being asked.
export CMAKE_BUILD_PARALLEL_LEVEL ?= 2

.PHONY: help replay test test-gpu test-gpu-plain test-gpu-chaos neighbours chaos lint format install build \
  wheel clean

help:
	@sed -n '2,4s/^#   //p' Makefile

# torch first, alone and by its exact version: the build needs it, and an unpinned torch would be
# the newest there is.
$(VENV)/.tools: pyproject.toml
	$(PYTHON3) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet torch==2.13.0
	$(VENV)/bin/pip install --quiet "scikit-build-core>=1.0" "cmake>=4.0.3" ninja
	touch $@

# Editable: the checkout is what runs, from any folder, with the libraries in gvr_topk/lib.
install: $(VENV)/.tools
	$(VENV)/bin/pip install --quiet --no-build-isolation --editable ".[test]"

replay: install
	$(VENV)/bin/gvr-topk replay --shipped --config configs/heuristic_on.yaml --out $(OUT)

lint: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	git ls-files 'cpp/*.h' 'cpp/*.cuh' 'cpp/*.cu' 'cpp/*.cpp' | xargs $(VENV)/bin/clang-format --dry-run -Werror

format: install
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	git ls-files 'cpp/*.h' 'cpp/*.cuh' 'cpp/*.cu' 'cpp/*.cpp' | xargs $(VENV)/bin/clang-format -i

test: install
	$(VENV)/bin/python -m pytest tests/cpu

# Needs no .venv: `make build test-gpu PYTHON=python3` uses the torch that is there.
test-gpu: test-gpu-plain test-gpu-chaos

test-gpu-plain: neighbours
	$(PYTHON) -m pytest tests/gpu
	@if command -v compute-sanitizer > /dev/null; then \
	  for tool in memcheck racecheck synccheck; do \
	    compute-sanitizer --tool $$tool --error-exitcode 1 $(PYTHON) -m pytest tests/gpu -m sanitizer || exit 1; \
	  done; \
	else echo "compute-sanitizer: not found, its runs are left out"; fi

# The same tests on a library that delays threads around barriers, copies and remote accesses.
CHAOS = build/chaos
test-gpu-chaos: chaos
	GVR_TOPK_LIBRARY_DIR=$(CHAOS)/install/gvr_topk/lib $(PYTHON) -m pytest tests/gpu

# Both for the architecture they are run on alone; and the first never beside the libraries of the package.
TEST_ARCHS ?= 90a-real
chaos:
	cmake -S cpp -B $(CHAOS) -G Ninja -DPython_EXECUTABLE="$$(command -v $(PYTHON))" \
	  -DGVR_TOPK_CHAOS=ON -DGVR_TOPK_STRESS=ON -DGVR_TOPK_ARCHS=$(TEST_ARCHS)
	cmake --build $(CHAOS)
	cmake --install $(CHAOS) --prefix $(CHAOS)/install

# What stress tests run beside the op, installed beside the libraries of the checkout.
neighbours:
	cmake -S cpp -B build/neighbours -G Ninja -DPython_EXECUTABLE="$$(command -v $(PYTHON))" \
	  -DGVR_TOPK_STRESS=ON -DGVR_TOPK_ARCHS=$(TEST_ARCHS)
	cmake --build build/neighbours --target gvr_topk_neighbours
	cmake --install build/neighbours --component gvr_topk_stress --prefix .

# The libraries alone, beside the sources; the test of the wheel and everything else use `install`.
build:
	cmake -S cpp -B build/plain -G Ninja -DPython_EXECUTABLE="$$(command -v $(PYTHON))"
	cmake --build build/plain
	cmake --install build/plain --prefix .

wheel: $(VENV)/.tools
	$(VENV)/bin/pip wheel --no-build-isolation --no-deps --wheel-dir dist .

clean:
	rm -rf build dist out gvr_topk/lib
