# Everything is installed into .venv, made on first use. Later runs compile only what changed.
PYTHON3 ?= python3
VENV ?= .venv
PYTHON ?= $(VENV)/bin/python
OUT ?= out/replay
# What pip is asked for as torch. TORCH=torch keeps the torch of a VENV that has one, and
# TORCH="torch --index-url URL" takes another build of it, such as the one for CPUs.
TORCH ?= torch==2.13.0
# Kernels are compiled for the GPU that is here. GVR_TOPK_ARCHS=none or all or another choice of
# packaging/gvr_topk_archs.py changes that. One compiler for each core runs, as far as memory goes.
JOBS = $$($(PYTHON) packaging/gvr_topk_archs.py --jobs)

.PHONY: help replay test test-cpp test-gpu test-gpu-plain test-gpu-chaos neighbours chaos lint \
  format docs install build wheel clean

# The text behind `##` is what this prints of a target.
help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*  ## /\1 - /p' Makefile | \
	  while IFS= read -r line; do printf '%-23s %s\n' "make $${line%% - *}" "$${line#* - }"; done

# torch first and alone: the build needs it, and an unpinned torch would be the newest there is.
$(VENV)/.tools: pyproject.toml
	test -x $(VENV)/bin/python || $(PYTHON3) -m venv $(VENV)
	@echo "installing $(TORCH); TORCH= names another build, such as the one for CPUs"
	$(VENV)/bin/pip install --quiet $(TORCH)
	$(VENV)/bin/pip install --quiet "scikit-build-core>=1.0" "cmake>=4.0.3" ninja
	touch $@

PIP = packaging/show_build $(VENV)/bin/pip
BUILD_HERE = --verbose --no-build-isolation
# Tests read the source lines of kernels that are compiled here. A wheel does without.
install replay: export CMAKE_ARGS ?= -DGVR_TOPK_LINE_INFO=ON

# Editable: the checkout is what runs, from any folder, with the libraries in gvr_topk/lib.
install: $(VENV)/.tools  ## install the checkout and all it is tested with into .venv
	$(PIP) install $(BUILD_HERE) --editable ".[test]"

replay: $(VENV)/.tools  ## replay the shipped decode trace with the heuristic on, every step checked
	$(PIP) install $(BUILD_HERE) --editable ".[eval]"
	$(VENV)/bin/gvr-topk replay --shipped --config configs/heuristic_on.yaml --out $(OUT)

CPP_FILES = git ls-files 'cpp/*.h' 'cpp/*.cuh' 'cpp/*.cu' 'cpp/*.cpp' 'tests/cpp/*.h' 'tests/cpp/*.cpp'
lint: install  ## judge format, types, spelling and scripts
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(CPP_FILES) | xargs $(VENV)/bin/clang-format --dry-run -Werror
	git ls-files | xargs $(VENV)/bin/codespell
	$(VENV)/bin/shellcheck .ci/run .ci/matrix .ci/nvcc .ci/torch .ci/wheel packaging/show_build

format: install  ## repair the format
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(CPP_FILES) | xargs $(VENV)/bin/clang-format -i

test: install test-cpp  ## everything that needs no GPU
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2 --dist loadfile tests/cpu

test-cpp: $(VENV)/.tools  ## plans and the key map, on the host
	$(VENV)/bin/cmake -S tests/cpp -B build/cpp
	$(VENV)/bin/cmake --build build/cpp
	$(VENV)/bin/ctest --test-dir build/cpp --output-on-failure

# In an environment of its own, which needs no torch. Warnings are errors.
DOCS_VENV = build/docs/venv
$(DOCS_VENV)/.tools: pyproject.toml
	test -x $(DOCS_VENV)/bin/python || $(PYTHON3) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/pip install --quiet $$(sed -n '/^docs = \[/,/^]/s/^  \(".*"\),$$/\1/p' pyproject.toml | tr -d '"')
	touch $@

docs: $(DOCS_VENV)/.tools  ## build the documentation into build/docs/site, which opens from the disk
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict --quiet --site-dir build/docs/site
	@echo "open build/docs/site/index.html"

# Without it, tests that find no GPU are skipped, and a run of skipped tests passes.
REQUIRE_GPU = GVR_TOPK_REQUIRE_GPU=1
# Needs no .venv: `make build test-gpu PYTHON=python3` uses the torch that is there.
test-gpu: test-gpu-plain test-gpu-chaos  ## every GPU test, on the library as it ships and on the chaos build

test-gpu-plain: neighbours  ## every GPU test, and some under compute-sanitizer
	$(REQUIRE_GPU) $(PYTHON) -m pytest tests/gpu
	@if command -v compute-sanitizer > /dev/null; then \
	  for tool in memcheck racecheck synccheck; do \
	    $(REQUIRE_GPU) compute-sanitizer --tool $$tool --error-exitcode 1 $(PYTHON) -m pytest tests/gpu -m sanitizer || exit 1; \
	  done; \
	else echo "compute-sanitizer: not found, its runs are left out"; fi

# The same tests on a library that delays threads around barriers, copies and remote accesses.
CHAOS = build/chaos
test-gpu-chaos: chaos  ## every GPU test on a build that delays threads
	$(REQUIRE_GPU) GVR_TOPK_LIBRARY_DIR=$(CHAOS)/install/gvr_topk/lib $(PYTHON) -m pytest tests/gpu

# Never beside the libraries of the package.
chaos:  ## compile the library that delays threads, into build/chaos
	cmake -S cpp -B $(CHAOS) -G Ninja -DPython_EXECUTABLE="$$(command -v $(PYTHON))" \
	  -DGVR_TOPK_CHAOS=ON -DGVR_TOPK_STRESS=ON
	cmake --build $(CHAOS) --parallel $(JOBS)
	cmake --install $(CHAOS) --prefix $(CHAOS)/install

# What stress tests run beside the op, installed beside the libraries of the checkout.
neighbours:  ## compile what stress tests run beside the op
	cmake -S cpp -B build/neighbours -G Ninja -DPython_EXECUTABLE="$$(command -v $(PYTHON))" -DGVR_TOPK_STRESS=ON
	cmake --build build/neighbours --target gvr_topk_neighbours --parallel $(JOBS)
	cmake --install build/neighbours --component gvr_topk_stress --prefix .

# The libraries alone, beside the sources; the test of the wheel and everything else use `install`.
build:  ## compile the libraries alone, for a machine that has torch and no network
	cmake -S cpp -B build/plain -G Ninja -DPython_EXECUTABLE="$$(command -v $(PYTHON))"
	cmake --build build/plain --parallel $(JOBS)
	cmake --install build/plain --prefix .

# pip refuses to install two wheels of one name at once, so dist holds the new one alone.
wheel: export GVR_TOPK_ARCHS ?= all
wheel: $(VENV)/.tools  ## build the wheel, for every GPU, into dist
	rm -f dist/gvr_topk-*.whl
	$(PIP) wheel $(BUILD_HERE) --no-deps --wheel-dir dist .
	@ls dist/gvr_topk-*.whl

# Not out, which holds results, and not gvr_topk/lib, without which the editable package does not work.
clean:  ## remove what was built, but not results in out, nor the libraries that are installed
	rm -rf build dist
