#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what tests take from Debian: Chromium, for the playground; systemd-analyze, for the unit of
# docs/deployment.md; recordings of people who speak. Tests without them are skipped, and say so.
set -euo pipefail

missing=()
command -v chromium || missing+=(chromium)
command -v systemd-analyze || missing+=(systemd)
[ -d /usr/share/pocketsphinx/test/data/librivox ] || missing+=(pocketsphinx-testdata)
if [ ${#missing[@]} = 0 ]; then
    exit 0
fi
if ! command -v apt-get || [ "$(id -u)" != 0 ]; then
    echo "${missing[*]}: only root can install them, with apt-get; the tests that need them are skipped" >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update
apt-get install --yes --no-install-recommends "${missing[@]}"
