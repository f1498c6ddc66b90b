#!/usr/bin/env bash
# From nothing to a small GPT trained three times: without a limit, under half and under a third of its own peak.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
exec .venv/bin/python scripts/demo.py
