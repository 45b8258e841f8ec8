#!/usr/bin/env bash
# run.sh COMMAND... : runs COMMAND in a virtual machine with two Soft-RoCE devices, on this machine's
# own file system (read-only, changes vanish). Its output comes on stdout, its exit code is ours;
# 125: the machine gave none. Environment: KVT_VM_SECONDS (limit, 600), KVT_VM_MEMORY (MiB, 3072).
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
export KVT_VM_DIR=${KVT_VM_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/kvtransfer/vm}
"$here/prepare.sh" >&2 || { echo "the virtual machine could not be prepared" >&2; exit 125; }
exchange=$(mktemp -d --suffix=.kvt-vm)
trap 'kill "$files" 2> /dev/null; rm -rf "$exchange" "$exchange.sock" "$exchange.sock.pid"' EXIT
cp "$KVT_VM_DIR/kernel-root" "$exchange/"
{
  printf 'cd %q || exit 125\n' "$PWD"
  printf 'export PATH=%q HOME=%q LANG=C.UTF-8 TMPDIR=/tmp CI=%q KVT_IN_VM=1 KVT_VM_DIR=%q\n' "$PATH" "$HOME" "${CI:-}" "$KVT_VM_DIR"
  printf '. %q\n' "$here/network.sh"
  printf '%q ' "$@"
  echo
} > "$exchange/command"

# Hardware virtualisation where there is any; else emulation, which is about six times slower.
accelerator=(-accel tcg,thread=multi,tb-size=512 -cpu max,la57=off,-pclmulqdq,-erms,-fsrm,-smap,-smep)
[ -w /dev/kvm ] && grep -qwE 'svm|vmx' /proc/cpuinfo && accelerator=(-accel kvm -cpu host)
memory=${KVT_VM_MEMORY:-3072}
/usr/lib/qemu/virtiofsd --socket-path="$exchange.sock" -o source=/ -o cache=always -o sandbox=chroot \
  -o no_posix_lock -f > "$exchange/virtiofsd.log" 2>&1 &
files=$!
for _ in $(seq 50); do [ -S "$exchange.sock" ] && break; sleep 0.1; done

timeout -k 5 "${KVT_VM_SECONDS:-600}" qemu-system-x86_64 "${accelerator[@]}" -M q35 -m "$memory" -smp 2 \
  -nodefaults -no-user-config -display none -no-reboot -monitor none -serial "file:$exchange/console" \
  -kernel "$KVT_VM_DIR/vmlinux" -initrd "$KVT_VM_DIR/initrd" \
  -append "console=ttyS0 quiet panic=-1 mitigations=off nokaslr audit=0 random.trust_cpu=on tsc=reliable no_timer_check cryptomgr.notests lsm= lpj=4000000" \
  -object "memory-backend-memfd,id=memory,size=${memory}M,share=on" -numa node,memdev=memory \
  -chardev "socket,id=root,path=$exchange.sock" -device vhost-user-fs-pci,chardev=root,tag=hostroot \
  -fsdev "local,id=exchange,path=$exchange,security_model=none" -device virtio-9p-pci,fsdev=exchange,mount_tag=exchange \
  -device virtio-serial-pci -chardev file,id=out,path=/proc/self/fd/1,append=on -device virtserialport,chardev=out,name=out \
  < /dev/null | cat
machine=${PIPESTATUS[0]}
code=$(cat "$exchange/exit-code" 2> /dev/null || echo 125)
if [ "$code" = 125 ]; then
  echo "no result from the virtual machine ($machine; 124: it ran past its limit); its console:" >&2
  tail -c 4000 "$exchange/console" >&2
fi
exit "$code"
