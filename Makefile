# The commands for people and for continuous integration. Each target first installs its dependencies in .venv, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
RUN := runs/demo
# The number of processes that run the tests in parallel. Their networks are small, so each uses one thread.
JOBS ?= 2
# The number of random calls of make sanitize, the seconds of make fuzz, and the seed of both.
ROUNDS ?= 300
SECONDS ?= 60
SEED ?= 1
CMAKE = $(BIN)/cmake -S . -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja

.PHONY: help setup demo test check house docs pages fuzz attack faults device sanitize emulate ulps rates format bench clean

help:
	@echo "make demo    train on the bundled recordings, evaluate, predict"
	@echo "make test    run the tests"
	@echo "make check   format, lint, types, layers, and the limits of make house"
	@echo "make house   figures of the source, against the limits in house.toml"
	@echo "make docs    build the documentation as a site in build/site; a warning is an error"
	@echo "make pages   check the site in Chromium, in two widths: axe, errors, requests to other hosts"
	@echo "make fuzz    random networks, tensors, files, commands and kills for SECONDS=60 from SEED=1"
	@echo "make attack  the same for an hour, from a random seed"
	@echo "make faults  check that tests notice mistakes in the source; KERNELS=1 also builds those in C++"
	@echo "make sanitize  the CPU kernels under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer"
	@echo "make emulate   the CPU kernels for AMX and AVX512-BF16, on any processor with AVX-512"
	@echo "make ulps    the kernels' exp, tanh, log etc. for every float, on every instruction set of this machine"
	@echo "make rates   the speed of the micro-kernels: share of the peak, by shape and instruction set"
	@echo "make format  format all files"
	@echo "make bench   time the layers against PyTorch's, and those of other installed engines"
	@echo "make device  measure a GPU or many processors, in 9 minutes; installs nothing"
	@echo "make clean   remove everything that the targets above made"

setup: $(READY)

# The installation builds the CPU kernels, so it depends on their sources too.
$(READY): pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*/*.h csrc/*/*.cpp)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Raglane needs Python 3.11 or newer; $(PYTHON) is older. Run: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable '.[data,text,cli,train,logs,tune,demo,plot,report,sklearn,serve,dev,docs]'
	@touch $(READY)

demo: $(READY)
	$(BIN)/raglane train --out $(RUN) --overwrite --threads 1
	$(BIN)/raglane evaluate $(RUN)
	$(BIN)/raglane predict $(RUN) --output $(RUN)/predictions.csv --probabilities
	@head -n 4 $(RUN)/predictions.csv | cut -d, -f1-3

# Keep compiled modules: otherwise each process of the tests compiles them again.
test: $(READY)
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal --quiet

check: $(READY) house
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

house: $(READY)
	$(BIN)/python tools/house.py

docs: $(READY)
	rm -rf build/site build/site-doctrees
	$(BIN)/python -m sphinx --builder html --nitpicky --fail-on-warning --keep-going --quiet -d build/site-doctrees docs build/site
	@echo "open build/site/index.html"

pages: docs
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --quiet --pages tests/pages

fuzz: $(READY)
	cd tools && OMP_NUM_THREADS=2 $(CURDIR)/$(BIN)/python -m fuzz --seconds $(SECONDS) --seed $(SEED)

attack: $(READY)
	cd tools && OMP_NUM_THREADS=2 $(CURDIR)/$(BIN)/python -m fuzz --seconds 3600

# NAMES are faults, patterns or rooms; default: all, with KERNELS=1 also those of csrc, of which each is built.
faults: $(READY)
	$(if $(KERNELS),$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt cmake ninja)
	cd tools && $(CURDIR)/$(BIN)/python -m faults $(if $(KERNELS),--kernels) $(NAMES)

# A driver makes random calls under each sanitizer, on every instruction set of this machine and the emulated ones.
# AddressSanitizer also checks two fuzzers; there it ignores leaks, which are Python's.
SANITIZED := build/sanitize-address,undefined
sanitize: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt cmake ninja
	for kind in address,undefined thread; do \
		$(CMAKE) -B build/sanitize-$$kind -DRAGLANE_EMULATE=ON -DRAGLANE_SANITIZE=$$kind && \
		$(BIN)/cmake --build build/sanitize-$$kind --target drive && \
		build/sanitize-$$kind/drive $(ROUNDS) $(SEED) || exit 1; \
	done
	$(BIN)/cmake --build $(SANITIZED) --target raglane
	$(BIN)/cmake --install $(SANITIZED) --prefix $(SANITIZED)/installed
	cd tools && for name in memory programs; do \
		LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0 OMP_NUM_THREADS=2 \
		$(CURDIR)/$(BIN)/python -m fuzz $$name --rounds $(ROUNDS) --seed $(SEED) \
		--kernels $(CURDIR)/$(SANITIZED)/installed/raglane/native || exit 1; \
	done

emulate: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt cmake ninja
	$(CMAKE) -B build/emulate -DRAGLANE_EMULATE=ON
	$(BIN)/cmake --build build/emulate
	$(BIN)/cmake --install build/emulate --prefix build/emulate/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --quiet \
		--kernels build/emulate/installed/raglane/native tests/kernels

ulps: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt cmake ninja
	$(CMAKE) -B build/ulps
	$(BIN)/cmake --build build/ulps --target ulps
	build/ulps/ulps

rates: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt cmake ninja
	$(CMAKE) -B build/rates
	$(BIN)/cmake --build build/rates --target rates
	build/rates/rates

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)
	$(BIN)/python benchmarks/layers.py --suites grid,elementwise,loop,own-cell --out runs/bench --overwrite

# Needs only a Python with torch, and the checkout.
device:
	$(PYTHON) benchmarks/device.py --out runs/device --minutes 9

clean:
	rm -rf $(VENV) build dist $(RUN) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
