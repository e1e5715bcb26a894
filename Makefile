# Mainspring. `make` alone lists what there is to do; every target does its own set-up.
.DEFAULT_GOAL := help
.PHONY: help install serve test test-slow test-cron-long chaos chaos-long check check-deploy docs screenshots bench bench-peers demo start-poc cleanup-poc fmt lock clean
SHELL := bash
.SHELLFLAGS := -euo pipefail -c

BIN    := .venv/bin
STAMP  := .venv/.installed
DOCS_STAMP := .venv/docs/.installed
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
ARGS   ?=
# The tests start Python a thousand times: without its compiled modules each start takes twice as long.
unexport PYTHONDONTWRITEBYTECODE
COMPOSE = docker compose --file deploy/compose.yaml

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' \
	  | while IFS='|' read -r name text; do printf '  make %-14s %s\n' "$$name" "$$text"; done
	@echo '  ARGS="…" is handed on, e.g. make test ARGS="-k cancel" or make serve ARGS="--port 9000"'

install: $(STAMP) ## create .venv with everything pinned (redone only when pins change)

# The stamp is written last, so an install cut short is done again from the start.
$(STAMP): pyproject.toml requirements/dev.txt
	@python=$${PYTHON:-$$(tools/find-python)}; \
	command -v $$python >/dev/null || { echo "$$python not found: Python 3.11 or newer is needed" >&2; exit 1; }; \
	$$python -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'; \
	echo "installing into .venv"; \
	$$python -m venv .venv
	@# uv needs seconds where pip needs a minute; where it finds no packages (a mirror that only pip knows), pip gets them.
	@sed -n '/^uv==/,/^    # via/p' requirements/dev.txt > .venv/uv.txt
	@$(PIP) --require-hashes -r .venv/uv.txt
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes -r requirements/dev.txt \
	  || $(PIP) --require-hashes -r requirements/dev.txt
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

serve: install ## run a scheduler with its own embedded server on port 8000
	@exec $(BIN)/mainspring serve $(ARGS)

test: install ## run the tests on real servers, each test on one kind (ARGS=--all-servers: on every kind; WORKERS=n at a time, else 4)
	@tools/install-parts
	@# More processes than cores: most tests wait for servers and other processes more than they work.
	@$(BIN)/python tools/run-tests -n $(or $(WORKERS),4) --dist loadfile -m "not slow" $(ARGS)

test-slow: install ## the long runs of which `make test` has a small one: chaos, planted bugs, brokers, peers
	@tools/install-parts
	@$(BIN)/python tools/run-tests -n $(or $(WORKERS),2) --dist worksteal -m slow $(ARGS)

test-cron-long: install ## 200,000 random schedules against a walk over every minute (about ten minutes)
	@MAINSPRING_CRON_CASES=200000 $(BIN)/python -m pytest -q -n auto tests/model/schedule/test_cron_oracle.py $(ARGS)

chaos: install ## real processes under faults for about two minutes, then the proof (SEED=n for another plan)
	@$(BIN)/python -m tests.support.chaos --seed $(or $(SEED),1) $(ARGS)

chaos-long: install ## the same with seed after seed for MINUTES=n (default 30)
	@$(BIN)/python -m tests.support.chaos $(if $(SEED),--seed $(SEED)) --minutes $(or $(MINUTES),30) $(ARGS)

check: install ## lint, format, strict types, layer direction, signs of the layout
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python tools/house --check

bench: install ## print the figures of docs/benchmarks.md in short
	@exec $(BIN)/mainspring bench $(or $(ARGS),all)

bench-peers: install ## Mainspring beside Celery, Dramatiq, RQ, arq and Huey (these go into the cache folder; about six minutes)
	@exec $(BIN)/mainspring bench peers $(ARGS)

demo: install ## generator, two schedulers, Kafka and consumer: rates every second, the sums at the end
	@tools/install-parts
	@exec $(BIN)/mainspring demo ticks $(or $(ARGS),--ids 100000 --within 1m)

start-poc: ## the same in containers: Valkey, Kafka, two nodes, generator, consumer; their lines until Ctrl-C (needs Docker)
	@$(COMPOSE) up --build --detach --wait valkey kafka node-1 node-2
	@$(COMPOSE) up --detach generator consumer
	@echo 'nodes: http://127.0.0.1:8001 and http://127.0.0.1:8002; Ctrl-C ends the lines, make cleanup-poc the rest'
	@$(COMPOSE) logs --follow --no-log-prefix generator consumer

cleanup-poc: ## remove the containers of start-poc, their data and their image
	@$(COMPOSE) --profile watch down --volumes --rmi local --remove-orphans

check-deploy: install ## container, Kubernetes, systemd and Prometheus files against their schemas
	@tools/check-deploy

docs: install $(DOCS_STAMP) ## build the site of the docs, with a reference made from the code, into build/site
	@rm -rf build/pages build/site
	@$(BIN)/python tools/reference build/pages/reference
	@$(BIN)/python tools/site build
	@# Not --quiet: it drops warnings before --strict can count them.
	@NO_MKDOCS_2_WARNING=1 .venv/docs/bin/mkdocs build --strict --config-file build/mkdocs.yml
	@echo 'the site is in build/site; its search needs a web server: python3 -m http.server --bind 127.0.0.1 --directory build/site'

# What builds the site is installed apart and on demand: nobody else needs it.
$(DOCS_STAMP): requirements/docs.txt | install
	@$(BIN)/python -m venv .venv/docs
	@$(BIN)/uv pip install --quiet --python .venv/docs/bin/python --require-hashes -r requirements/docs.txt \
	  || .venv/docs/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/docs.txt
	@touch $@

screenshots: install ## write the pictures of the docs again, from real commands
	@$(BIN)/python tools/screenshots

fmt: install ## format and repair what can be repaired
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

lock: ## pin anew after a change of pyproject.toml (ARGS=--upgrade for newer versions)
	@tools/lock $(ARGS)

clean: ## remove .venv, caches and the site
	rm -rf .venv build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
