# Debian's tools and libraries for aarch64 on an x86-64 Debian: sourced by test_aarch64.sh and dist_cpp.sh.
#
# unpack_aarch64 FOLDER: the cross compiler (unless this machine has it), qemu's user mode and the libraries for aarch64 into
# FOLDER/root; nothing is installed, and no root is needed.
# configure_aarch64 FOLDER BUILD OPTION...: libvtx for aarch64, configured in BUILD with these options.
# unpack_wheel REQUIREMENT ARCHITECTURE FOLDER: a wheel of the package index for that processor.

QEMU_SUITE=trixie # qemu 10; the 7.2 of Debian 12 crashes while ONNX Runtime reads the CPU's description
TRIPLE=aarch64-linux-gnu

fail() {
	echo "$1" >&2
	exit 1
}

# apt with sources, lists and packages of its own: for two architectures and two suites, whatever this machine has.
private_apt() {
	local suite=$1 mirror=$2 apt=$3
	mkdir -p "$apt"/{lists/partial,archives/partial}
	printf 'deb %s %s main\n' "$mirror" "$suite" "$mirror" "$QEMU_SUITE" | sort -u > "$apt/sources.list"
	cat > "$apt/apt.conf" << END
Dir::Etc::SourceList "$apt/sources.list";
Dir::Etc::SourceParts "-";
Dir::State::Lists "$apt/lists";
Dir::Cache "$apt";
Dir::Cache::Archives "$apt/archives";
APT::Architectures { "amd64"; "arm64"; };
APT::Default-Release "$suite";
APT::Install-Recommends "false";
APT::Sandbox::User "";
Acquire::Languages "none";
Debug::NoLocking "true";
END
	export APT_CONFIG=$apt/apt.conf
	apt-get -qq update
}

unpack_aarch64() (
	folder=$1
	[ ! -d "$folder/root" ] || exit 0
	[ "$(uname -m)" != aarch64 ] || fail "this machine is an aarch64: no other compiler is needed"
	command -v apt-get > /dev/null || fail "the aarch64 compiler and qemu come as Debian packages, and here is no apt-get"
	suite=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
	# shellcheck disable=SC2016 # apt's own variables
	mirror=$(apt-get indextargets --format '$(ORIGIN) $(CODENAME) $(REPO_URI)' 'Created-By: Packages' |
		awk -v suite="$suite" '$1 == "Debian" && $2 == suite { print $3; exit }')
	[ -n "$mirror" ] || fail "apt names no Debian mirror; the packages for aarch64 come from one"
	private_apt "$suite" "$mirror" "$folder/apt"
	cd "$folder/apt/archives"
	# What this machine has of the compiler already stays where it is.
	apt-get -qq --yes --download-only install g++-$TRIPLE
	apt-get -qq download "qemu-user/$QEMU_SUITE" {zlib1g,zlib1g-dev,libpng16-16,libpng-dev}:arm64 \
		{libjpeg62-turbo,libjpeg62-turbo-dev}:arm64
	for package in *.deb; do dpkg-deb --extract "$package" "$folder/root.part"; done
	# One folder of libraries, and no link out of the root.
	cp -a "$folder/root.part/lib/$TRIPLE/." "$folder/root.part/usr/lib/$TRIPLE/"
	ln -sf libz.so.1 "$folder/root.part/usr/lib/$TRIPLE/libz.so"
	rm -rf "$folder/apt"
	mv "$folder/root.part" "$folder/root"
)

configure_aarch64() {
	local root=$1/root build=$2 options=("${@:3}")
	if [ -x "$root/usr/bin/$TRIPLE-g++" ]; then
		export PATH=$root/usr/bin:$PATH LD_LIBRARY_PATH=$root/usr/lib/x86_64-linux-gnu
		options+=(-DCMAKE_SYSROOT="$root")
	else # the compiler of this machine does not look there by itself
		export CPLUS_INCLUDE_PATH=$root/usr/include/$TRIPLE
	fi
	cmake -S runtime/cpp -B "$build" -G Ninja -DVTX_WERROR=ON -DCMAKE_SYSTEM_NAME=Linux \
		-DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=$TRIPLE-g++ -DCMAKE_LIBRARY_ARCHITECTURE=$TRIPLE \
		-DCMAKE_FIND_ROOT_PATH="$root" -DCMAKE_FIND_ROOT_PATH_MODE_LIBRARY=ONLY \
		-DCMAKE_FIND_ROOT_PATH_MODE_INCLUDE=ONLY "${options[@]}" > /dev/null
}

unpack_wheel() {
	local requirement=$1 architecture=$2 folder=$3
	[ ! -d "$folder" ] || return 0
	python -m pip --quiet download --platform "manylinux_2_28_$architecture" --platform "manylinux_2_31_$architecture" \
		--only-binary=:all: --no-deps --dest "$folder.wheel" "$requirement"
	python -m zipfile -e "$folder".wheel/*.whl "$folder.part"
	mv "$folder.part" "$folder"
	rm -r "$folder.wheel"
}
