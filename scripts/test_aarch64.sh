#!/usr/bin/env bash
# libvtx for aarch64 on an x86-64 Debian, and whether it answers there as it does here.
#
#   scripts/test_aarch64.sh BUNDLE FOLDER
#
# Debian's cross compiler, qemu's user mode and the aarch64 library of ONNX Runtime are unpacked into FOLDER; nothing is
# installed, and no root is needed. FOLDER/run/ then has vtx-cpp-run, -traces and -probe as programs of this machine: each
# starts the aarch64 one under qemu.
set -euo pipefail

bundle=$1
mkdir -p "$2"
folder=$(cd "$2" && pwd)
root=$folder/root
. scripts/aarch64.sh

build() {
	configure_aarch64 "$folder" "$folder/build" -DVTX_BUILD_TESTS=ON
	ninja -C "$folder/build" --quiet
}

write_starters() {
	local system=$root/usr/$TRIPLE tool
	[ -d "$system/lib" ] || system=/usr/$TRIPLE
	mkdir -p "$folder/run"
	cp "$folder/build/CMakeCache.txt" "$folder/run"
	for tool in run traces probe; do
		cat > "$folder/run/vtx-cpp-$tool" << END
#!/bin/sh
unset LD_LIBRARY_PATH
exec "$root/usr/bin/qemu-aarch64" -L "$system" -E LD_LIBRARY_PATH="$folder/build:$root/usr/lib/$TRIPLE:$root/lib/$TRIPLE" \\
  -E VTX_ONNXRUNTIME="$folder/onnxruntime/onnxruntime/capi" "$folder/build/vtx-cpp-$tool" "\$@"
END
		chmod +x "$folder/run/vtx-cpp-$tool"
	done
}

# The answers of a build about the demo's pictures, without times.
answers() {
	for k in none 6; do
		for number in 1 4; do
			"$1/vtx-cpp-run" --bundle "$bundle" --json --threads 1 --k $k "examples/scene-$number.jpg" \
				"How many shapes are there?" "What color is the star?" | sed -E 's/"timings_ms": \{[^}]*\}/TIMES/'
		done
	done
}

compare() {
	VTX_ONNXRUNTIME=$(python -c 'import onnxruntime, os; print(os.path.dirname(onnxruntime.__file__))')/capi
	export VTX_ONNXRUNTIME
	answers build/cpp > "$folder/x86-64.json"
	answers "$folder/run" > "$folder/aarch64.json"
	diff "$folder/x86-64.json" "$folder/aarch64.json"
	echo "the demo: $(wc -l < "$folder/aarch64.json") answers under qemu, all as on this machine"
	rm -rf "$folder"/traces-*
	vtx-doctor "$bundle" --write-traces "$folder/traces-python"
	"$folder/run/vtx-cpp-traces" "$bundle" "$folder/traces-python" "$folder/traces-aarch64"
	vtx-doctor "$bundle" --check-traces "$folder/traces-aarch64"
}

unpack_aarch64 "$folder"
version=$(python -c 'from importlib.metadata import version; print(version("onnxruntime"))')
unpack_wheel "onnxruntime==$version" aarch64 "$folder/onnxruntime"
(build)
write_starters
compare
