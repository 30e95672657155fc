# Everything that can be done with a checkout. Each target first installs the packages that it needs itself and that Debian 12
# lacks, and says which. Targets that need no root install nothing without it: they say what is missing, and stop.

CARGO ?= cargo
OUT ?= target/demo
SOAK_SECONDS ?= 3600
GRIND_SECONDS ?= 3600
BASE ?= main
REVISION ?= 1
PATH := $(HOME)/.cargo/bin:$(PATH)
SUDO := $(if $(filter-out 0,$(shell id -u)),sudo,)
BIN = $${CARGO_TARGET_DIR:-target}/dist/longsplice
BENCH = $(BIN)-bench
DEPS = dist/install-deps
# What --version says besides the number: the commit and its date.
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n1)$(shell git log -1 --format=' (%h, %cs)' 2>/dev/null)
BUILD = LONGSPLICE_VERSION='$(VERSION)' $(CARGO) build --profile dist --locked -p longsplice
# As another program may use it: without what is optional.
ENGINE_ALONE = -p longsplice-engine --no-default-features
BUILD_BENCH = $(BUILD) -p longsplice-bench
# What has failed is said by the message; frames of runtimes would bury it.
TEST = RUST_BACKTRACE=0 $(CARGO) test --profile quick --locked
# The same with a process for each test, several at a time.
RUN_TESTS = RUST_BACKTRACE=0 CARGO=$(CARGO) tests/run
AS_ROOT = @[ "$$(id -u)" = 0 ] || { echo 'make $@ needs root. Without root, run make check.' >&2; exit 1; }

.PHONY: help build check lint deny advisories notices demo test quick test-all test-loaded soak grind
.PHONY: kernels kernels-short kernels-changed bench bench-gate shell man install-deps install package deb rpm test-packages

help:
	@echo 'make build         target/dist/longsplice'
	@echo 'make check         rustfmt, clippy, dependencies, and all tests that need no root (minutes)'
	@echo 'make demo          one download, spliced, that outlives the proxy (a minute, root)'
	@echo 'make test          the tests for each commit (root: they make network namespaces and load eBPF)'
	@echo 'make quick T=name  the tests whose names contain that (root if they need it)'
	@echo 'make test-all      all tests, with all address families, demos, bench, four minutes of soak (root)'
	@echo 'make test-loaded   make test three times beside eight busy loops, and storms beside each other (root)'
	@echo 'make soak          everything at once for an hour, or SOAK_SECONDS=... (root)'
	@echo 'make grind         reloads, upgrades and kills under traffic for an hour, or GRIND_SECONDS=... (root)'
	@echo 'make kernels       the build on other kernels, in virtual machines (half an hour, root)'
	@echo 'make kernels-short a smoke test on the oldest and the newest of them (minutes, root)'
	@echo 'make kernels-changed  the same, unless it has passed with this data path before (root)'
	@echo 'make bench         the figures of the README (root)'
	@echo 'make bench-gate    whether anything has become slower since the commit BASE=... (main), on a quiet machine (root)'
	@echo 'make shell         a shell in a network of client, forwarder and server (root)'
	@echo 'make man           target/longsplice.1 and target/longsplice.toml.5'
	@echo 'make install       puts what make build has made, man pages and units below PREFIX=/usr/local (root), or into DESTDIR'
	@echo 'make deb           target/package-files/longsplice_*.deb'
	@echo 'make rpm           target/package-files/longsplice-*.rpm'
	@echo 'make test-packages   both; the first is installed into a new Debian 12 and 13, run, upgraded and removed (network, root)'
	@echo 'make notices       dist/THIRD-PARTY-NOTICES.txt, after a change of dependencies'
	@echo 'make advisories    known faults of dependencies, from the database of RustSec (network)'
	@echo 'make install-deps  the packages for all of the above (root)'

install-deps:
	@$(SUDO) $(DEPS) build check lab demo shell bench test kernels packages

build:
	@$(DEPS) build
	$(BUILD)

lint:
	@$(DEPS) build
	$(CARGO) fmt --all --check
	$(CARGO) clippy --profile quick --locked --workspace --all-targets -- -D warnings
	$(CARGO) clippy --profile quick --locked $(ENGINE_ALONE) -- -D warnings

# Offline, and the same today and tomorrow: what has become known of dependencies is looked up before a release.
deny:
	@$(DEPS) build check
	$(CARGO) deny --locked check bans licenses sources

advisories:
	@$(DEPS) build check
	$(CARGO) deny --locked check advisories

notices:
	@$(DEPS) build
	WRITE_NOTICES=1 $(TEST) -p longsplice --test suite notices::

