#!/usr/bin/env bash
# Can this machine run tests/vm/run.sh? If not, prints why and fails.
[ "$(uname -m)" = x86_64 ] || { echo "the virtual machine is for x86_64, this is $(uname -m)"; exit 1; }
[ "$(id -u)" = 0 ] || { echo "it shows the guest the whole file system, which needs root"; exit 1; }
command -v apt-get > /dev/null && apt-cache show linux-image-amd64 > /dev/null 2>&1 \
  || { echo "it boots Debian's kernel, and there is no apt that has one"; exit 1; }
