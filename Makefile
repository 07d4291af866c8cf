# Two commands: `make run` and `make test`. The other targets are their parts, or check more.

# TORCH=2.10.0 selects that release for all targets, in an environment of its own.
VENV    := $(CURDIR)/.venv$(TORCH:%=-%)
# Stamps: the environment has NVRTC, which compiles the kernels; torch and all that `make run` needs; the packages of an extra target.
NVRTC   := $(VENV)/.nvrtc
READY   := $(VENV)/.ready
LIBRARIES := python/volta_fa/libvolta_fa_core.so python/volta_fa/torch-*
EXTRAS  := test lint docs wheel hub notebook
CARGO_FLAGS := --release --locked --features sim

# Build scripts of cargo, and the tests, find the environment's Python and the NVRTC beside it.
# Without MAKEFLAGS, because cargo would look for the job server of this make, which recipes do not get.
IN_VENV = MAKEFLAGS= VIRTUAL_ENV="$(VENV)" PATH="$(VENV)/bin:$$PATH" VOLTA_FA_CUDA_HOME="$${VOLTA_FA_CUDA_HOME:-$(VENV)/cuda12}"
# The simulator's disassembler, which tools/bootstrap.py found, and where all tests keep its output.
IN_SIMULATOR = VOLTA_SIM_NVDISASM="$(VENV)/nvdisasm" VOLTA_SIM_LISTINGS="$(CURDIR)/target/volta-sim-listings"

# Prints a line every ten seconds of a silent command in a pipe or a log, and lines of the build script that compiles kernels.
PATIENTLY = python tools/heartbeat.py

# Waiting threads sleep instead of spinning. On a busy machine, or in a container with a CPU quota,
# spinning makes small models many times slower.
export OMP_WAIT_POLICY ?= PASSIVE

# One goal may use two jobs: cargo compiles while pip downloads torch. Two goals follow each other.
ifeq ($(words $(MAKECMDGOALS)),1)
MAKEFLAGS += -j2
endif

.DEFAULT_GOAL := help
.PHONY: help run test test-all build core lint format docs wheel matrix hub notebook release clean

help: ## list the targets
	@echo "volta_fa: exact attention for NVIDIA Volta and Turing GPUs, as PyTorch operators"
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  ARGS=...    for the demo or pytest: make run ARGS=--quick, make test ARGS='-k demo'"
	@echo "  PYTHON=...  the Python 3.10 to 3.14 for a new .venv"
	@echo "  TORCH=...   another torch release, in an environment of its own: make test TORCH=2.10.0"

# Without a GPU, the first `make run` compiles the demo's kernels alone. Every other build compiles all.
DEMO_KERNELS = fwd_64x64,volta_bwd_64,turing_bwd_64,bwd_varlen_preprocess,bwd_varlen_postprocess
ifeq ($(filter-out run,$(MAKECMDGOALS))$(wildcard /dev/nvidia0 target/volta-fa-kernels/complete),)
run: ONLY = VOLTA_FA_COMPILE_ONLY=$(DEMO_KERNELS)
endif
run: build ## build, train a small GPT with volta_fa and with PyTorch, run the kernels on a simulated V100 and T4
	@$(IN_VENV) $(IN_SIMULATOR) python -m volta_fa demo $(ARGS)

test: SELECTION = -m "not slow"
test test-all: build $(VENV)/.test
	@$(IN_VENV) $(IN_SIMULATOR) $(PATIENTLY) cargo test $(CARGO_FLAGS) --workspace
	@$(IN_VENV) $(IN_SIMULATOR) $(PATIENTLY) python -m pytest -n auto --dist worksteal $(SELECTION) $(ARGS)

test: ## build, then run the tests of minutes: cargo test and pytest
test-all: ## build, then run every test, as CI does

build: core $(READY) ## make .venv, build the native libraries for its torch
	@$(IN_VENV) python tools/check_build_env.py
	@$(IN_VENV) $(PATIENTLY) python tools/build_shims.py

# The library with kernels and Rust, which needs no torch.
core: $(NVRTC)
	@$(IN_VENV) $(ONLY) $(PATIENTLY) cargo build $(CARGO_FLAGS)

# The C++ and CUDA sources that clang-format checks.
CXX_SOURCES = $(shell find csrc torch_ops examples/cpp -name '*.cuh' -o -name '*.cu' -o -name '*.h' -o -name '*.cpp')

lint: $(VENV)/.lint ## check formatting, lints, types and spelling, in all languages
	@# Runs all checks, also after a failure. Clippy shares compiled dependencies and kernels with the build's profile.
	@export $(IN_VENV); failed=; \
	check() { $(PATIENTLY) "$$@" || failed="$$failed$${failed:+,} $$1 $$2"; }; \
	check cargo fmt --all --check; \
	check clang-format --dry-run --Werror $(CXX_SOURCES); \
	check ruff format --check --quiet .; \
	check ruff check --quiet .; \
	check typos; \
	check mypy; \
	check cargo clippy --release --locked --workspace --all-targets --all-features -- -D warnings; \
	test -z "$$failed" || { echo "volta_fa: not clean:$$failed (\`make format\` repairs what can be repaired)" >&2; exit 1; }