check: lint deny
	@$(DEPS) build check
	$(TEST) --workspace --no-fail-fast
	@echo 'make check: all passed'

demo:
	@$(SUDO) $(DEPS) build lab demo
	$(BUILD_BENCH)
	@$(SUDO) $(BENCH) demo --out $(OUT)

quick:
	@$(DEPS) build lab test
	RUST_BACKTRACE=0 $(CARGO) nextest run --cargo-profile quick --locked --workspace --run-ignored all --ignore-default-filter $(T)

# Optimised, because the checked traffic runs at full speed. docs/testing.md says what is in which of the two.
test:
	$(AS_ROOT)
	@$(DEPS) build lab test
	$(RUN_TESTS) default
	@echo 'make test: all tests passed'

test-all:
	$(AS_ROOT)
	@$(DEPS) build lab test
	$(CARGO) check --profile quick --locked $(ENGINE_ALONE)
	SCENARIO_FAMILIES=all LONGSPLICE_SOAK_SECONDS=240 $(RUN_TESTS) all
	@echo 'make test-all: all tests passed'

test-loaded:
	$(AS_ROOT)
	@$(DEPS) build lab test
	@for run in 1 2 3; do LOAD=8 $(RUN_TESTS) default && $(RUN_TESTS) storms || exit; done
	@echo 'make test-loaded: all tests passed, three times'

# `make test` runs a part of it. LONGSPLICE_SOAK_SEED=... repeats a run that has failed.
soak:
	$(AS_ROOT)
	@$(DEPS) build lab
	LONGSPLICE_SOAK_SECONDS=$(SOAK_SECONDS) $(TEST) -p longsplice --test suite soak:: -- --include-ignored --nocapture
	@echo 'make soak: nothing wrong, nothing hung, nothing left'

# GRIND_SEED=... repeats the order of events of a run.
grind:
	$(AS_ROOT)
	@$(DEPS) build lab
	GRIND_SECONDS=$(GRIND_SECONDS) $(TEST) -p longsplice --test suite grind:: -- --include-ignored --nocapture
	@echo 'make grind: nothing wrong, nobody refused, nothing left'

kernels:
	@$(SUDO) $(DEPS) build lab kernels
	@$(SUDO) tests/kernels/run

kernels-short:
	@$(SUDO) $(DEPS) build lab kernels
	@$(SUDO) tests/kernels/run short

kernels-changed:
	@$(SUDO) $(DEPS) build lab kernels
	@$(SUDO) tests/kernels/run changed

bench:
	@$(SUDO) $(DEPS) build lab bench
	$(BUILD_BENCH)
	@$(SUDO) $(BENCH)

# The program of BASE is built in target/base, and kept for the next time.
bench-gate:
	@$(SUDO) $(DEPS) build lab bench
	$(BUILD_BENCH)
	@[ -e target/base ] || git worktree add --detach target/base $(BASE)
	@git -C target/base checkout --quiet --detach $$(git rev-parse $(BASE))
	cd target/base && CARGO_TARGET_DIR=$(CURDIR)/target/base-build $(BUILD)
	@$(SUDO) $(BENCH) gate --against target/base-build/dist/longsplice

shell:
	@$(SUDO) $(DEPS) build lab shell
	$(BUILD_BENCH)
	@$(SUDO) $(BENCH) shell

man: build
	$(BIN) man > target/longsplice.1
	$(BIN) man longsplice.toml > target/longsplice.toml.5
	@echo 'man -l target/longsplice.1 target/longsplice.toml.5'

# Does not build: root should not.
install:
	@[ -x $(BIN) ] || { echo 'make install installs what make build makes: run that first, as the user who builds.' >&2; exit 1; }
	DESTDIR='$(DESTDIR)' PREFIX='$(PREFIX)' dist/install $(BIN)

# What the packages contain.
package: build
	@$(DEPS) packages
	rm -rf target/package
	DESTDIR=target/package PREFIX=/usr dist/install $(BIN)

deb: package
	$(CARGO) deb --no-build --no-strip --profile dist -p longsplice --deb-revision $(REVISION) --output target/package-files/

rpm: package
	$(CARGO) generate-rpm -p crates/longsplice --output target/package-files/

test-packages: deb rpm
	$(AS_ROOT)
	@$(DEPS) lab packages
	$(CARGO) deb --no-build --no-strip --profile dist -p longsplice --deb-revision 2 --output target/package-files/newer.deb
	tests/packages/run target/package-files/longsplice_*-$(REVISION)_*.deb target/package-files/newer.deb target/package-files/*.rpm
