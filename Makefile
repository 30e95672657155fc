# Everything that can be done with a checkout. Each target first installs the packages that it needs itself and that Debian 12
# lacks, and says which. Targets that need no root install nothing without it: they say what is missing, and stop.

CARGO ?= cargo
OUT ?= target/demo
SOAK_SECONDS ?= 3600
PATH := $(HOME)/.cargo/bin:$(PATH)
SUDO := $(if $(filter-out 0,$(shell id -u)),sudo,)
BIN = $${CARGO_TARGET_DIR:-target}/dist/longsplice
BENCH = $(BIN)-bench
DEPS = dist/install-deps
BUILD = $(CARGO) build --profile dist --locked -p longsplice
# As another program may use it: without what is optional.
ENGINE_ALONE = -p longsplice-engine --no-default-features
BUILD_BENCH = $(BUILD) -p longsplice-bench
# What has failed is said by the message; frames of runtimes would bury it.
TEST = RUST_BACKTRACE=0 $(CARGO) test --release --locked
AS_ROOT = @[ "$$(id -u)" = 0 ] || { echo 'make $@ needs root. Without root, run make check.' >&2; exit 1; }

.PHONY: help build check demo test soak kernels kernels-short bench shell man install-deps

help:
	@echo 'make build         target/dist/longsplice'
	@echo 'make check         rustfmt, clippy, and all tests that need no root (minutes)'
	@echo 'make demo          one download, spliced, that outlives the proxy (a minute, root)'
	@echo 'make test          all tests (root: they make network namespaces and load eBPF)'
	@echo 'make soak          everything at once for an hour, or SOAK_SECONDS=... (root)'
	@echo 'make kernels       the build on other kernels, in virtual machines (half an hour, root)'
	@echo 'make kernels-short a smoke test on the oldest and the newest of them (minutes, root)'
	@echo 'make bench         the figures of the README (root)'
	@echo 'make shell         a shell in a network of client, forwarder and server (root)'
	@echo 'make man           target/longsplice.1'
	@echo 'make install-deps  the packages for all of the above (root)'

install-deps:
	@$(SUDO) $(DEPS) build check lab demo shell bench test kernels

build:
	@$(DEPS) build
	$(BUILD)

check:
	@$(DEPS) build check
	$(CARGO) fmt --all --check
	$(CARGO) clippy --release --locked --workspace --all-targets -- -D warnings
	$(CARGO) clippy --release --locked $(ENGINE_ALONE) -- -D warnings
	$(TEST) --workspace --no-fail-fast
	@echo 'make check: all passed'

demo:
	@$(SUDO) $(DEPS) build lab demo
	$(BUILD_BENCH)
	@$(SUDO) $(BENCH) demo --out $(OUT)

# Optimised, because the checked traffic runs at full speed.
test:
	$(AS_ROOT)
	@$(DEPS) build lab test
	$(CARGO) check --release --locked $(ENGINE_ALONE)
	$(TEST) --workspace --no-fail-fast -- --include-ignored
	@echo 'make test: all tests passed'

# `make test` runs four minutes of it. LONGSPLICE_SOAK_SEED=... repeats a run that has failed.
soak:
	$(AS_ROOT)
	@$(DEPS) build lab
	LONGSPLICE_SOAK_SECONDS=$(SOAK_SECONDS) $(TEST) -p longsplice --test soak -- --include-ignored --nocapture
	@echo 'make soak: nothing wrong, nothing hung, nothing left'

kernels:
	@$(SUDO) $(DEPS) build lab kernels
	@$(SUDO) tests/kernels/run

kernels-short:
	@$(SUDO) $(DEPS) build lab kernels
	@$(SUDO) tests/kernels/run short

bench:
	@$(SUDO) $(DEPS) build lab bench
	$(BUILD_BENCH)
	@$(SUDO) $(BENCH)

shell:
	@$(SUDO) $(DEPS) build lab shell
	$(BUILD_BENCH)
	@$(SUDO) $(BENCH) shell

man: build
	$(BIN) man > target/longsplice.1
	@echo 'man -l target/longsplice.1'
