# People and CI run the same targets. The first one that needs it makes .venv and installs everything into it.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# A package index with other builds of torch, for example CPU-only ones; empty for pip's own.
TORCH_INDEX ?=
BIN := .venv/bin
INSTALLED := .venv/.installed
export PYTHONSAFEPATH = 1
# Tests start many processes: where compiled modules were not kept, each would compile all that it imports.
export PYTHONDONTWRITEBYTECODE =

.PHONY: help install node demo test test-all test-gpu mutants check check-contract check-deploy proto fmt bench-cpu bench-gpu wheel clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "deltaline needs Python 3.11 or later with venv; say which: make PYTHON=..."; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -e '.[server,dev]'
	@touch $@

install: $(INSTALLED)  ## make .venv with everything in it

node: $(INSTALLED)  ## install what examples/node needs, for its test
	cd examples/node && PATH="$(abspath $(BIN)):$$PATH" npm ci --no-audit --no-fund

demo: $(INSTALLED)  ## write a small checkpoint, serve it to a few clients, generate, compare with transformers
	$(BIN)/deltaline demo

# There are as many workers as cores: one thread each.
test test-all mutants: export OMP_NUM_THREADS = 1
test: $(INSTALLED)  ## all tests that need no GPU; the Triton kernels run in Triton's interpreter
	$(BIN)/pytest -n auto --dist worksteal
	TRITON_INTERPRET=1 $(BIN)/pytest -n auto --dist worksteal tests/kernels/interpreted
	$(BIN)/pytest -m alone tests/bench tests/e2e tests/server/memory

# For the many cores of a GPU host, and before a release.
test-all: $(INSTALLED)  ## test, and the exhaustive sweeps
	$(BIN)/pytest -n auto --dist worksteal --all
	TRITON_INTERPRET=1 $(BIN)/pytest -n auto --dist worksteal --all tests/kernels/interpreted
	$(BIN)/pytest -m alone --all tests/bench tests/e2e tests/server/memory

test-gpu: $(INSTALLED)  ## the tests that need a CUDA device
	$(BIN)/pytest -m gpu

mutants: $(INSTALLED)  ## plant 300 small changes in the server, one at a time, and print those that no test sees; hours on few cores
	$(BIN)/python bench/mutants.py

check: $(INSTALLED) check-contract check-deploy  ## format, lint, types, imports, contract, deployment; changes nothing
	$(BIN)/ruff format --check . && $(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check-contract: $(INSTALLED)  ## the contract alone: lint, generated code, only grown since the last release or commit; part of check
	@$(BIN)/buf lint proto
	@out=$$(mktemp -d) && trap 'rm -rf "$$out"' EXIT && $(call has_grown,$$out) && $(call generate,$$out) && \
	diff -rq -x '*.proto' -x '__init__.py' -x __pycache__ "$$out/deltaline/v1" proto/deltaline/v1 && \
	echo "generated code is current"

check-deploy: $(INSTALLED)  ## Dockerfile, compose, manifests, rules; part of check
	$(BIN)/hadolint Dockerfile
	$(BIN)/yamllint --strict -c deploy/.yamllint deploy
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec deploy/compose/compose.yaml deploy/compose/tls.yaml
	@$(call present,kubectl,the manifests are not checked) || for overlay in deploy/kubernetes/overlays/*; do \
	    manifests=$$(kubectl kustomize $$overlay) || exit 1; \
	    echo "$$manifests" | $(BIN)/kubernetes-validate --strict --quiet - || exit 1; \
	    echo "$$overlay is valid"; \
	done
	@$(call present,promtool,the rules are not checked) || { \
	    promtool check config deploy/prometheus/prometheus.yml && \
	    promtool check config deploy/prometheus/local.yml && \
	    promtool check config --syntax-only deploy/prometheus/tls.yml && \
	    promtool test rules deploy/prometheus/rules.test.yml; }

proto: $(INSTALLED)  ## regenerate the code beside the .proto files
	$(call generate,proto)

fmt: $(INSTALLED)  ## format and mend what ruff can mend
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .

bench-cpu: $(INSTALLED)  ## measure on the CPU: the mixer beside transformers, the service beside a bare echo
	$(BIN)/python bench/mixer.py; mixer=$$?; $(BIN)/python bench/service.py --size cpu && exit $$mixer

bench-gpu: $(INSTALLED)  ## measure the kernels beside the peers that are installed; needs a CUDA device
	$(BIN)/python -m deltaline_bench all --output bench/results

wheel: $(INSTALLED)  ## build dist/deltaline-*.whl
	$(BIN)/pip wheel --no-deps -w dist .

clean:  ## remove what these targets made
	rm -rf .venv dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

# Succeeds, and says what is left out, where a program is not installed.
present = { ! command -v $(1) >/dev/null && echo "$(1) is not installed: $(2)"; }
protoc = PATH="$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc --fatal_warnings -I proto -I proto/third_party
generate = $(protoc) --python_out=$(1) --mypy_out=quiet:$(1) proto/deltaline/v1/*.proto && \
	$(protoc) --grpc_python_out=$(1) --mypy_grpc_out=quiet:$(1) proto/deltaline/v1/*_service.proto
# Compares the contract with the last release before HEAD, without one with the commit before; a first commit and a shallow
# clone have neither. How proto/ is laid out is taken from now: an older one lacked third_party.
has_grown = base=$$(git describe --tags --abbrev=0 --match 'v[0-9]*' HEAD~ 2>/dev/null || git rev-parse -q --verify HEAD~ 2>/dev/null); \
	if [ -z "$$base" ]; then echo "there is no commit before this one: the contract is compared with none"; else \
	    mkdir $(1)/before && git archive $$base proto | tar -x -C $(1)/before && cp -R proto/buf.yaml proto/third_party $(1)/before/proto && \
	    $(BIN)/buf breaking proto --against $(1)/before/proto && echo "the contract has only grown since $$base"; fi
