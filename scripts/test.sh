#!/usr/bin/env bash
# Set up, build, and pass all tests. Arguments go to ctest (scripts/test.sh -L offline).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
# exec: the closing lines are ctest's own, and so is the exit status.
# Slow tests (label slow) run only when asked for: ctest --test-dir build -L slow.
exec ctest --test-dir build --output-on-failure -LE slow --parallel "$(nproc)" "$@"
