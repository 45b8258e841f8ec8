#!/usr/bin/env bash
# What runs inside the virtual machine: the C++ tests that need verbs devices, then the Python ones,
# which import (slowly, on an emulated machine) while the first are running. suite.sh PYTHON
set -uo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=$KVT_VM_DIR/pyverbs/usr/lib/python3/dist-packages:$PWD/tests/vm
touch /tmp/kvt-devices-in-use
"$1" -m pytest -q -p no:cacheprovider --durations=5 ${2:-tests/vm} &
build/dev/tests/cpp/kvtransfer_tests --gtest_brief=1 --gtest_filter='*Verbs*:*TrafficPeers*'
core=$?
rm /tmp/kvt-devices-in-use
wait %1
python=$?
[ $core = 0 ] && [ $python = 0 ]
