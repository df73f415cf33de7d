#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs Debian's Chromium, in which the tests of the playground run. Without it they are skipped, and say so.
set -euo pipefail

if command -v chromium; then
    exit 0
fi
if ! command -v apt-get || [ "$(id -u)" != 0 ]; then
    echo "Chromium needs root and apt-get to be installed; without it the tests in a browser are skipped" >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update
apt-get install --yes --no-install-recommends chromium
