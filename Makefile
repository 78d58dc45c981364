# The commands of README.md; `.ci/run` runs `make test` and `make test-lab`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BUILT := $(VENV)/.built
CHECKED := $(VENV)/.checked
LABORATORY := $(VENV)/.laboratory
PAGE := page/dist/.built
RUST_SOURCES := $(shell find crates -name '*.rs' -o -name '*.toml' -o -name '*.proto') Cargo.toml Cargo.lock
PYTHON_SOURCES := $(shell find python -name '*.py' -o -name '*.pyi') pyproject.toml

.PHONY: again help build checked wheel demo test test-lab test-arm test-page lint compile-rust compile-fuzz test-rust test-python test-torch test-horovod test-frameworks test-long fuzz bench bench-papers bench-atp bench-switchml reproduction reproduction-byteps docs docs-tools clean tools test-tools
.DELETE_ON_ERROR:

help:
	@echo 'make build   a working $(BIN)/fanin (. $(BIN)/activate puts it, and torchrun, on the PATH)'
	@echo 'make checked the same for tests: with assertions, compiled sooner, and slower'
	@echo 'make wheel   what pip installs, into target/wheels: fanin for every Python from 3.11 on, and fanin-lab'
	@echo 'make demo    train a small GPT with 4 workers, a switch summing their gradients, beside Gloo (2 minutes)'
	@echo 'make test    the product: what a contributor runs (half an hour on two cores)'
	@echo 'make test-lab    the laboratory, the papers, what pip installs, and 25,000 hostile networks in the simulator; CI runs both'
	@echo 'make test-arm    the kernels for ARM, in an emulator (a part of test-lab; skipped where that is not installed)'
	@echo 'make test-long   200,000 hostile networks in the simulator; fifty ranks killed at random moments, and started again (half an hour)'
	@echo 'make test-torch  PyTorch'"'"'s own distributed tests, on fanin and on Gloo'
	@echo 'make test-frameworks  docs/frameworks.md: unchanged programs of frameworks, on fanin and on Gloo (installs them)'
	@echo 'make test-page   the live page by itself (a part of test; skipped where npm is missing)'
	@echo 'make bench   docs/performance.md: fanin beside Gloo, the kernels beside memcpy; as root, else rows are skipped (40 minutes)'
	@echo 'make bench-papers   docs/reproduction-sockets.md: experiments of the ATP and SwitchML papers on real sockets (bench-atp, bench-switchml); needs root (15 minutes)'
	@echo 'make reproduction   docs/reproduction: the figures of the ATP, SwitchML, DLCP and GOAT papers, in the simulator and by training (three hours)'
	@echo 'make reproduction-byteps   docs/reproduction/byteps: the figures of the BytePS paper, some on shaped links; needs root (10 minutes)'
	@echo 'make fuzz    the fuzz targets, briefly'
	@echo 'make docs    the documentation as a site, with the references of Python and Rust, into target/site (installs Sphinx)'
	@echo 'make clean   remove what was built'

# One line for each tool that is missing, with the command that installs it.
tools:
	@ok=1; need() { command -v $$1 >/dev/null 2>&1 || { echo "missing: $$1. Install it with: $$2" >&2; ok=0; }; }; \
	need cargo "sudo apt-get install -y rustup && rustup default stable"; \
	need cc "sudo apt-get install -y gcc"; \
	need $(PYTHON) "sudo apt-get install -y python3"; \
	[ $$ok = 1 ] || exit 1; \
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "missing: Python 3.11 or newer ($(PYTHON) is `$(PYTHON) -V`). Install it with: sudo apt-get install -y python3.11, then: make PYTHON=python3.11" >&2; exit 1; }; \
	$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "missing: Python's venv module. Install it with: sudo apt-get install -y python3-venv" >&2; exit 1; }; \
	cargo --version | awk '{ split($$2, v, "."); exit !(v[1] > 1 || v[2] >= 89) }' || \
	  { echo "missing: Rust 1.89 or newer (`cargo --version`). Install it with: rustup update stable" >&2; exit 1; }

