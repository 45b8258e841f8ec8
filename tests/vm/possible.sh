#!/usr/bin/env bash
# Can this machine run tests/vm/run.sh? If not, prints why and fails.
[ "$(uname -m)" = x86_64 ] || { echo "the virtual machine is for x86_64, this is $(uname -m)"; exit 1; }
[ "$(id -u)" = 0 ] || { echo "it shows the guest the whole file system, which needs root"; exit 1; }
grep -qx 'ID=debian' /etc/os-release || { echo "it boots Debian's kernel from Debian's packages"; exit 1; }