format: $(VENV)/.lint ## format all files for `make lint`
	@$(IN_VENV) cargo fmt --all
	@$(IN_VENV) clang-format -i $(CXX_SOURCES)
	@$(IN_VENV) ruff check --quiet --fix . || true
	@$(IN_VENV) ruff format --quiet .

docs: $(VENV)/.docs ## build the documentation into target/site, the Rust side into target/doc
	@NO_MKDOCS_2_WARNING=1 $(IN_VENV) $(PATIENTLY) mkdocs build --strict
	@# private items too, because public ones link to them
	@RUSTDOCFLAGS="-D warnings -A rustdoc::private-intra-doc-links" \
	    $(IN_VENV) $(PATIENTLY) cargo doc --release --locked --workspace --no-deps --document-private-items

define BUILD_WHEEL
	@VOLTA_FA_PORTABLE=1 VOLTA_FA_TORCH_RELEASES=$${VOLTA_FA_TORCH_RELEASES:-all} \
	    $(IN_VENV) $(PATIENTLY) python -m pip wheel --no-build-isolation --no-deps --wheel-dir dist .
	@$(IN_VENV) python tools/check_wheel.py dist/volta_fa-*-manylinux_*.whl
endef

wheel: $(VENV)/.wheel ## build the release wheel for all supported torch releases into dist/
	$(BUILD_WHEEL)

# Builds a wheel for RELEASES (default: all), unless WHEEL names one.
MATRIX := target/torch-matrix
matrix: $(VENV)/.wheel ## check the wheel with each torch release (or RELEASES="2.10.0 2.15.0")
	@rm -rf $(MATRIX)/wheel
	@test -n "$(WHEEL)" || { \
	    releases=$(if $(RELEASES),$$($(VENV)/bin/python tools/torch_releases.py target/torch $(RELEASES)),all) && \
	    VOLTA_FA_PORTABLE=1 VOLTA_FA_TORCH_RELEASES=$$(echo $$releases | tr ' ' ,) \
	        $(IN_VENV) $(PATIENTLY) python -m pip wheel --no-build-isolation --no-deps --wheel-dir $(MATRIX)/wheel .; }
	@$(IN_VENV) $(IN_SIMULATOR) $(PATIENTLY) python tools/torch_matrix.py $(or $(WHEEL),$(MATRIX)/wheel/*.whl) $(if $(RELEASES),--releases $(RELEASES)) $(ARGS)

# Lays out a new wheel for all releases, unless WHEEL names one.
hub: $(VENV)/.hub $(if $(WHEEL),,wheel) ## build the folder of a Hugging Face kernel into dist/hub
	@$(IN_VENV) python tools/hub.py $(or $(WHEEL),dist/volta_fa-*-py3-none-manylinux*.whl) --output dist/hub
	@$(IN_VENV) python -c "import pathlib, kernels; print('kernels loads', kernels.get_local_kernel(pathlib.Path('dist/hub')).__file__)"

notebook: build $(VENV)/.notebook ## run examples/first_light.ipynb with nothing, with a wheel, and with sources, into target/notebook
	@$(IN_VENV) $(PATIENTLY) python tools/notebook.py target/notebook

# Writes the addresses first, because the wheel has them too.
release: $(VENV)/.wheel ## build the files of a release into dist/release/ (URL=, SOURCE=, ISSUES=: addresses for pages and wheel)
	@$(IN_VENV) python tools/addresses.py $(URL:%=--release %) $(SOURCE:%=--source %) $(ISSUES:%=--issues %)
	$(BUILD_WHEEL)
	@$(IN_VENV) python -c "from setuptools import build_meta; build_meta.build_sdist('dist')"
	@$(IN_VENV) python tools/release.py dist/volta_fa-*-py3-none-manylinux*.whl dist/volta_fa-*.tar.gz

clean: ## remove all build results (but not .venv)
	@rm -rf target build dist demo-output $(LIBRARIES) python/volta_fa.egg-info

# Makes the environment with the compiler of the kernels, or updates it. The Python that makes it may have a torch to be used.
$(NVRTC): tools/bootstrap.py tools/find_python.sh tools/requirements.txt
	@found=$$(sh tools/find_python.sh "$(VENV)") && \
	    "$$found" tools/check_build_env.py --toolchain-only && \
	    "$$found" tools/bootstrap.py "$(VENV)" nvrtc $(TORCH:%=torch==%)
	@touch $@

# Installs torch and what `make run` needs.
$(READY): $(NVRTC)
	@$(VENV)/bin/python tools/bootstrap.py "$(VENV)" torch $(TORCH:%=torch==%)
	@touch $@

# Installs what these targets need in addition, at their first use. mypy reads transformers.
$(VENV)/.lint: $(VENV)/.test
# one pip at a time
$(VENV)/.hub: $(VENV)/.wheel
$(EXTRAS:%=$(VENV)/.%): $(VENV)/.%: $(READY)
	@$(VENV)/bin/python tools/bootstrap.py "$(VENV)" $*
	@touch $@
