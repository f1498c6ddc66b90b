#!/usr/bin/env bash
# Set up, build, and pass all tests. Arguments go to ctest (scripts/test.sh -L offline).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
# exec: the closing lines are ctest's own, and so is the exit status.
exec ctest --test-dir build --output-on-failure --parallel "$(nproc)" "$@"
