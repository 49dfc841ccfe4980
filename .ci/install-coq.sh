#!/usr/bin/env bash
# Installs Coq 8.16 and OCaml where they are missing (Debian and the like, as root): about 1 GB, 20 s.
set -euo pipefail

missing=()
for tool in coqc coq_makefile ocamlopt; do
  command -v "$tool" >/dev/null || missing+=("$tool")
done
[ "${#missing[@]}" -eq 0 ] && exit 0

how='apt-get update && apt-get install -y --no-install-recommends coq libcoq-stdlib ocaml-nox'
if ! command -v apt-get >/dev/null || [ "$(id -u)" -ne 0 ]; then
  echo "the proofs need ${missing[*]}; as root on Debian: $how" >&2
  exit 2
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends coq libcoq-stdlib ocaml-nox >/dev/null
coqc --version
