#!/usr/bin/env bash
# libvtx for aarch64 on an x86-64 Debian, and whether it answers there as it does here.
#
#   scripts/test_aarch64.sh BUNDLE FOLDER
#
# Debian's cross compiler, qemu's user mode and the aarch64 library of ONNX Runtime are unpacked into FOLDER; nothing is
# installed, and no root is needed. FOLDER/run/ then has vtx-cpp-run, -traces and -probe as programs of this machine: each
# starts the aarch64 one under qemu.
set -euo pipefail

QEMU_SUITE=trixie # qemu 10; the 7.2 of Debian 12 crashes while ONNX Runtime reads the CPU's description
TRIPLE=aarch64-linux-gnu
bundle=$1
mkdir -p "$2"
folder=$(cd "$2" && pwd)
root=$folder/root

fail() {
	echo "$1" >&2
	exit 1
}

[ "$(uname -m)" != aarch64 ] || fail "this machine is an aarch64: make test tests libvtx on it"
command -v apt-get > /dev/null || fail "the aarch64 compiler and qemu come as Debian packages, and here is no apt-get"
suite=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
# shellcheck disable=SC2016 # apt's own variables
mirror=$(apt-get indextargets --format '$(ORIGIN) $(CODENAME) $(REPO_URI)' 'Created-By: Packages' |
	awk -v suite="$suite" '$1 == "Debian" && $2 == suite { print $3; exit }')
[ -n "$mirror" ] || fail "apt names no Debian mirror; the packages for aarch64 come from one"

# apt with sources, lists and packages of its own: for two architectures and two suites, whatever this machine has.
private_apt() {
	mkdir -p "$folder"/apt/{lists/partial,archives/partial}
	printf 'deb %s %s main\n' "$mirror" "$suite" "$mirror" "$QEMU_SUITE" | sort -u > "$folder/apt/sources.list"
	cat > "$folder/apt/apt.conf" << END
Dir::Etc::SourceList "$folder/apt/sources.list";
Dir::Etc::SourceParts "-";
Dir::State::Lists "$folder/apt/lists";
Dir::Cache "$folder/apt";
Dir::Cache::Archives "$folder/apt/archives";
APT::Architectures { "amd64"; "arm64"; };
APT::Default-Release "$suite";
APT::Install-Recommends "false";
APT::Sandbox::User "";
Acquire::Languages "none";
Debug::NoLocking "true";
END
	export APT_CONFIG=$folder/apt/apt.conf
	apt-get -qq update
}

unpack_packages() {
	private_apt
	cd "$folder/apt/archives"
	# What this machine has of the compiler already stays where it is.
	apt-get -qq --yes --download-only install g++-$TRIPLE
	apt-get -qq download "qemu-user/$QEMU_SUITE" {zlib1g,zlib1g-dev,libpng16-16,libpng-dev}:arm64 \
		{libjpeg62-turbo,libjpeg62-turbo-dev}:arm64
	for package in *.deb; do dpkg-deb --extract "$package" "$root.part"; done
	cd - > /dev/null
	rm -rf "$folder/apt"
	mv "$root.part" "$root"
}

unpack_onnxruntime() {
	local version
	version=$(python -c 'from importlib.metadata import version; print(version("onnxruntime"))')
	python -m pip --quiet download --platform manylinux_2_28_aarch64 --only-binary=:all: --no-deps \
		--dest "$folder/wheel" "onnxruntime==$version"
	python -m zipfile -e "$folder"/wheel/onnxruntime-*.whl "$folder/onnxruntime.part"
	mv "$folder/onnxruntime.part" "$folder/onnxruntime"
}

build() {
	local options=()
	if [ -x "$root/usr/bin/$TRIPLE-g++" ]; then
		export PATH=$root/usr/bin:$PATH LD_LIBRARY_PATH=$root/usr/lib/x86_64-linux-gnu
		options=(-DCMAKE_SYSROOT="$root")
	fi
	cmake -S runtime/cpp -B "$folder/build" -G Ninja -DVTX_WERROR=ON -DVTX_BUILD_TESTS=ON -DCMAKE_SYSTEM_NAME=Linux \
		-DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=$TRIPLE-g++ -DCMAKE_LIBRARY_ARCHITECTURE=$TRIPLE \
		-DCMAKE_FIND_ROOT_PATH="$root" -DCMAKE_FIND_ROOT_PATH_MODE_LIBRARY=ONLY \
		-DCMAKE_FIND_ROOT_PATH_MODE_INCLUDE=ONLY "${options[@]}" > /dev/null
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

[ -d "$root" ] || unpack_packages
[ -d "$folder/onnxruntime" ] || unpack_onnxruntime
(build)
write_starters
compare
