# Everything that can be done with a checkout. Each target first installs what a fresh Debian 12 lacks, and says so.

CARGO ?= cargo
OUT ?= target/demo
SOAK_SECONDS ?= 3600
PATH := $(HOME)/.cargo/bin:$(PATH)
SUDO := $(if $(filter-out 0,$(shell id -u)),sudo,)
BIN = $${CARGO_TARGET_DIR:-target}/dist/longsplice

.PHONY: help build demo test soak kernels kernels-short bench lint shell man install-deps

help:
	@echo 'make build         target/dist/longsplice'
	@echo 'make demo          one download, spliced, that outlives the proxy (a minute, root)'
	@echo 'make test          all tests (root: they make network namespaces)'
	@echo 'make soak          everything at once for an hour, or SOAK_SECONDS=... (root)'
	@echo 'make kernels       the build on other kernels, in virtual machines (half an hour, root)'
	@echo 'make kernels-short a smoke test on the oldest and the newest of them (minutes, root)'
	@echo 'make bench         the figures of the README (root)'
	@echo 'make lint          rustfmt, clippy, tidy'
	@echo 'make shell         a shell in a network of client, forwarder and server (root)'
	@echo 'make man           target/longsplice.1'
	@echo 'make install-deps  what Debian 12 lacks for the above'

install-deps:
	@$(SUDO) dist/install-deps

build: install-deps
	$(CARGO) build --profile dist --locked -p longsplice

demo: build
	@$(SUDO) $(BIN) demo --out $(OUT)

# Optimised too: the checked traffic runs at full speed.
# What has failed is said by the message; frames of runtimes would bury it.
test: install-deps
	RUST_BACKTRACE=0 $(CARGO) test --release --locked --workspace --no-fail-fast -- --include-ignored
	@echo 'make test: all tests passed'

# `make test` has four minutes of it. LONGSPLICE_SOAK_SEED=... repeats one that has failed.
soak: install-deps
	RUST_BACKTRACE=0 LONGSPLICE_SOAK_SECONDS=$(SOAK_SECONDS) \
		$(CARGO) test --release --locked -p longsplice --test soak -- --ignored --nocapture
	@echo 'make soak: nothing wrong, nothing hung, nothing left'

kernels: install-deps
	@$(SUDO) dist/install-deps kernels
	@$(SUDO) tests/kernels/run

kernels-short: install-deps
	@$(SUDO) dist/install-deps kernels
	@$(SUDO) tests/kernels/run short

bench: build
	@$(SUDO) $(BIN) bench

lint: install-deps
	$(CARGO) fmt --all --check
	$(CARGO) clippy --release --locked --workspace --all-targets -- -D warnings
	$(CARGO) test --release --locked -p longsplice --test tidy
	@echo 'make lint: clean'

shell: build
	@$(SUDO) $(BIN) lab shell

man: build
	$(BIN) man > target/longsplice.1
	@echo 'man -l target/longsplice.1'
