#!/usr/bin/env bash
# libFuzzer on everything untrusted that libvtx reads: SECONDS a target, from a few real files.
#
#   CXX=clang++ scripts/cpp_fuzz.sh BUNDLE FOLDER SECONDS
#
# The inputs that reach new code stay in FOLDER/corpus, so that the next run goes on from there. What a target once failed
# on belongs into tests/fuzz/cases/KIND, which every run tries first.
set -euo pipefail

bundle=$1 folder=$2 seconds=$3
compiler=${CXX:-clang++}
if ! command -v "$compiler" > /dev/null; then
	echo "no $compiler: libFuzzer comes with clang, on Debian in clang and libclang-rt-dev; nothing was run"
	exit 0
fi

cmake -S runtime/cpp -B "$folder" -G Ninja -DCMAKE_CXX_COMPILER="$compiler" -DVTX_FUZZ=ON -DVTX_UNITY=ON \
	-DVTX_BUILD_TOOLS=OFF > /dev/null
ninja -C "$folder" --quiet

seed() { # KIND FILE...
	mkdir -p "$folder/corpus/$1"
	cp "${@:2}" "$folder/corpus/$1"
}
seed manifest "$bundle/vtx.json"
seed tokenizer "$bundle/tokenizer.json"
seed safetensors "$bundle/rope.safetensors"
seed image examples/scene-1.jpg docs/images/kept.png
seed template "$bundle/chat_template.jinja"

for kind in manifest safetensors tokenizer template image; do
	known=tests/fuzz/cases/$kind
	[ -d "$known" ] || known=
	# shellcheck disable=SC2086 # an empty `known` is no argument
	"$folder/vtx-cpp-fuzz-$kind" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=3000 -verbosity=0 -print_final_stats=1 \
		-artifact_prefix="$folder/failed-$kind-" "$folder/corpus/$kind" $known 2> "$folder/$kind.log" ||
		{ tail -40 "$folder/$kind.log" >&2; exit 1; }
	echo "$kind: $(awk '/number_of_executed_units/ { print $2 }' "$folder/$kind.log") executions, clean"
done
