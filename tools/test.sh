#!/bin/bash
# Installs what is needed, builds everything and runs all tests but the nightly ones. The last lines are ctest's
# own summary. Arguments go to ctest: tools/test.sh -R layout
set -euo pipefail
cd "$(dirname "$0")/.."

tools/setup.sh
cmake --preset dev
cmake --build --preset dev
exec ctest --preset dev -LE nightly "$@"
