#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what tests take from Debian: Chromium, for the playground; systemd-analyze and nginx, for the unit and the
# proxy of docs/deployment.md; recordings of people who speak. Of nginx's package only the program, since the rest starts
# a server. Tests without them are skipped, and say so.
set -euo pipefail

missing=() unpacked=()
command -v chromium || missing+=(chromium)
command -v systemd-analyze || missing+=(systemd)
[ -d /usr/share/pocketsphinx/test/data/librivox ] || missing+=(pocketsphinx-testdata)
command -v nginx || unpacked=(nginx)
if [ ${#missing[@]} = 0 ] && [ ${#unpacked[@]} = 0 ]; then
    exit 0
fi
if ! command -v apt-get || [ "$(id -u)" != 0 ]; then
    echo "${missing[*]} ${unpacked[*]}: only root can install them, with apt-get; the tests that need them are skipped" >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update
apt-get install --yes --no-install-recommends "${missing[@]}"
for package in "${unpacked[@]}"; do
    folder=$(mktemp -d)
    (cd "$folder" && apt-get download "$package" && dpkg-deb --extract "$package"_*.deb .)
    install "$folder/usr/sbin/$package" /usr/local/bin/
    rm -r "$folder"
done
