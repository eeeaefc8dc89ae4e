#!/usr/bin/env bash
# libvtx as one ships it: an archive and a package of Debian, with all that they need but glibc and the C++ runtime.
#
#   scripts/dist_cpp.sh x86_64|aarch64 FOLDER
#
# FOLDER/ARCHITECTURE/ is where it is built, dist/ where both files end. ONNX Runtime and llguidance are those of the wheels
# on the package index, libjpeg, libpng and zlib Debian's. LLGUIDANCE=FILE: a C library of llguidance's own, e.g. of
# `cargo build --release`, in place of the wheel's.
set -euo pipefail

GLIBC=2.34 # Ubuntu 22.04 and JetPack 6 have 2.35
architecture=$1
mkdir -p "$2/$architecture" build/aarch64
folder=$(cd "$2/$architecture" && pwd)
tools=$PWD/build/aarch64 # as test_aarch64.sh has them
stage=$folder/stage
triple=$architecture-linux-gnu
. scripts/aarch64.sh

pinned() { # the line of a package in constraints.txt, without its marker
	local line
	line=$(grep "^$1==" constraints.txt | tail -1)
	echo "${line%%;*}"
}

# The library of llguidance's wheel has the C functions beside those of a Python module, which load only where Python's symbols
# are. Its C functions use none of them: a library with these names and no more, which needs the wheel's, loads both.
add_llguidance() {
	if [ -n "${LLGUIDANCE:-}" ]; then
		cp "$LLGUIDANCE" "$stage/lib/libllguidance.so"
		return
	fi
	unpack_wheel "$(pinned llguidance)" "$architecture" "$folder/llguidance"
	cp "$folder/llguidance/llguidance/_lib.abi3.so" "$stage/lib/llguidance.abi3.so"
	"$triple-nm" -D --undefined-only "$stage/lib/llguidance.abi3.so" |
		awk '$2 ~ /^_?Py/ { print "void " $2 "(void) { __builtin_trap(); }" }' > "$folder/python.c"
	[ -s "$folder/python.c" ] || fail "llguidance's wheel needs none of Python's symbols: this script is older than it"
	"$triple-gcc" -shared -fPIC -w -fno-builtin -nostdlib -Wl,-rpath,'$ORIGIN' -Wl,-soname,libllguidance.so \
		-Wl,--no-as-needed -o "$stage/lib/libllguidance.so" "$folder/python.c" -L"$stage/lib" -l:llguidance.abi3.so
	cp "$folder"/llguidance/llguidance-*.dist-info/licenses/LICENSE "$stage/licences/llguidance.txt"
	# The wheel names no licences of the crates compiled into it; their names and releases are in its messages.
	grep -aoE 'registry/src/[^/]+/[a-z0-9_-]+-[0-9][0-9a-z.+-]*/' "$stage/lib/llguidance.abi3.so" | cut -d/ -f4 | sort -u \
		> "$stage/licences/llguidance-crates.txt"
}

add_onnxruntime() {
	local capi=$folder/onnxruntime/onnxruntime/capi
	unpack_wheel "$(pinned onnxruntime)" "$architecture" "$folder/onnxruntime"
	cp -L "$capi"/libonnxruntime.so.* "$stage/lib/libonnxruntime.so.1"
	cp "$capi/../LICENSE" "$stage/licences/onnxruntime.txt"
	cp "$capi/../ThirdPartyNotices.txt" "$stage/licences/onnxruntime-third-party.txt"
}

add_image_libraries() {
	local root=$1 library package
	while read -r library package; do
		cp -L "$(find -L "$root/usr/lib/$triple" "$root/lib/$triple" -name "$library" 2> /dev/null | head -1)" \
			"$stage/lib/$library"
		cp "$root/usr/share/doc/$package/copyright" "$stage/licences/$package.txt"
	done << END
libjpeg.so.62 libjpeg62-turbo
libpng16.so.16 libpng16-16
libz.so.1 zlib1g
END
}

add_licences() {
	cp runtime/cpp/third_party/nlohmann/LICENSE "$stage/licences/nlohmann-json.txt"
	cp runtime/cpp/third_party/jinja/LICENSE "$stage/licences/llama.cpp-jinja.txt"
}

configure() {
	local options=(-DVTX_UNITY=ON -DVTX_DIST="$stage" -DCMAKE_INSTALL_LIBDIR=lib -DVTX_DIST_ARCHITECTURE="$architecture"
		-DVTX_DIST_GLIBC=$GLIBC -DCMAKE_DISABLE_FIND_PACKAGE_OpenVINO=ON)
	if [ "$architecture" = "$(uname -m)" ]; then
		cmake -S runtime/cpp -B "$folder/build" -G Ninja -DVTX_WERROR=ON "${options[@]}" > /dev/null
	else
		configure_aarch64 "$tools" "$folder/build" "${options[@]}"
	fi
	grep -q "VTX_HAS_JPEG.*VTX_HAS_PNG" "$folder/build/build.ninja" || fail "the headers of libjpeg and libpng are missing"
}

check_glibc() { # whether each file runs on the glibc that the package names
	local file newest
	for file in "$folder"/build/{libvtx.so,vtx-cpp-run} "$stage"/lib/*; do
		newest=$("$triple-objdump" -T "$file" | sed -n 's/.*(\?\(GLIBC_[0-9.]*\).*/\1/p' | sort -uV | tail -1)
		[ "$(printf '%s\n' "GLIBC_$GLIBC" "${newest:-}" | sort -V | tail -1)" = "GLIBC_$GLIBC" ] ||
			fail "$file needs $newest, which is newer than $GLIBC: build on Debian 12 or Ubuntu 22.04"
	done
}

case $architecture in
x86_64) root= ;;
aarch64)
	root=$([ "$(uname -m)" = aarch64 ] || echo "$tools/root")
	[ -z "$root" ] || unpack_aarch64 "$tools"
	[ ! -x "$root/usr/bin/$TRIPLE-g++" ] || export PATH=$root/usr/bin:$PATH LD_LIBRARY_PATH=$root/usr/lib/x86_64-linux-gnu
	;;
*) fail "architecture $architecture: x86_64 or aarch64" ;;
esac
rm -rf "$stage"
mkdir -p "$stage"/{lib,licences} dist
add_onnxruntime
add_llguidance
add_image_libraries "$root"
add_licences
configure
ninja -C "$folder/build" --quiet
check_glibc
(cd "$folder/build" && cpack > /dev/null)
mv "$folder"/build/vtx-*.tar.gz "$folder"/build/vtx_*.deb dist/
(cd dist && sha256sum vtx[-_]* > SHA256SUMS && ls -l vtx-*-"$architecture".tar.gz vtx_*.deb)
