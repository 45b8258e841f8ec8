#!/usr/bin/env bash
# Puts together what run.sh boots: Debian's stock kernel and an initramfs with the modules for
# virtio, overlayfs and Soft-RoCE, in $KVT_VM_DIR. Needs root and apt; does nothing the second time.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
dir=${KVT_VM_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/kvtransfer/vm}
[ -s "$dir/vmlinux" ] && [ -s "$dir/initrd" ] && [ "$dir/initrd" -nt "$here/init" ] && [ "$dir/initrd" -nt "$0" ] && exit 0
[ "$(id -u)" = 0 ] || { echo "needs root to install packages and read the whole file system" >&2; exit 1; }
mkdir -p "$dir"

# `rdma-core` would bring udev and upgrade systemd; these don't.
packages=(qemu-system-x86 busybox-static kmod cpio xz-utils ibverbs-providers ibverbs-utils perftest iproute2 strace librdmacm1 libpython3.11)
missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f '${Status}' "$package" 2> /dev/null | grep -q 'ok installed' || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ] || ! apt-cache show linux-image-amd64 > /dev/null 2>&1; then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" > /dev/null
fi

# pyverbs without its dependency on the system's Python packages; for the tests alone.
if [ ! -d "$dir/pyverbs" ]; then
  scratch=$(mktemp -d)
  (cd "$scratch" && apt-get download -qq -o APT::Sandbox::User=root python3-pyverbs && dpkg -x ./*.deb pyverbs)
  mv "$scratch/pyverbs" "$dir/pyverbs" && rm -rf "$scratch"
fi

# The newest kernel image by its dependency of the meta package; the -cloud- flavour has no rxe.
kernel=$(apt-cache depends linux-image-amd64 | sed -n 's/^ *Depends: \(linux-image-[0-9][^ ]*\)$/\1/p' | head -n 1)
root=$dir/$kernel
if [ ! -d "$root/lib/modules" ]; then
  scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' EXIT
  (cd "$scratch" && apt-get download -qq -o APT::Sandbox::User=root "$kernel")
  rm -rf "$root" && mkdir -p "$root"
  folders=(net fs/9p fs/fuse fs/overlayfs fs/netfs fs/fscache fs/configfs drivers/infiniband drivers/virtio
    drivers/char drivers/net lib crypto arch)
  patterns=()
  for folder in "${folders[@]}"; do patterns+=("./lib/modules/*/kernel/$folder/*"); done
  dpkg --fsys-tarfile "$scratch"/*.deb \
    | tar -x -C "$root" --wildcards './boot/vmlinuz-*' './lib/modules/*/modules.*' "${patterns[@]}"
  depmod -b "$root" "$(ls "$root/lib/modules")"
fi
version=$(ls "$root/lib/modules")

# QEMU boots an uncompressed kernel faster than it emulates the decompressor.
python3 - "$root/boot/vmlinuz-$version" "$dir/vmlinux" << 'PY'
import lzma, struct, sys, zlib
image = open(sys.argv[1], "rb").read()
setup_sectors = image[0x1F1] or 4
offset, length = struct.unpack_from("<II", image, 0x248)
start = (setup_sectors + 1) * 512 + offset
payload = image[start : start + length]
if payload.startswith(b"\xfd7zXZ\0"):
    kernel = lzma.LZMADecompressor().decompress(payload)
elif payload.startswith(b"\x1f\x8b"):
    kernel = zlib.decompressobj(31).decompress(payload)
else:
    raise SystemExit(f"unknown kernel compression {payload[:6]!r}")
assert kernel.startswith(b"\x7fELF")
open(sys.argv[2], "wb").write(kernel)
PY

image=$(mktemp -d)
mkdir -p "$image"/{bin,dev,proc,sys,modules,host,upper,guest}
cp /bin/busybox "$image/bin/"
install -m 755 "$here/init" "$image/init"
for module in virtio_pci virtio_console 9pnet_virtio 9p virtiofs overlay crc32_generic ib_uverbs rdma_rxe veth; do
  modprobe -d "$root" -S "$version" --show-depends "$module" | awk '$1 == "insmod" {print $2}' || true
done 2> /dev/null | awk '!seen[$0]++' | while read -r file; do
  name=$(basename "$file" .xz)
  case $file in *.xz) xz -dc "$file" ;; *) cat "$file" ;; esac > "$image/modules/$name"
  echo "$name" >> "$image/modules/order"
done
(cd "$image" && find . | cpio -o -H newc --quiet) > "$dir/initrd.new"
rm -rf "$image"
echo "$root" > "$dir/kernel-root"
mv "$dir/initrd.new" "$dir/initrd"
echo "virtual machine prepared: kernel $version" >&2