$(STAMP): pyproject.toml | tools
	[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -c 'import tomllib; print("\n".join(tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["dev"]))' > $(VENV)/requirements.txt
	$(BIN)/python -m pip install --quiet --requirement $(VENV)/requirements.txt
	touch $@

# What is in $(VENV) is a release, or a build for tests. Each takes the other's place in seconds, once it is compiled.
$(BUILT): $(STAMP) $(RUST_SOURCES) $(PYTHON_SOURCES) $(PAGE)
	@echo 'compiling, which takes minutes and shows nothing meanwhile'
	VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/maturin develop --release
	rm -f $(CHECKED); touch $@

# As Rust's tests are compiled (Cargo.toml, profile.dev): with assertions, from the same packages, and linked in seconds.
$(CHECKED): $(STAMP) $(RUST_SOURCES) $(PYTHON_SOURCES) $(PAGE)
	VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/maturin develop --features as-tests
	rm -f $(BUILT); touch $@

# The laboratory is a path in the environment.
$(LABORATORY): lab/pyproject.toml | $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable ./lab
	touch $@

# The page that switches serve. Where Node.js is missing, or too old, there is one that says so in its place.
PAGE_SOURCES := $(shell find page/src -type f) $(addprefix page/,index.html package.json package-lock.json tsconfig.json vite.config.ts)
# Where it was not built, it is tried again as soon as there is an npm.
$(PAGE): $(PAGE_SOURCES) $(if $(wildcard page/dist/page.js),,$(if $(shell command -v npm),again))
	@mkdir -p page/dist; cd page && if ! command -v npm >/dev/null; then rm -f dist/page.js dist/report.html; \
	  echo "missing: npm. fanin is built without its page; sudo apt-get install -y npm, then make build" >&2; \
	elif ! { npm ci --silent --no-fund --no-audit && npm run --silent build; }; then \
	  rm -f dist/page.js dist/report.html; echo "the page does not build (above; it needs Node.js 20.19 or newer): fanin is built without it" >&2; fi
	@touch $@

build: $(BUILT) $(LABORATORY)

checked: $(CHECKED) $(LABORATORY)

# What `pip install` takes: for every Python from 3.11 on, and for glibc from this machine's symbols on, which maturin checks. The
# laboratory is a wheel of its own.
WHEELS := target/wheels
wheel: $(STAMP) $(PAGE)
	rm -rf $(WHEELS)
	@echo 'compiling, which takes minutes and shows nothing meanwhile'
	VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/maturin build --release --strip --out $(WHEELS)
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir $(WHEELS) ./lab
	@ls -l $(WHEELS)

demo: build
	$(BIN)/python examples/compare.py

test: test-tools $(PAGE)
	# Side by side: pip is one core's work, for minutes, and Cargo takes turns.
	$(MAKE) --no-print-directory -j 2 checked compile-rust
	# What reads Python's files is one core's work, too.
	$(MAKE) --no-print-directory -j 2 lint test-rust
	$(MAKE) --no-print-directory test-page
	# By themselves: they have limits, which they would come near to beside Rust's.
	$(MAKE) --no-print-directory test-python
	# By itself, as it runs for a time and not to an end.
	$(MAKE) --no-print-directory fuzz

compile-rust: compile-fuzz $(PAGE)
	cargo clippy --workspace --all-targets --quiet -- -D warnings
	cargo test --workspace --no-run --quiet
	cargo test --workspace --no-run --quiet --bench '*'

lint: test-tools $(STAMP)
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --quiet -- -D warnings
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# The page alone, without a service: what it computes and draws.
test-page: $(PAGE)
	@if command -v npm >/dev/null; then cd page && npm run --silent check && npm test --silent; else echo "skipped: npm is missing" >&2; fi

# What tests need beyond a build.
test-tools: tools
	@cargo fmt --version >/dev/null 2>&1 && cargo clippy --version >/dev/null 2>&1 || \
	  { echo "missing: rustfmt or clippy. Install them with: rustup component add rustfmt clippy" >&2; exit 1; }
	@command -v c++ >/dev/null || { echo "missing: c++. Install it with: sudo apt-get install -y g++" >&2; exit 1; }

# Many of these tests wait: six at a time keep two cores busy.
test-rust: export RUST_TEST_THREADS ?= $(shell n=$$(nproc); [ $$n -gt 6 ] && echo $$n || echo 6)
test-rust: test-tools
	# Doc tests' compiler would look for the make that runs lint beside this.
	MAKEFLAGS= cargo test --workspace --quiet
	# Each benchmark once. Of the whole workspace, as the tests are, so that nothing is built with other features again.
	cargo test --workspace --quiet --bench '*'

# A file is one worker's, as its tests may share what is slow to make. Most tests wait: four workers keep two cores busy. The order is conftest.py's, not
# xdist's.
PYTEST := $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder
test-python: checked
	$(PYTEST) tests/python

# With a release, as figures and long simulations need one. Five times as many hostile networks as in `make test`: of the whole
# workspace, so that nothing is built with other features again.
test-lab: build
	# Two at a time: these tests compute, and have limits of minutes.
	$(PYTEST) -n 2 tests/lab
	cargo test --workspace --quiet --test hostile -- --ignored of_a_campaign
	$(MAKE) --no-print-directory test-arm

# All tests of the kernels, compiled for ARM and run by qemu-user.
ARM := aarch64-unknown-linux-gnu
ARM_TOOLS := qemu-user gcc-aarch64-linux-gnu libc6-dev-arm64-cross
ARM_LIBRARIES := /usr/aarch64-linux-gnu
test-arm: tools
	@skip() { echo "skipped: the kernels for ARM. Missing: $$1. Install it with: $$2"; }; \
	if ! command -v qemu-aarch64 >/dev/null || ! command -v aarch64-linux-gnu-gcc >/dev/null || ! [ -e $(ARM_LIBRARIES)/lib/libc.so ]; then \
	  skip "an emulator, a linker or a C library" "sudo apt-get install -y $(ARM_TOOLS)"; \
	elif ! ls `rustc --print target-libdir --target $(ARM)`/libstd-*.rlib >/dev/null 2>&1; then \
	  skip "Rust's standard library for $(ARM)" "rustup target add $(ARM)"; \
	else \
	  CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
	  CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L $(ARM_LIBRARIES)" \
	  cargo test --quiet --package fanin-quant --target $(ARM); \
	fi

# Hostile networks in the simulator, eight times as many as in `make test-lab`; and ranks killed at random moments, under torchrun. A quarter of an hour, and ten minutes. A
# seed of the latter alone: LONG="-k 'moments and 3'".
LONG ?=
test-long: build
	cargo test --workspace --test hostile -- --ignored --nocapture long_campaign
	$(BIN)/python -m pytest -m long -s -o faulthandler_timeout=3600 $(LONG)

# PyTorch's own tests beside Gloo: all of them with 2 ranks, those of groups also with more. A quarter of an hour.
TORCH_GROUPS := --only *group* --only *gather_object* --only *hierarchical* --only *monitored*
test-torch: build
	@mkdir -p target/torch_suite; set -ef; \
	for size in 2 4 8; do \
	  only=; [ $$size = 2 ] || only="$(TORCH_GROUPS)"; \
	  for backend in fanin gloo; do \
	    $(BIN)/python tests/torch_suite/run.py --backend $$backend --world-size $$size $$only \
	      --json target/torch_suite/$$backend-$$size.json; \
	  done; \
	done; \
	status=0; for size in 2 4 8; do \
	  $(BIN)/python tests/torch_suite/compare.py target/torch_suite/fanin-$$size.json \
	    target/torch_suite/gloo-$$size.json || status=1; \
	done; exit $$status

# Horovod's own tests for PyTorch and TensorFlow, from a copy of it: make test-horovod HOROVOD=folder.
test-horovod: build
	@[ -f "$(HOROVOD)/test/parallel/test_torch.py" ] || { echo "git clone https://github.com/horovod/horovod; make test-horovod HOROVOD=horovod"; exit 2; }
	for suite in torch tensorflow tensorflow_process_sets tensorflow2_keras; do for size in 2 4; do \
	  $(BIN)/python tests/horovod_suite/run.py --horovod $(HOROVOD) --suite $$suite --world-size $$size || exit 1; done; done

# Programs of frameworks beside Gloo, in an environment of their own: what they bring is large.
FRAMEWORKS := .venv-frameworks
FRAMEWORKS_STAMP := $(FRAMEWORKS)/.installed
$(FRAMEWORKS_STAMP): pyproject.toml | tools
	[ -x $(FRAMEWORKS)/bin/python ] || $(PYTHON) -m venv $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/python -c 'import tomllib; extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
	  [open("$(FRAMEWORKS)/" + name + ".txt", "w").write("\n".join(extras[name])) for name in ("dev", "frameworks")]'
	$(FRAMEWORKS)/bin/python -m pip install --quiet --requirement $(FRAMEWORKS)/dev.txt setuptools wheel
	# DeepSpeed's build looks for torch.
	$(FRAMEWORKS)/bin/python -m pip install --quiet --no-build-isolation --requirement $(FRAMEWORKS)/frameworks.txt \
	  --constraint $(FRAMEWORKS)/dev.txt
	touch $@

test-frameworks: build $(FRAMEWORKS_STAMP)
	VIRTUAL_ENV=$(abspath $(FRAMEWORKS)) $(FRAMEWORKS)/bin/maturin develop --release
	$(FRAMEWORKS)/bin/python -m pytest tests/frameworks -o faulthandler_timeout=1300

# libFuzzer without cargo-fuzz: the coverage that it needs comes from stable compiler flags.
FUZZ_SECONDS ?= 8
FUZZ_TARGET := $(shell rustc -vV 2>/dev/null | sed -n 's/host: //p')
FUZZ_FLAGS := --cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
  -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
  -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1
FUZZ_PROGRAMS := parse switch atp goat dlcp
compile-fuzz: test-tools
	cd fuzz && RUSTFLAGS="$(FUZZ_FLAGS)" cargo build --quiet --release --target $(FUZZ_TARGET) --target-dir ../target/fuzz

# Two at a time: each has one thread.
fuzz: compile-fuzz
	@$(MAKE) --no-print-directory -j 2 $(FUZZ_PROGRAMS:%=fuzz-%)

$(FUZZ_PROGRAMS:%=fuzz-%): fuzz-%:
	@echo "fuzz $*, $(FUZZ_SECONDS) s"; \
	target/fuzz/$(FUZZ_TARGET)/release/$* -max_total_time=$(FUZZ_SECONDS) -max_len=2000 \
	  -artifact_prefix=target/fuzz/ 2>target/fuzz/$*.log || { tail -30 target/fuzz/$*.log; exit 1; }; \
	echo "fuzz $*: `tail -1 target/fuzz/$*.log`"

# Also `$(BIN)/python benches/performance.py --only TEXT` for some rows, and `--quick` to see that all run. Was it faster
# before? `$(BIN)/python benches/against.py ../before` lets two built checkouts take turns.
bench: build
	$(BIN)/python benches/performance.py
	$(BIN)/python benches/collectives.py
	$(BIN)/python benches/horovod_steps.py
	$(BIN)/python benches/page.py
	$(BIN)/python benches/report.py

# docs/reproduction: what stands there is what these two commands write.
reproduction: build
	for paper in atp switchml dlcp goat; do \
	  out=target/reproduction/$$paper; \
	  rm -f $$out/*.png; \
	  $(BIN)/fanin reproduce $$paper --why --out $$out || exit 1; \
	  mkdir -p docs/reproduction/$$paper && rm -f docs/reproduction/$$paper/*.png && cp $$out/README.md $$out/*.png docs/reproduction/$$paper/ || exit 1; \
	done

# The same of BytePS, some of which is measured on shaped links: that needs root, and nothing beside it (10 minutes).
reproduction-byteps: build
	rm -f target/reproduction/byteps/*.png
	$(BIN)/fanin reproduce byteps --why --out target/reproduction/byteps
	rm -f docs/reproduction/byteps/*.png && cp target/reproduction/byteps/README.md target/reproduction/byteps/*.png docs/reproduction/byteps/

# Two papers on real sockets: docs/reproduction-sockets.md. They need root, for network namespaces.
bench-papers: bench-atp bench-switchml
bench-atp: build
	$(BIN)/python benches/atp_sockets.py
bench-switchml: build
	$(BIN)/python benches/switchml_sockets.py

# The documentation site, from the Markdown that the repository shows: website/conf.py. Its tools have an environment of their own.
DOCS := target/venv-docs
SITE := target/site
$(DOCS)/.installed: pyproject.toml | tools
	[ -x $(DOCS)/bin/python ] || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -c 'import tomllib; print("\n".join(tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"]))' > $(DOCS)/requirements.txt
	$(DOCS)/bin/python -m pip install --quiet --requirement $(DOCS)/requirements.txt
	touch $@

docs-tools: $(DOCS)/.installed

docs: docs-tools
	rm -rf $(SITE) target/doc target/doctrees
	RUSTDOCFLAGS="-D warnings" cargo doc --no-deps --workspace --quiet
	$(DOCS)/bin/sphinx-build --conf-dir website --builder html --fail-on-warning --quiet --doctree-dir target/doctrees . $(SITE)
	cp -r target/doc $(SITE)/rust
	$(DOCS)/bin/python website/check.py $(SITE)

clean:
	rm -rf target fuzz/target $(VENV) $(FRAMEWORKS)
