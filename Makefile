# Two commands: `make run` and `make test`. The rest is what they are made of.

VENV    := $(CURDIR)/.venv
READY   := $(VENV)/.ready
LIBRARY := python/volta_fa/libvolta_fa.so
CARGO_FLAGS := --release --locked --features sim

# cargo's build scripts and the tests find torch through the environment's Python. NVRTC comes from .venv/cuda12
# where tools/bootstrap.py had to put it there.
IN_VENV = VIRTUAL_ENV="$(VENV)" PATH="$(VENV)/bin:$$PATH" $(if $(wildcard $(VENV)/cuda12),VOLTA_FA_CUDA_HOME="$${VOLTA_FA_CUDA_HOME:-$(VENV)/cuda12}")
# The disassembler that the simulator reads machine code with comes with torch's triton.
NVDISASM = $$($(VENV)/bin/python -c "import importlib.util as u, pathlib as p; print(p.Path(u.find_spec('triton').origin).parent / 'backends/nvidia/bin/nvdisasm')")

# Threads that wait sleep instead of spinning: on a machine that does anything else besides, or with fewer CPUs
# than it shows, spinning makes small models many times slower.
export OMP_WAIT_POLICY ?= PASSIVE

.DEFAULT_GOAL := help
.PHONY: help run test build wheel clean

help: ## this list
	@echo "volta_fa: exact attention for NVIDIA Volta GPUs, as PyTorch operators"
	@echo
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-6s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  ARGS=...    for the demo or pytest: make run ARGS=--quick, make test ARGS='-k demo'"
	@echo "  PYTHON=...  the Python 3.10 to 3.13 that .venv is made with"

run: build ## build, then train a small GPT with volta_fa and with PyTorch and compare
	@$(IN_VENV) python -m volta_fa demo $(ARGS)

test: build ## build, then run every test: cargo test and pytest
	@$(IN_VENV) VOLTA_SIM_NVDISASM="$(NVDISASM)" cargo test $(CARGO_FLAGS) --workspace
	@$(IN_VENV) VOLTA_SIM_NVDISASM="$(NVDISASM)" python -m pytest -n auto --dist worksteal $(ARGS)

build: $(READY) ## make .venv, build the native library with the simulator in it
	@$(IN_VENV) python tools/check_build_env.py
	@$(IN_VENV) cargo build $(CARGO_FLAGS)
	@# replaced as a whole and only if it changed: a Python that runs has the old file mapped
	@cmp -s target/release/libvolta_fa.so $(LIBRARY) || \
	    { cp target/release/libvolta_fa.so $(LIBRARY).new && mv $(LIBRARY).new $(LIBRARY); }

wheel: $(READY) ## build the wheel to ship (without the simulator) into dist/
	@$(IN_VENV) python -m pip wheel --no-build-isolation --no-deps --wheel-dir dist .

clean: ## remove everything built (.venv stays: delete it by hand)
	@rm -rf target build dist demo-output $(LIBRARY) python/volta_fa.egg-info

# The environment, again whenever its requirements change.
$(READY): tools/bootstrap.py tools/find_python.sh $(wildcard tools/requirements/*.txt)
	@found=$$(sh tools/find_python.sh "$(VENV)") && \
	    "$$found" tools/check_build_env.py --toolchain-only && \
	    "$$found" tools/bootstrap.py "$(VENV)"
	@touch $@
